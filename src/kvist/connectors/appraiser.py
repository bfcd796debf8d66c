"""Whether a load pays: what one engine has learned about its own speed and that of its tiers.

Theory of operation. Three things are learned while the engine works: how long a prefill pass takes
(`passed`), how fast blocks are copied between DRAM and the engine's pages (`copied`), and how fast
the tiers below are read, whoever asked for it (`read`). `plan` puts them to `cost.plan_load`. As
long as no pass was seen there is nothing to compare a load with, and everything that matched is
loaded; what was learned is therefore kept from one start to the next (`speeds.py`). A tier that
was not read yet is taken to be fast: the cut-off bounds what that can cost.

Pure but for what it has learned: no clock, no I/O, one owner.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from kvist.connectors.speeds import Speeds
from kvist.core.outcome import Match, ReadTotals, Tier
from kvist.cost.learner import WARM_UP
from kvist.cost.plan_load import LoadCosts, LoadDecision, Reason, fell_behind, plan_load
from kvist.cost.prefill import PrefillCoefficients, PrefillTimes
from kvist.cost.transfer import LoadOverhead, PathSpeed, PathState, TransferTimes

# What a tier is taken for until it was read: as fast as any, so that it will be.
_GUESS = {
    Tier.DRAM: PathSpeed(0.0, 10e9),
    Tier.SSD: PathSpeed(1e-3, 5e9),
    Tier.PEER: PathSpeed(1e-3, 2e9),
    Tier.REMOTE: PathSpeed(5e-3, 1e9),
}
_MIN_BUSY_S = 2e-3  # a shorter interval says more about the clock than about the tier
_STALL_S = 0.5  # a tier that is busy for so long and brings nothing is slow, not unknown
_MARGIN_RATIO = 0.02  # a gain within the error of the prediction is none
_FLOOR_OF_SEED = 0.05  # a part of the time model that was learned to be 0 can be learned again
_DISTURBANCE_RATIO = 0.2  # of a copy's time, what it costs the engine: it runs beside it
_ERRORS = 64
PROBE_BLOCKS = 2
_MAY_RECOVER = frozenset([Reason.RECOMPUTE_FASTER, Reason.BELOW_FLOOR, Reason.WITHIN_MARGIN])
_PROBE_PERIOD_S = 5.0


@dataclass(frozen=True, slots=True)
class Appraisal:
    """A decision with the costs it was made from; `None` where nothing was known."""

    decision: LoadDecision
    costs: LoadCosts | None

    def behind(self, arrived_blocks: int, elapsed_s: float) -> bool:
        """Whether the load should be cut off now and the rest be computed."""
        if self.costs is None:
            return False
        return fell_behind(self.decision, self.costs, arrived_blocks, elapsed_s)


@dataclass(frozen=True, slots=True)
class Probe:
    """Blocks of a match, from its first, that are loaded or brought up to DRAM to learn a speed."""

    appraisal: Appraisal
    wished_blocks: int


class Appraiser:
    """Learned times of one engine over one store."""

    def __init__(
        self,
        seed: PrefillCoefficients,
        *,
        block_tokens: int,
        block_bytes: int,
        planned: bool = True,
        known: Speeds | None = None,
    ) -> None:
        """`planned`: else whatever matched is loaded. `known`: what an earlier start learned."""
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._planned = planned
        self._prefill = PrefillTimes(_resumed(seed, known) if known else seed)
        self._known = known is not None
        self._paths = TransferTimes({tier.value: speed for tier, speed in _GUESS.items()})
        self._totals: dict[Tier, ReadTotals] = {}
        self._errors: deque[float] = deque(maxlen=_ERRORS)
        self._probe_due_s = -math.inf
        self.overhead = LoadOverhead()

    # -- what the engine does ---------------------------------------------------------------

    def passed(self, requests: Sequence[tuple[int, int]], seconds: float) -> None:
        """A forward pass over (new tokens, cached tokens) of each request took `seconds`."""
        if seconds <= 0 or not any(new for new, _ in requests):
            return
        if self.settled:
            predicted_s = self.predicted_s(requests)
            self._errors.append(abs(predicted_s - seconds) / seconds)
        self._prefill.observe_pass(requests, seconds)

    def copied(self, size_bytes: int, seconds: float) -> None:
        """Loads were copied from DRAM into pages."""
        if size_bytes > 0 and seconds > 0:
            self._paths.observe_rate(Tier.DRAM.value, size_bytes, seconds)

    def read(self, totals: Mapping[Tier, ReadTotals]) -> None:
        """What the store has read by now; intervals too short to tell anything are added up."""
        for tier, now in totals.items():
            last = self._totals.setdefault(tier, ReadTotals())
            size_bytes, busy_s = now.size_bytes - last.size_bytes, now.busy_s - last.busy_s
            if busy_s < _MIN_BUSY_S or (size_bytes <= 0 and busy_s < _STALL_S):
                continue
            self._totals[tier] = now
            self._paths.observe_rate(tier.value, max(size_bytes, self._block_bytes // 2), busy_s)

    # -- what follows from it ---------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether prefill times are known well enough to compare a load with them."""
        return self._known or self._prefill.observed >= WARM_UP

    @property
    def prefill_error_ratio(self) -> float | None:
        """Median relative error of the predicted times of the last passes."""
        return median(self._errors) if self._errors else None

    def predicted_s(self, requests: Sequence[tuple[int, int]]) -> float:
        """Predicted seconds of one pass over (new tokens, cached tokens) of each request."""
        times = self._prefill.coefficients
        return times.a_s + sum(
            times.prefill_s(new, old) - times.a_s for new, old in requests if new
        )

    @property
    def prefill(self) -> PrefillCoefficients | None:
        """What is believed of prefill times; `None` as long as no pass was seen, or none counts."""
        return self._prefill.coefficients if self._planned and self.settled else None

    def load_s(self, tiers: Sequence[Tier]) -> float:
        """Predicted seconds to bring a block from each of `tiers` to the engine, and copy it."""
        copy = self._paths.speed(Tier.DRAM.value)
        counts = Counter(tiers)
        paths_s = (
            self._speed(tier, copy).transfer_s(count * self._block_bytes)
            for tier, count in counts.items()
        )
        overhead_s = self.overhead.per_load_s + len(tiers) * self.overhead.per_block_s
        return sum(paths_s) + (overhead_s if tiers else 0.0)

    def bytes_per_s(self, tier: Tier) -> float | None:
        """Measured bandwidth of a tier; `None` before it was used."""
        path = tier.value
        return self._paths.speed(path).bytes_per_s if self._paths.measured(path) else None

    def plan(
        self,
        match: Match,
        *,
        prompt_tokens: int,
        computed_tokens: int,
        queued_bytes: Mapping[Tier, int] | None = None,
    ) -> Appraisal:
        """How much of a match to load; its block 0 is block `computed_tokens // block_tokens`.

        `queued_bytes`: what loads under way have still to bring, by tier.
        """
        if not self._planned or not self.settled or computed_tokens >= prompt_tokens:
            reason = Reason.UNMEASURED if self._planned else Reason.TOLD_TO
            blocks = len(match)
            whole = LoadDecision(0, blocks, 0, 0.0, 0.0, 0.0, 0.0, reason)
            return Appraisal(whole, None)
        copy = self._paths.speed(Tier.DRAM.value)
        queued = queued_bytes or {}
        costs = LoadCosts(
            prompt_tokens=prompt_tokens,
            block_tokens=self._block_tokens,
            block_bytes=self._block_bytes,
            prefill=self._prefill.coefficients,
            paths={
                tier: PathState(self._speed(tier, copy), queued.get(tier, 0)) for tier in _GUESS
            },
            computed_tokens=computed_tokens,
            per_load_s=self.overhead.per_load_s,
            per_block_s=self.overhead.per_block_s,
            margin_ratio=_MARGIN_RATIO,
        )
        return Appraisal(plan_load(match, costs), costs)

    def probe(self, match: Match, decision: LoadDecision, now_s: float) -> Probe | None:
        """What to load and to read of a match that was decided not to pay; mostly nothing.

        Now and then it must be tried, or a tier, a copy or an overhead that recovers would never
        be seen to: each is learned from loads alone. Blocks below DRAM are only brought up to it,
        for nobody, so that no request waits for a tier that may be stuck; the next probe finds
        them there.
        """
        if decision.reason not in _MAY_RECOVER or now_s < self._probe_due_s:
            return None
        self._probe_due_s = now_s + _PROBE_PERIOD_S
        head = match.tiers[:PROBE_BLOCKS]
        blocks = next((i for i, tier in enumerate(head) if tier is not Tier.DRAM), len(head))
        costs = decision.recompute_s
        load = LoadDecision(0, blocks, len(match) - blocks, 0.0, costs, costs, 0.0, Reason.PROBE)
        return Probe(Appraisal(load, None), wished_blocks=len(head) if blocks < len(head) else 0)

    def save_ratio(self) -> float:
        """Cost of saving a block over what its reuse spares; 0 before both were measured."""
        copy = self.bytes_per_s(Tier.DRAM)
        if copy is None or not self.settled:
            return 0.0
        times = self._prefill.coefficients
        computed_s = times.prefill_s(self._block_tokens, 0) - times.a_s
        copy_s = self._block_bytes / copy
        spared_s = computed_s - copy_s
        return _DISTURBANCE_RATIO * copy_s / spared_s if spared_s > 0 else 1.0

    def speeds(self) -> Speeds | None:
        """What is worth keeping for the next start; `None` before anything was learned."""
        if not self.settled:
            return None
        times = self._prefill.coefficients
        return Speeds(times.a_s, times.b_s, times.c_s)

    def _speed(self, tier: Tier, copy: PathSpeed) -> PathSpeed:
        """A block from below crosses two paths, one after the other."""
        speed = self._paths.speed(tier.value)
        if tier is Tier.DRAM or not speed.bytes_per_s:
            return speed
        both_s = 1 / speed.bytes_per_s + 1 / copy.bytes_per_s
        return PathSpeed(speed.latency_s + copy.latency_s, 1 / both_s)


def _resumed(seed: PrefillCoefficients, known: Speeds) -> PrefillCoefficients:
    return PrefillCoefficients(
        max(known.a_s, _FLOOR_OF_SEED * seed.a_s),
        max(known.b_s, _FLOOR_OF_SEED * seed.b_s),
        max(known.c_s, _FLOOR_OF_SEED * seed.c_s),
    )
