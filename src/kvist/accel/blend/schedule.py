"""How many cached tokens are computed again in which layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

CHECK_LAYER = 1  # the first whose KV depends on what stands before the token
SPREAD_RATIO = 0.5  # how far the first kept share lies above the mean, and the last below


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """What a repair may do.

    `ratio` of the cached tokens are computed again, as a mean over the layers from `check_layer`
    on; 0 leaves them as they were stored, 1 computes all. `most_deviation_ratio`: if the tokens
    that would be left deviate by more, on average, all are computed.

    Raises:
        ValueError: `ratio` outside [0, 1], `check_layer` below 1, or a negative bound.
    """

    ratio: float
    most_deviation_ratio: float = math.inf
    check_layer: int = CHECK_LAYER
    spread_ratio: float = SPREAD_RATIO

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"a ratio must lie in [0, 1], not {self.ratio}")
        if self.check_layer < 1 or not self.most_deviation_ratio >= 0:
            raise ValueError(f"no repair can follow {self}")
        if not 0 <= self.spread_ratio <= 1:
            raise ValueError(f"a spread must lie in [0, 1], not {self.spread_ratio}")


def kept_tokens(plan: RepairPlan, cached_tokens: int, layers: int) -> tuple[int, ...]:
    """Cached tokens computed again in each layer from `check_layer` on; never rising.

    Their mean over those layers is `ratio × cached_tokens` within a token (gradual filtering).

    Source: Yao et al., "CacheBlend" (EuroSys'25), §4.3; the paper does not say how fast the shares
    fall: here along a line.
    """
    steps = max(0, layers - plan.check_layer)
    if not 0 < plan.ratio < 1:
        return (round(plan.ratio) * cached_tokens,) * steps
    spread = min(plan.spread_ratio, 1 / plan.ratio - 1)
    kept = []
    for step in range(steps):
        slope = 1 - 2 * step / (steps - 1) if steps > 1 else 0.0  # 1 … -1
        kept.append(math.ceil(plan.ratio * (1 + spread * slope) * cached_tokens - 1e-9))
    return tuple(min(cached_tokens, n) for n in kept)
