"""Whether a blend pays, and at which ratio: the budget of `accel/blend`, fed by what is learned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvist.accel.blend.budget import (
    BlendWork,
    PassFactor,
    RatioChoice,
    RatioReason,
    choose_ratio,
)
from kvist.connectors.appraiser import Appraiser
from kvist.connectors.vllm.blend_plan import Region
from kvist.core.outcome import Tier

_MARGIN_RATIO = 0.1  # of a prefill, what a blend must be predicted to save


@dataclass(slots=True)
class BlendCost:
    """What one engine has learned about blending. One owner."""

    appraiser: Appraiser
    layers: int
    floor_ratio: float
    factor: PassFactor = field(default_factory=PassFactor)

    def choose(self, region: Region, tiers: Sequence[Tier]) -> RatioChoice:
        """The ratio for a region whose blocks are in `tiers`; 1 with a reason: do not blend.

        vLLM takes what was loaded only when the load is over, so nothing hides behind it.
        """
        work = BlendWork(region.stop, region.exact, region.span_tokens, self.layers)
        choice = choose_ratio(
            work,
            self.appraiser.prefill,
            load_s=self.appraiser.load_s(tiers),
            floor_ratio=self.floor_ratio,
            pass_factor=self.factor.factor,
            margin_ratio=_MARGIN_RATIO,
        )
        if choice.reason is RatioReason.RECOMPUTE_FASTER:
            self.factor.declined()
        return choice

    def observe(self, choice: RatioChoice, seconds: float) -> None:
        """A blend took so long in the worker."""
        self.factor.observe(choice, seconds)

    def most_wait_s(self, choice: RatioChoice) -> float:
        """How long blocks may take to come until computing would have been as fast."""
        if choice.reason is RatioReason.UNMEASURED:
            return math.inf
        return max(0.0, choice.full_s - choice.pass_s)
