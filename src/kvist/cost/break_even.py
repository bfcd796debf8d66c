"""When a cache pays at all: break-even bandwidth, break-even length, the five-minute rule.

Source: Mooncake (FAST'25) eq. 1-2; Gray & Putzolu's five-minute rule, with a GPU for the disk arm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvist.core.errors import ConfigError
from kvist.cost.model import ModelShape
from kvist.cost.prefill import PrefillCoefficients

_ATTENTION_FLOPS, _WEIGHT_FLOPS = 4, 22  # a and b of Mooncake's eq. 1
_HOUR_S = 3600.0
_GB = 1e9


def mooncake_break_even_bytes_per_s(
    flops_per_s: float,
    *,
    hidden: int,
    heads_per_kv_head: int,
    prefix_tokens: int,
    itemsize: int = 2,
) -> float:
    """Mooncake's eq. 2: bandwidth above which loading `prefix_tokens` beats computing them.

    It counts non-causal attention and takes `flops_per_s` as given (100 % utilisation).
    """
    work = _ATTENTION_FLOPS * prefix_tokens * hidden + _WEIGHT_FLOPS * hidden**2
    return flops_per_s * 2 * hidden * itemsize / (heads_per_kv_head * work)


def break_even_bytes_per_s(model: ModelShape, prefix_tokens: int, compute_s: float) -> float:
    """Bandwidth at which loading a prefix takes as long as `compute_s`; 0 where it is infinite."""
    return model.cache_bytes(prefix_tokens) / compute_s if compute_s > 0 else math.inf


def break_even_tokens(
    token_bytes: float, bytes_per_s: float, latency_s: float, prefill: PrefillCoefficients
) -> float:
    """Length from which on loading a prefix is faster than computing it; infinite if it never is.

    Args:
        prefill: what computing costs; the fixed part `a_s` is paid by the rest of the prompt in
            both cases and is left out.
    """
    if bytes_per_s <= 0:
        return math.inf
    # c·p² + (b - kv/B)·p - latency = 0
    slope = prefill.b_s - token_bytes / bytes_per_s
    if prefill.c_s <= 0:
        return latency_s / slope if slope > 0 else math.inf
    # The form without cancellation where the slope is above 0.
    root = math.sqrt(slope * slope + 4 * prefill.c_s * latency_s)
    if slope > 0:
        return 2 * latency_s / (slope + root)
    return (root - slope) / (2 * prefill.c_s)


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars: of one device an hour, and of a GB kept for an hour on a medium.

    Raises:
        ConfigError: a price that is not above 0.
    """

    device_per_hour: float
    gb_per_hour: float

    def __post_init__(self) -> None:
        for name in ("device_per_hour", "gb_per_hour"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError("must be above 0", path=f"$.prices.{name}")


def keep_s(token_bytes: float, compute_token_s: float, devices: int, prices: Prices) -> float:
    """The five-minute rule: keep KV that is used again within so many seconds.

    Args:
        compute_token_s: seconds that all `devices` together take to compute one token.
    """
    computing = devices * prices.device_per_hour / _HOUR_S * compute_token_s
    keeping = token_bytes * prices.gb_per_hour / _GB / _HOUR_S
    return computing / keeping if keeping > 0 else math.inf
