"""A Hugging Face `config.json` in one spelling: what its many writers call layers, heads, windows.

Both the connectors (what a block is) and the cost model (how big and how dear it is) read configs
through here, so they cannot disagree about a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvist.core.errors import UnsupportedError

Settings = Mapping[str, Any]

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
HIDDEN = ("hidden_size", "n_embd", "d_model")
ATTENTION_KINDS = frozenset(
    ("full_attention", "sliding_attention", "chunked_attention", "attention")
)
_TEXT = ("text_config", "llm_config", "language_config")


def settings(config: object) -> dict[str, Any]:
    """The text model's settings from a config object or dict; nested text configs are entered.

    Raises:
        UnsupportedError: `config` is neither.
    """
    if isinstance(config, Mapping):
        found = dict(config)
    elif callable(getattr(config, "to_dict", None)):
        found = dict(config.to_dict())  # type: ignore[attr-defined]
    else:
        raise UnsupportedError(f"a model config was expected, not {type(config).__name__}")
    for name in _TEXT:
        nested = found.get(name)
        if isinstance(nested, Mapping) and first_of(nested, LAYERS) is not None:
            # The outer config may say what the inner does not (quantisation, tied settings).
            outer = {k: v for k, v in found.items() if k == "quantization_config"}
            return {**outer, **nested}
    return found


def first_of(found: Settings, names: Sequence[str]) -> Any:
    """Value of the first of `names` that is set; `None` if none is."""
    return next((found[n] for n in names if found.get(n) is not None), None)


def integer(found: Settings, names: Sequence[str]) -> int:
    """The whole number that one of `names` holds.

    Raises:
        UnsupportedError: none does.
    """
    value = first_of(found, names)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UnsupportedError(
            f"the config has no {names[0]}", remedy="give the config.json of a decoder-only model"
        )
    return value


def kv_heads(found: Settings, heads: int) -> int:
    """Number of KV heads of a layer, where `heads` is that of its query heads."""
    if found.get("multi_query") and not found.get("new_decoder_architecture"):
        return 1  # Falcon 7B, GPT-BigCode
    value = found.get("num_key_value_heads") or found.get("num_kv_heads")
    return int(value) if value else heads


def window_tokens(found: Settings) -> int | None:
    """Tokens that a sliding-window layer sees; `None` where no layer has a window."""
    window = found.get("sliding_window")
    return int(window) if window and found.get("use_sliding_window") is not False else None


def layer_kinds(found: Settings, layers: int) -> list[str]:
    """Attention kind of each layer; older configs imply it by pattern or by model type."""
    if found.get("layer_types"):
        return [str(kind) for kind in found["layer_types"]]
    if not found.get("sliding_window"):
        return ["full_attention"] * layers
    kind = str(found.get("model_type", ""))
    default = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4}.get(kind, 0)
    pattern = int(found.get("sliding_window_pattern") or default)
    first = int(found.get("max_window_layers") or 0)
    sliding = [(not pattern or (i + 1) % pattern != 0) and i >= first for i in range(layers)]
    return ["sliding_attention" if s else "full_attention" for s in sliding]
