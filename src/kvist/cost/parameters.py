"""How many weights a model has, and how many of them one token uses, counted from its config.

Norms, biases and routers are left out (below 1 %). The output matrix counts as used by every
token, as in the published counts of active parameters, although a prefill uses it once.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvist.core.model_config import HEADS, HIDDEN, Settings, first_of, integer, kv_heads
from kvist.cost.recurrent import LayerSplit

_FORWARD = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "inner_dim")
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts", "moe_topk")
_PLAIN_MLP = {"gpt2", "opt", "gpt_neox", "falcon", "gpt_bigcode", "phi", "mpt", "bloom"}


@dataclass(frozen=True, slots=True)
class Parameters:
    """Weights of the model, and those that one token uses."""

    total: int
    active: int


def count_parameters(found: Settings, layers: int, split: LayerSplit | None) -> Parameters:
    """Counts from the settings of a config (see `kvist.core.model_config.settings`).

    Raises:
        UnsupportedError: layers, heads or sizes are missing.
    """
    hidden = integer(found, HIDDEN)
    vocabulary = int(found.get("vocab_size") or 0) * hidden
    tied = bool(found.get("tie_word_embeddings"))
    attending = split.attention if split else layers
    mixing = attending * _attention(found, hidden)
    if split:
        mixing += split.recurrent * _recurrent(found, hidden)
    dense, total, active = _forward(found, layers, hidden)
    shared = mixing + dense
    return Parameters(
        total=shared + total + vocabulary * (1 if tied else 2),
        active=shared + active + vocabulary * (1 if tied else 2),
    )


def _attention(found: Settings, hidden: int) -> int:
    heads = integer(found, HEADS)
    if found.get("kv_lora_rank"):
        latent, rope = int(found["kv_lora_rank"]), int(found.get("qk_rope_head_dim") or 0)
        nope = int(found.get("qk_nope_head_dim") or 0)
        value = int(found.get("v_head_dim") or nope)
        low = found.get("q_lora_rank")
        query = heads * (nope + rope)
        down = int(low) * (hidden + query) if low else hidden * query
        return (
            down
            + hidden * (latent + rope)
            + latent * heads * (nope + value)
            + (heads * value * hidden)
        )
    size = int(found.get("head_dim") or hidden // heads)
    gate = 2 if found.get("attn_output_gate") or found.get("model_type") == "qwen3_next" else 1
    return hidden * size * (heads * (1 + gate) + 2 * kv_heads(found, heads))


def _recurrent(found: Settings, hidden: int) -> int:
    if found.get("linear_num_value_heads"):
        keys = int(found["linear_num_key_heads"]) * int(found["linear_key_head_dim"])
        values = int(found["linear_num_value_heads"]) * int(found["linear_value_head_dim"])
        return hidden * (2 * keys + 3 * values)
    if found.get("conv_L_cache"):
        return 4 * hidden * hidden
    heads = found.get("mamba_n_heads") or found.get("mamba_num_heads")
    head = found.get("mamba_d_head") or found.get("mamba_head_dim")
    whole = isinstance(heads, int) and isinstance(head, int)
    inner = heads * head if whole else 2 * hidden  # type: ignore[operator]
    return 3 * hidden * int(inner)


def _forward(found: Settings, layers: int, hidden: int) -> tuple[int, int, int]:
    """(weights of dense layers and shared experts, of all experts, of the chosen experts)."""
    matrices = 2 if str(found.get("model_type", "")) in _PLAIN_MLP else 3
    wide = first_of(found, _FORWARD)
    dense = matrices * hidden * int(wide if isinstance(wide, int) else 4 * hidden)
    pattern = str(found.get("hybrid_override_pattern") or "")
    forward_layers = pattern.count("-") + pattern.count("E") if pattern else layers
    experts = first_of(found, _EXPERTS)
    if not isinstance(experts, int) or experts < 2:
        return forward_layers * dense, 0, 0
    chosen = int(first_of(found, _CHOSEN) or 1)
    narrow = found.get("moe_intermediate_size")
    one = 3 * hidden * int(narrow) if isinstance(narrow, int) else dense
    plain = int(found.get("first_k_dense_replace") or 0) + len(found.get("mlp_only_layers") or ())
    step = int(found.get("decoder_sparse_step") or found.get("interleave_moe_layer_step") or 1)
    routed = (forward_layers - plain) // step
    common = int(found.get("n_shared_experts") or 0) * one
    if found.get("shared_expert_intermediate_size"):
        common = 3 * hidden * int(found["shared_expert_intermediate_size"])
    if str(found.get("model_type", "")).startswith("gemma4"):
        common = dense  # a dense MLP beside the experts
    rest = (forward_layers - routed) * dense + routed * common
    return rest, routed * experts * one, routed * chosen * one
