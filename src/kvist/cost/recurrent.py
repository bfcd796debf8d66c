"""Layers that keep a state of constant size: linear attention, Mamba, short convolutions."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.core.errors import UnsupportedError
from kvist.core.model_config import ATTENTION_KINDS, HIDDEN, Settings, integer

_STATE_ITEM_BYTES = 4  # recurrent states are kept in float32; convolutions in the KV dtype


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """How many layers attend and how many keep a recurrent state; the rest do neither."""

    attention: int
    recurrent: int


def recurrent_layers(found: Settings, layers: int) -> LayerSplit | None:
    """The split of a hybrid model's layers; `None` where no layer is recurrent.

    Raises:
        UnsupportedError: recurrent layers of a kind that cannot be counted.
    """
    pattern = found.get("hybrid_override_pattern")
    if pattern:  # Nemotron-H: M = Mamba, * = attention, - or E = MLP
        return LayerSplit(str(pattern).count("*"), str(pattern).count("M"))
    kinds = found.get("layer_types") or found.get("layers_block_type")
    if kinds:
        attending = sum(str(k) in ATTENTION_KINDS for k in kinds)
        if attending == len(kinds):
            return None
        both = sum(str(k) == "hybrid" for k in kinds)  # attention beside Mamba in one layer
        return LayerSplit(attending + both, len(kinds) - attending)
    interval = found.get("full_attention_interval") or found.get("attn_layer_period")
    if interval:
        offset = found.get("attn_layer_offset", int(interval) - 1)
        attending = len(range(int(offset), layers, int(interval)))
        return LayerSplit(attending, layers - attending)
    named = [n for n in ("ssm_cfg", "lru_width", "state_size", "ssm_state_size") if found.get(n)]
    if named or "mamba" in str(found.get("model_type", "")):
        raise UnsupportedError(
            f"recurrent layers that the config does not count ({(named or ['mamba'])[0]})",
            remedy="give a config with layer_types",
        )
    return None


def recurrent_state_bytes(found: Settings, split: LayerSplit, itemsize: int) -> int:
    """Bytes of one checkpoint of the state of all recurrent layers.

    Args:
        itemsize: bytes of an element of the convolution's state.

    Raises:
        UnsupportedError: the config does not say how large the state is.
    """
    if not split.recurrent:
        return 0
    if found.get("linear_num_value_heads"):  # gated delta net: Qwen3-Next, Qwen3.5
        keys = int(found["linear_num_key_heads"]) * int(found["linear_key_head_dim"])
        values = int(found["linear_num_value_heads"]) * int(found["linear_value_head_dim"])
        state = values * int(found["linear_key_head_dim"])
        channels, kernel = 2 * keys + values, int(found.get("linear_conv_kernel_dim") or 4)
    elif found.get("conv_L_cache"):  # LFM2: a short convolution and nothing else
        return split.recurrent * integer(found, HIDDEN) * int(found["conv_L_cache"]) * itemsize
    else:
        inner, size, channels = _mamba_sizes(found)
        state = inner * size
        kernel = int(found.get("mamba_d_conv") or found.get("conv_kernel") or 4)
    layer = state * _STATE_ITEM_BYTES + channels * (kernel - 1) * itemsize
    return split.recurrent * layer


def _mamba_sizes(found: Settings) -> tuple[int, int, int]:
    """(inner size, state size, convolved channels) of a Mamba layer, version 1 or 2."""
    size = found.get("mamba_d_state") or found.get("ssm_state_size")
    if not size:
        raise UnsupportedError(
            "recurrent layers of a size that the config does not say",
            remedy="give a config with mamba_d_state or linear_num_value_heads",
        )
    heads = found.get("mamba_n_heads") or found.get("mamba_num_heads")
    head = found.get("mamba_d_head") or found.get("mamba_head_dim")
    expand = int(found.get("mamba_expand") or found.get("expand") or 2)
    known = isinstance(heads, int) and isinstance(head, int)
    inner = int(heads) * int(head) if known else expand * integer(found, HIDDEN)  # type: ignore[arg-type]
    groups = found.get("mamba_n_groups") or found.get("n_groups")
    channels = inner + 2 * int(groups or 1) * int(size) if known else inner
    return inner, int(size), channels
