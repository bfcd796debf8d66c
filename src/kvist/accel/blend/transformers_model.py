"""A Transformers model as repair sees it, through the model's own modules.

Known are the families whose layer is: norm, attention, residual, norm, MLP, residual, and nothing
else. What is not known is refused; what is known is proven at start-up (`proof.py`) all the same.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kvist.accel.blend.model import BlendShape
from kvist.accel.blend.relocate import Rope, RopeStyle
from kvist.core.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

# model_type → how its RoPE pairs the elements of a head.
_FAMILIES = {
    "llama": RopeStyle.HALVES,
    "mistral": RopeStyle.HALVES,
    "qwen2": RopeStyle.HALVES,
    "qwen3": RopeStyle.HALVES,
    "smollm3": RopeStyle.HALVES,
    "phi3": RopeStyle.HALVES,
    "glm": RopeStyle.PAIRS,
}
_STEADY_ROPES = {"default", "linear", "llama3", "yarn"}


class TransformersBlendModel:
    """A `BlendModel` over a loaded causal language model."""

    def __init__(self, model: Any) -> None:
        """Reads the model; changes nothing in it.

        Raises:
            UnsupportedError: an unknown family, a sliding window, or a RoPE whose frequencies
                depend on the length of the sequence.
        """
        self._style = _style(model)
        self._model = model
        self._base = model.model
        self._layers = list(self._base.layers)
        attention = self._layers[0].self_attn
        config = model.config
        self.shape = BlendShape(
            layers=len(self._layers),
            heads=int(config.num_attention_heads),
            kv_heads=int(config.num_key_value_heads),
            head_dim=int(attention.head_dim),
            scale=float(attention.scaling),
        )
        self._rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
        self._rope = Rope(_steady_frequencies(self._base.rotary_emb, config), self._style)
        self._angles: tuple[Tensor, Tensor, Tensor] | None = None

    def embed(self, tokens: Tensor) -> Tensor:
        """`[n]` int64 → `[n, hidden]`."""
        return self._base.embed_tokens(tokens)

    def project(
        self, layer: int, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `BlendModel.project`."""
        block = self._layers[layer]
        attention, shape = block.self_attn, self.shape
        x = block.input_layernorm(hidden)
        if hasattr(attention, "qkv_proj"):
            sizes = [shape.heads, shape.kv_heads, shape.kv_heads]
            q, k, v = attention.qkv_proj(x).split([n * shape.head_dim for n in sizes], dim=-1)
        else:
            q, k, v = attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)
        q, k, v = (t.view(len(hidden), -1, shape.head_dim) for t in (q, k, v))
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        if self.rope(layer) is not None:
            cos, sin = self._cos_sin(hidden, positions)
            # The model's own function, over [1, heads, n, head_dim].
            q, k = self._rotate(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
            q, k = q[0].transpose(0, 1), k[0].transpose(0, 1)
        return q, k, v

    def finish(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """As `BlendModel.finish`."""
        block = self._layers[layer]
        hidden = hidden + block.self_attn.o_proj(attended)
        return hidden + block.mlp(block.post_attention_layernorm(hidden))

    def rope(self, layer: int) -> Rope | None:
        """As `BlendModel.rope`."""
        return self._rope if getattr(self._layers[layer].self_attn, "use_rope", True) else None

    def logits(self, hidden: Tensor) -> Tensor:
        """`[n, hidden]` of the last layer → `[n, vocabulary]`."""
        return self._model.lm_head(self._base.norm(hidden))

    def own_pass(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the model computes by itself, for the proof.

        Args:
            tokens: `[n]` int64.

        Returns:
            keys and values `[layers, kv_heads, n, head_dim]`, logits `[n, vocabulary]`.
        """
        import torch

        with torch.no_grad():
            out = self._model(tokens[None], use_cache=True)
        layers = out.past_key_values.layers
        keys = torch.stack([layer.keys[0] for layer in layers])
        values = torch.stack([layer.values[0] for layer in layers])
        return keys, values, out.logits[0]

    def _cos_sin(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Layer after layer asks for the same positions: the last answer is kept."""
        if self._angles is None or self._angles[0] is not positions:
            cos, sin = self._base.rotary_emb(hidden[None], position_ids=positions[None])
            self._angles = positions, cos, sin
        return self._angles[1], self._angles[2]


def _style(model: Any) -> RopeStyle:
    config = model.config
    kind = str(getattr(config, "model_type", ""))
    base = getattr(model, "model", None)
    home = f"transformers.models.{kind}."
    known = kind in _FAMILIES and base is not None and hasattr(model, "lm_head")
    layers = list(base.layers) if base is not None and known else []
    if not known or any(not type(p).__module__.startswith(home) for p in (model, base, *layers)):
        raise UnsupportedError(
            f"blend for {type(model).__name__}",
            remedy=f"known families: {', '.join(sorted(_FAMILIES))}",
        )
    if any(part._forward_hooks or part._forward_pre_hooks for part in layers):
        raise UnsupportedError("blend for a model with hooks on its layers", remedy="remove them")
    # Where attention has no window of its own, it reads the config's.
    widest = getattr(config, "sliding_window", None)
    if any(getattr(layer.self_attn, "sliding_window", widest) for layer in layers):
        raise UnsupportedError("blend with sliding windows", remedy="leave blend off")
    return _FAMILIES[kind]


def _steady_frequencies(rotary: Any, config: Any) -> tuple[float, ...]:
    """The model's inverse frequencies, if they are the same whatever the sequence's length."""
    kind = str(rotary.rope_type)
    steady = kind in _STEADY_ROPES
    if kind == "longrope":
        factors = config.rope_parameters
        steady = list(factors["short_factor"]) == list(factors["long_factor"])
    if not steady:
        raise UnsupportedError(
            f"blend with {kind} RoPE, whose frequencies depend on the sequence's length",
            remedy="leave blend off",
        )
    return tuple(float(f) for f in rotary.inv_freq.float().tolist())
