"""A Hugging Face config read as settings: layout, RoPE and windows, each in one spelling."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvist.core.errors import UnsupportedError
from kvist.core.layout import BlockLayout
from kvist.core.model_config import (
    ATTENTION_KINDS,
    HEADS,
    HIDDEN,
    LAYERS,
    Settings,
    integer,
    kv_heads,
    layer_kinds,
    settings,
    window_tokens,
)

_STATE_SPACE = [
    "ssm_cfg",
    "mamba_d_state",
    "mamba_config",
    "ssm_state_size",
    "state_size",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "hybrid_override_pattern",
    "layers_block_type",
    "conv_L_cache",
    "lru_width",
]
_ROPE_ALIASES = {"su": "longrope", "mrope": "default"}
_NEEDS_ORIGINAL = {"llama3", "yarn", "longrope", "dynamic"}
_NEEDS_MAX = {"yarn", "longrope", "dynamic"}
_BY_LENGTH = {"longrope", "dynamic"}
_RECURRENCE = "keep its prefix cache to the engine: a recurrent state is not a KV block"


def to_json(value: object) -> str:
    """Canonical JSON text: keys sorted, no spaces, integral floats as integers."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))


def model_layout(config: object, block_tokens: int, kv_dtype: str) -> BlockLayout:
    """The canonical block of a model.

    Raises:
        UnsupportedError: the model keeps state that one canonical block cannot express.
        LayoutError: an unknown dtype, or a size below 1.
    """
    found = settings(config)
    _refuse_inexpressible(found)
    layers = integer(found, LAYERS)
    if found.get("kv_lora_rank"):
        latent = int(found["kv_lora_rank"]) + int(found.get("qk_rope_head_dim") or 0)
        return BlockLayout(layers, 1, latent, block_tokens, kv_dtype, kinds=1)
    heads = integer(found, HEADS)
    head_dim = found.get("head_dim") or integer(found, HIDDEN) // heads
    return BlockLayout(layers, kv_heads(found, heads), int(head_dim), block_tokens, kv_dtype)


def windows_text(config: object) -> str:
    """`null` where no layer has a window, else JSON: per layer its window in tokens, or null.

    A chunked-attention layer (Llama 4) says `{"chunk":n}`.
    """
    found = settings(config)
    layers = integer(found, LAYERS)
    window, chunk = window_tokens(found), found.get("attention_chunk_size")
    per_layer: list[object] = []
    for kind in layer_kinds(found, layers):
        if kind == "sliding_attention" and window:
            per_layer.append(window)
        elif kind == "chunked_attention" and chunk:
            per_layer.append({"chunk": int(chunk)})
        else:
            per_layer.append(None)
    return to_json(per_layer) if any(w is not None for w in per_layer) else "null"


def rope_text(config: object) -> str:
    """Canonical JSON of the position encoding: `rope_theta` + `rope_scaling` (old) and
    `rope_parameters` (new) come out equal. `null` for a model without RoPE.
    """
    found = settings(config)
    rope = _rope(found)
    skipped = found.get("no_rope_layers")
    if rope and isinstance(skipped, Sequence) and not all(skipped):
        rope = {"rope": rope, "rope_layers": [bool(s) for s in skipped]}
    return to_json(rope or None)


def length_dependent(found: Settings) -> bool:
    """Whether the RoPE of early tokens changes with the length of the whole sequence."""
    rope = _rope(found)
    groups = [rope] if "rope_type" in rope else list(rope.values())
    return any(isinstance(g, Mapping) and g.get("rope_type") in _BY_LENGTH for g in groups)


def _refuse_inexpressible(found: Settings) -> None:
    kind = str(found.get("model_type", ""))
    layer_types = set(found.get("layer_types") or ()) - ATTENTION_KINDS
    if layer_types or "mamba" in kind or any(found.get(name) for name in _STATE_SPACE):
        what = ", ".join(sorted(str(t) for t in layer_types)) or kind or "state-space"
        raise UnsupportedError(f"layers with recurrent state ({what})", remedy=_RECURRENCE)
    if found.get("is_encoder_decoder"):
        raise UnsupportedError("encoder-decoder models", remedy="use a decoder-only model")
    if found.get("num_kv_shared_layers") or found.get("use_cla"):
        raise UnsupportedError(
            "layers that share one KV cache", remedy="use a model whose layers each keep their own"
        )
    if found.get("index_topk") or found.get("index_head_dim"):
        raise UnsupportedError(
            "sparse attention with an indexer cache", remedy="use a model without an indexer"
        )
    head_dim, other = found.get("head_dim"), found.get("v_head_dim")
    mixed = (
        any(isinstance(found.get(n), list) for n in ("head_dim", "num_key_value_heads"))
        or bool(found.get("block_configs"))
        or found.get("global_head_dim") not in (None, head_dim)
        or any(str(name).startswith("swa_") and found[name] is not None for name in found)
        or found.get("num_global_key_value_heads") not in (None, found.get("num_key_value_heads"))
        or (not found.get("kv_lora_rank") and head_dim and other not in (None, head_dim))
    )
    if mixed:
        raise UnsupportedError(
            "KV heads of more than one size or number",
            remedy="use a model whose layers all have the same KV heads",
        )


def _rope(found: Settings) -> dict[str, Any]:
    params = found.get("rope_parameters") or found.get("rope_scaling") or {}
    theta = found.get("rope_theta", found.get("rotary_emb_base"))
    if not isinstance(params, Mapping) or (not params and theta is None):
        return {}
    nested = {k: v for k, v in params.items() if isinstance(v, Mapping)}
    if nested:
        groups = {k: _rope_group(found, v, theta) for k, v in nested.items()}
    else:
        groups = {"": _rope_group(found, params, theta)}
        local = found.get("rope_local_base_freq")
        if local is not None:  # Gemma 3 before rope_parameters: the scaling is the global layers'
            groups = {"full_attention": groups[""], "sliding_attention": _local_rope(found, local)}
    values = list(groups.values())
    # Layer types that share one setting are the same model as a flat spelling of it.
    return values[0] if all(v == values[0] for v in values) else groups


def _local_rope(found: Settings, theta: float) -> dict[str, Any]:
    return _rope_group(found, {"rope_type": "default"}, theta)


def _rope_group(found: Settings, params: Settings, theta: float | None) -> dict[str, Any]:
    kind = str(params.get("rope_type") or params.get("type") or "default")
    kind = _ROPE_ALIASES.get(kind, kind)
    out = {k: v for k, v in params.items() if k not in ("type", "rope_type") and v is not None}
    out["rope_type"] = kind
    if "rope_theta" not in out and theta is not None:
        out["rope_theta"] = theta
    factor = found.get("partial_rotary_factor", found.get("rotary_pct"))
    if "partial_rotary_factor" not in out and factor is not None:
        out["partial_rotary_factor"] = factor
    if out.get("partial_rotary_factor") == 1:
        del out["partial_rotary_factor"]  # the default: all of the head turns
    for name in ("rotary_dim", "qk_rope_head_dim", "rope_interleave"):
        if found.get(name) is not None:
            out[name] = found[name]
    longest = found.get("max_position_embeddings")
    original = found.get("original_max_position_embeddings")
    if kind in _NEEDS_ORIGINAL:
        # As Transformers has it, the config's own field is stronger than the RoPE's.
        out["original_max_position_embeddings"] = (
            original or out.get("original_max_position_embeddings") or longest
        )
    else:
        out.pop("original_max_position_embeddings", None)
    if kind in _NEEDS_MAX:
        out["max_position_embeddings"] = longest
    return out


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(v) for v in value)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        # 10000 and 10000.0 are one setting, spelt by two writers.
        return int(value) if float(value).is_integer() else value
    if callable(getattr(value, "to_dict", None)):
        return _plain(value.to_dict())  # type: ignore[attr-defined]
    return str(value)
