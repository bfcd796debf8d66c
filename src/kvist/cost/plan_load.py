"""Load or recompute: how much of a match to load, and when to stop waiting for it.

Theory of operation. `k` blocks of a match of N are loaded and the rest of the prompt computed. For
every k the time to the last prompt token is predicted, and the least is taken; ties go to the
smaller load, so nothing is moved for nothing. With S seconds of load and C of compute:

* `NONE`: the first k blocks are loaded, then the rest is computed: S + C.
* `LAYERWISE`: layer l is computed while layer l+1 loads: S/L + (L-1)/L·max(S, C) + C/L.
* `BOTH_ENDS`: the last k blocks load while the blocks before them are computed, then what follows
  the match is computed: max(S, C_head) + C_after; or as `NONE`, whichever is faster.

k = 0 is in every choice, so no decision is predicted to be slower than recomputing. Paths are
taken to be used one after the other, which is the worst case. `cutoff_s` is the time in the load
from which on recomputing all of it would have been as fast: a load that is not done by then has
lost, and `fell_behind` sees it earlier from the blocks that arrived.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvist.core.errors import ConfigError
from kvist.core.outcome import Match, Tier
from kvist.cost.prefill import PrefillCoefficients
from kvist.cost.transfer import PathState

_Floats = npt.NDArray[np.float64]


class Overlap(Enum):
    """What an engine can do at once."""

    NONE = "none"
    LAYERWISE = "layerwise"
    BOTH_ENDS = "both_ends"


class Reason(Enum):
    """Why a load was planned as it was; the label of metrics and logs."""

    UNMEASURED = "unmeasured"  # loaded whole: nothing is known yet that speaks against it
    TOLD_TO = "told_to"  # loaded whole: the configuration asks for no plan
    PROBE = "probe"  # a little is loaded although it does not pay, to see whether it does again
    NOTHING_MATCHED = "nothing_matched"
    NO_PATH = "no_path"  # the first block is where no usable path leads
    RECOMPUTE_FASTER = "recompute_faster"  # however long the run, computing beats loading
    BELOW_FLOOR = "below_floor"  # blocks pay, but too few to repay what a load costs
    WITHIN_MARGIN = "within_margin"  # loading is faster, but by less than was asked for
    LOAD_ALL = "load_all"
    LOAD_HEAD = "load_head"  # the rest of the match is faster to compute
    LOAD_TAIL = "load_tail"  # the head is computed meanwhile


@dataclass(frozen=True, slots=True)
class LoadCosts:
    """What a decision needs to know of one request.

    The match's block 0 is block `computed_tokens // block_tokens` of the prompt: what the engine
    has already is not asked for. `margin_ratio` is how much of the recompute time a load must be
    predicted to save. Tiers without a path cannot be loaded from; the engine's own (HBM) is free.

    Raises:
        ConfigError: a size that is out of its range.
    """

    prompt_tokens: int
    block_tokens: int
    block_bytes: int
    prefill: PrefillCoefficients
    paths: Mapping[Tier, PathState] = field(hash=False)
    computed_tokens: int = 0
    layers: int = 1
    per_load_s: float = 0.0
    per_block_s: float = 0.0
    margin_ratio: float = 0.0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "block_tokens", "block_bytes", "layers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"must be at least 1, not {getattr(self, name)}", path=name)
        if not 0 <= self.computed_tokens < self.prompt_tokens:
            raise ConfigError(f"must be below the prompt's {self.prompt_tokens}, not "
                              f"{self.computed_tokens}", path="computed_tokens")  # fmt: skip
        for name in ("per_load_s", "per_block_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"must be 0 or more, not {getattr(self, name)}", path=name)
        if not 0 <= self.margin_ratio < 1:
            raise ConfigError(f"must be in [0, 1), not {self.margin_ratio}", path="margin_ratio")

    def tokens_with(self, blocks: int) -> int:
        """Leading tokens whose KV is there once the first `blocks` of the match are.

        One token at least is left to compute: it gives the logits.
        """
        end = (self.computed_tokens // self.block_tokens + blocks) * self.block_tokens
        return min(self.prompt_tokens - 1, max(self.computed_tokens, end))

    def compute_s(self, first_token: int, last_token: int) -> float:
        """Seconds to compute tokens `[first_token, last_token)` after those before them."""
        return self.prefill.prefill_s(last_token - first_token, first_token)

    def block_s(self, tier: Tier) -> float:
        """Seconds that one more block from `tier` adds; infinite without a usable path."""
        if tier is Tier.HBM:
            return 0.0
        state = self.paths.get(tier)
        if state is None or not state.speed.bytes_per_s:
            return math.inf
        return self.block_bytes / state.speed.bytes_per_s + self.per_block_s

    def start_s(self, tier: Tier) -> float:
        """Seconds before the first block from `tier` moves: latency and queue."""
        if tier is Tier.HBM:
            return 0.0
        state = self.paths.get(tier)
        if state is None or not state.speed.bytes_per_s:
            return math.inf
        return state.speed.latency_s + state.queued_bytes / state.speed.bytes_per_s


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """What to do with a match: load `[first_block, first_block + load_blocks)`, compute the rest.

    Blocks count from the match's first. `load_s` is the predicted time of the load alone,
    `predicted_s` that of the whole prompt, `recompute_s` without any load. A load not done at
    `cutoff_s` (from its start) should be cut off.
    """

    first_block: int
    load_blocks: int
    recompute_blocks: int
    load_s: float
    predicted_s: float
    recompute_s: float
    cutoff_s: float
    reason: Reason

    @property
    def saved_s(self) -> float:
        return self.recompute_s - self.predicted_s


def plan_load(match: Match, costs: LoadCosts, overlap: Overlap = Overlap.NONE) -> LoadDecision:
    """The fastest split of a match between loading and computing, as predicted now. Pure."""
    usable = _usable_blocks(match, costs)
    recompute_s = costs.compute_s(costs.computed_tokens, costs.prompt_tokens)
    if not usable:
        reason = Reason.NO_PATH if len(match) else Reason.NOTHING_MATCHED
        return _recompute(len(match), recompute_s, reason)
    tiers = match.tiers[:usable]
    load_s = _load_times(tiers, costs)
    rest_s = _rest_times(usable, costs)
    layers = costs.layers if overlap is Overlap.LAYERWISE else 1
    totals = load_s + rest_s
    if layers > 1:
        totals = (load_s + (layers - 1) * np.maximum(load_s, rest_s) + rest_s) / layers
    totals[0] = recompute_s
    blocks = int(np.argmin(totals))
    best_s, first = float(totals[blocks]), 0
    if overlap is Overlap.BOTH_ENDS:
        tail_load_s = _load_times(tiers[::-1], costs)
        tails = _both_ends(tail_load_s, costs)
        tail = int(np.argmin(tails))
        if tails[tail] < best_s:
            blocks, best_s, first = tail, float(tails[tail]), usable - tail
            load_s = tail_load_s
    if not blocks:
        return _recompute(len(match), recompute_s, _why_not(tiers, costs))
    if best_s > recompute_s * (1 - costs.margin_ratio):
        return _recompute(len(match), recompute_s, Reason.WITHIN_MARGIN)
    if blocks == len(match):
        reason = Reason.LOAD_ALL
    else:
        reason = Reason.LOAD_TAIL if first else Reason.LOAD_HEAD
    waiting_s = float(load_s[blocks])
    return LoadDecision(
        first_block=first,
        load_blocks=blocks,
        recompute_blocks=len(match) - blocks,
        load_s=waiting_s,
        predicted_s=best_s,
        recompute_s=recompute_s,
        cutoff_s=max(waiting_s, _cutoff_s(recompute_s, costs, first + blocks, layers)),
        reason=reason,
    )


def floor_blocks(tier: Tier, costs: LoadCosts) -> float:
    """Blocks below which a load from `tier` cannot repay what it costs to start.

    Infinite where a block is faster computed than loaded, however many there are. Attention's
    part is left out, so it is the floor at the start of a prompt.
    """
    gain_s = costs.prefill.b_s * costs.block_tokens - costs.block_s(tier)
    if gain_s <= 0:
        return math.inf
    return math.ceil((costs.start_s(tier) + costs.per_load_s) / gain_s)


def fell_behind(
    decision: LoadDecision, costs: LoadCosts, arrived_blocks: int, elapsed_s: float
) -> bool:
    """Whether to cut a running load off now and compute what has not arrived.

    Args:
        arrived_blocks: blocks that are there, counted from the end at which the load began.
        elapsed_s: since the load began.
    """
    missing = decision.load_blocks - arrived_blocks
    if missing <= 0:
        return False
    if elapsed_s >= decision.cutoff_s:
        return True
    if elapsed_s <= decision.load_s:
        return False
    # Late: the pace seen so far says how long the rest takes.
    first = decision.first_block + (0 if decision.first_block else arrived_blocks)
    start, end = costs.tokens_with(first), costs.tokens_with(first + missing)
    pace_s = elapsed_s / (arrived_blocks or 0.5)
    return missing * pace_s > costs.compute_s(start, end)


def _recompute(blocks: int, recompute_s: float, reason: Reason) -> LoadDecision:
    return LoadDecision(0, 0, blocks, 0.0, recompute_s, recompute_s, 0.0, reason)


def _usable_blocks(match: Match, costs: LoadCosts) -> int:
    """Leading blocks with a path, and of those the ones that spare the engine a token."""
    first = costs.computed_tokens // costs.block_tokens
    spared = -(-(costs.prompt_tokens - 1) // costs.block_tokens) - first
    usable = 0
    for tier, blocks in _runs(match.tiers[: max(0, spared)]):
        if math.isinf(costs.block_s(tier)):
            break
        usable += blocks
    return usable


def _runs(tiers: Sequence[Tier]) -> Iterator[tuple[Tier, int]]:
    """Neighbours of one tier together: hashing an enum for each of 8,000 blocks takes longest."""
    return ((tier, len(list(run))) for tier, run in itertools.groupby(tiers))


def _load_times(tiers: Sequence[Tier], costs: LoadCosts) -> _Floats:
    """`[k]`: seconds to load the first k of `tiers`; k = 0 … len(tiers)."""
    steps, first, started = np.zeros(1 + len(tiers)), 1, set()
    for tier, blocks in _runs(tiers):
        steps[first : first + blocks] = costs.block_s(tier)
        if tier not in started:
            steps[first] += costs.start_s(tier)
            started.add(tier)
        first += blocks
    steps[1] += costs.per_load_s
    return np.asarray(np.cumsum(steps))


def _token_ends(blocks: int, costs: LoadCosts) -> _Floats:
    """`[k]`: `costs.tokens_with(k)` for k = 0 … blocks."""
    first = costs.computed_tokens // costs.block_tokens
    ends = (first + np.arange(blocks + 1, dtype=np.float64)) * costs.block_tokens
    return np.clip(ends, costs.computed_tokens, costs.prompt_tokens - 1)


def _rest_times(blocks: int, costs: LoadCosts) -> _Floats:
    """`[k]`: seconds to compute what the first k blocks leave of the prompt."""
    done, last, times = _token_ends(blocks, costs), float(costs.prompt_tokens), costs.prefill
    return times.a_s + times.b_s * (last - done) + times.c_s * (last * last - done * done)


def _both_ends(tail_load_s: _Floats, costs: LoadCosts) -> _Floats:
    """`[k]`: total seconds if the last k of the usable blocks load while the head is computed."""
    blocks, times = len(tail_load_s) - 1, costs.prefill
    start, heads = float(costs.computed_tokens), _token_ends(blocks, costs)[::-1]
    head_s = times.a_s + times.b_s * (heads - start) + times.c_s * (heads**2 - start**2)
    head_s[heads <= start] = 0.0
    after_s = costs.compute_s(costs.tokens_with(blocks), costs.prompt_tokens)
    totals: _Floats = np.maximum(head_s, tail_load_s) + after_s
    totals[0] = math.inf  # without a load there is one pass, not two
    return totals


def _cutoff_s(recompute_s: float, costs: LoadCosts, end_block: int, layers: int) -> float:
    """How long a load may take before recomputing everything would have been as fast."""
    rest_s = costs.compute_s(costs.tokens_with(end_block), costs.prompt_tokens)
    if layers == 1:
        return recompute_s - rest_s
    # S + (L-1)·max(S, C) + C = L·recompute, solved for S where S ≥ C, else where S < C.
    slower_s = recompute_s - rest_s / layers
    return slower_s if slower_s >= rest_s else layers * (recompute_s - rest_s)


def _why_not(tiers: Sequence[Tier], costs: LoadCosts) -> Reason:
    # A load that is slower at any length is the tier's fault; else the run is too short.
    pays = math.isfinite(floor_blocks(tiers[0], costs))
    return Reason.BELOW_FLOOR if pays else Reason.RECOMPUTE_FASTER
