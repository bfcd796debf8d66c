"""vLLM's own modules as blend sees a model: everything of a decoder layer but its attention.

Weights, norms and rotations are the engine's; only the attention operation is left out, since it
reads the engine's pages and the state of a step. Calls must come from the engine's own thread:
vLLM's CPU linear layers keep state that two threads would spoil.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvist.accel.blend.attention import attend
from kvist.accel.blend.model import BlendShape
from kvist.accel.blend.relocate import Rope, RopeStyle
from kvist.connectors.vllm.engine_model import check_attention
from kvist.core.errors import UnsupportedError

_ROTARY_PACKAGE = "vllm.model_executor.layers.rotary_embedding."
_MOST_CHECKED = 4096  # positions of a rotation table; angles lose a digit for every ten times more


class VllmBlendModel:
    """A `BlendModel` over vLLM's Llama, Mistral, Qwen2 or Qwen3 on one rank."""

    def __init__(self, decoder: Any, vllm_config: Any) -> None:
        """Raises:
        UnsupportedError: a layer holds something that is not known here.
        """
        self._decoder, self._vllm_config = decoder, vllm_config
        self._layers: list[Any] = list(decoder.layers)
        attention = self._layers[0].self_attn
        for layer in self._layers:
            _check_layer(layer)
            if _sizes(layer.self_attn) != _sizes(attention):
                raise UnsupportedError("blend does not know layers of different sizes")
        self._shape = BlendShape(len(self._layers), *_sizes(attention))
        rotaries = {id(r): r for r in (layer.self_attn.rotary_emb for layer in self._layers)}
        known = {number: _rope(rotary) for number, rotary in rotaries.items()}
        self._ropes = [known[id(layer.self_attn.rotary_emb)] for layer in self._layers]
        self.positions = min(len(rotary.cos_sin_cache) for rotary in rotaries.values())
        self.dtype: torch.dtype = next(decoder.parameters()).dtype
        self.device: torch.device = next(decoder.parameters()).device

    @property
    def shape(self) -> BlendShape:
        """Sizes, the same in every layer."""
        return self._shape

    def embed(self, tokens: Tensor) -> Tensor:
        """`[n]` int64 → `[n, hidden]`."""
        found: Tensor = self._decoder.embed_tokens(tokens)
        return found

    def project(
        self, layer: int, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`[n, hidden]` at `positions` → q `[n, heads, d]`, k and v `[n, kv_heads, d]`.

        Raises:
            UnsupportedError: a position beyond the model's rotation table.
        """
        if len(positions) and int(positions.max()) >= self.positions:
            raise UnsupportedError(f"the model has no position {int(positions.max())}")
        block = self._layers[layer]
        attention, shape = block.self_attn, self._shape
        qkv, _ = attention.qkv_proj(block.input_layernorm(hidden))
        sizes = [attention.q_size, attention.kv_size, attention.kv_size]
        q, k, v = qkv.split(sizes, dim=-1)
        if hasattr(attention, "q_norm"):
            q = attention.q_norm(q.reshape(-1, shape.heads, shape.head_dim)).reshape(q.shape)
            k = attention.k_norm(k.reshape(-1, shape.kv_heads, shape.head_dim)).reshape(k.shape)
        q, k = attention.rotary_emb(positions, q, k)
        return (
            q.reshape(-1, shape.heads, shape.head_dim),
            k.reshape(-1, shape.kv_heads, shape.head_dim),
            v.reshape(-1, shape.kv_heads, shape.head_dim),
        )

    def finish(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """`[n, hidden]` before the layer, attention `[n, heads · d]` → `[n, hidden]` after it."""
        block = self._layers[layer]
        out, _ = block.self_attn.o_proj(attended)
        # the fused norm adds in place: the caller keeps its hidden states
        out, residual = block.post_attention_layernorm(out, hidden.clone())
        done: Tensor = block.mlp(out) + residual
        return done

    def own_pass(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the engine's own decoder computes, with plain attention in place of the operation.

        Args:
            tokens: `[n]` int64.

        Returns:
            keys and values `[layers, kv_heads, n, head_dim]`; `[n, hidden]` after the last norm.
        """
        from vllm.forward_context import set_forward_context

        shape, seen = self._shape, list[tuple[Tensor, Tensor]]()

        def attention(module: object, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
            q, k, v = (x.reshape(len(tokens), -1, shape.head_dim) for x in given)
            seen.append((k.transpose(0, 1).clone(), v.transpose(0, 1).clone()))
            return attend(q, *seen[-1], positions, shape.scale)

        positions = torch.arange(len(tokens), device=tokens.device)
        hooks = [x.self_attn.attn.register_forward_hook(attention) for x in self._layers]
        try:
            context = set_forward_context(None, self._vllm_config, skip_compiled=True)
            with torch.inference_mode(), context:
                out: Tensor = self._decoder(tokens, positions, None)
        finally:
            for hook in hooks:
                hook.remove()
        keys, values = zip(*seen, strict=True)
        return torch.stack(keys), torch.stack(values), out

    def logits(self, hidden: Tensor) -> Tensor:
        """`[n, hidden]` of the last layer → the same after the last norm, which is as telling."""
        out: Tensor = self._decoder.norm(hidden)
        return out

    def rope(self, layer: int) -> Rope | None:
        """How the keys of a layer are rotated."""
        return self._ropes[layer]


def _sizes(attention: Any) -> tuple[int, int, int, float]:
    return (
        attention.num_heads,
        attention.num_kv_heads,
        attention.head_dim,
        float(attention.attn.impl.scale),
    )


def _check_layer(layer: Any) -> None:
    attention = layer.self_attn
    check_attention(attention.attn)
    for owner, name in (
        (attention, "do_llama_4_scaling"),
        (attention, "dual_chunk_attention_config"),
        (layer, "ada_rms_norm_t_cond"),
    ):
        if getattr(owner, name, None):
            raise UnsupportedError(f"blend does not know layers with {name}")
    normed = hasattr(attention, "q_norm"), hasattr(attention, "k_norm")
    qk_norm = getattr(attention, "qk_norm", normed[0])
    if normed not in ((qk_norm, qk_norm),):
        raise UnsupportedError("blend does not know layers that norm queries but not keys")


def _rope(rotary: Any) -> Rope:
    """The rotation of one layer, read from the module and held against its own table."""
    kind = type(rotary)
    if not kind.__module__.startswith(_ROTARY_PACKAGE):
        raise UnsupportedError(f"blend does not know the rotation {kind.__name__}")
    if kind.__name__ in ("RotaryEmbedding", "Llama3RotaryEmbedding"):
        frequencies = rotary._compute_inv_freq(rotary.base)
    elif kind.__name__ == "LinearScalingRotaryEmbedding" and len(rotary.scaling_factors) == 1:
        frequencies = rotary._compute_inv_freq(rotary.base) / rotary.scaling_factors[0]
    elif kind.__name__ == "YaRNScalingRotaryEmbedding":
        frequencies = rotary._compute_inv_freq(rotary.scaling_factor)
    else:
        raise UnsupportedError(f"blend does not know the rotation {kind.__name__}")
    frequencies = frequencies.detach().to("cpu", torch.float32)
    _check_table(rotary, frequencies)
    style = RopeStyle.HALVES if rotary.is_neox_style else RopeStyle.PAIRS
    return Rope(tuple(frequencies.tolist()), style)


def _check_table(rotary: Any, frequencies: Tensor) -> None:
    """Cosine and sine of these frequencies must be what the module multiplies with."""
    table = rotary.cos_sin_cache[:_MOST_CHECKED].detach().to("cpu", torch.float32)
    amplitude = float(getattr(rotary, "mscale", 1.0))
    positions = torch.arange(table.shape[0], dtype=torch.float32)
    angles = positions[:, None] * frequencies
    want = torch.cat((angles.cos(), angles.sin()), dim=-1) * amplitude
    slack = 1e-2 if rotary.cos_sin_cache.dtype in (torch.bfloat16, torch.float16) else 1e-3
    if table.shape != want.shape or float((table - want).abs().max()) > slack * amplitude:
        raise UnsupportedError("the engine's rotation table is not that of its frequencies")
