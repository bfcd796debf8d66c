"""How much of a blended prompt to compute again: no less than quality needs, no more than is free.

Theory of operation. A pass over a prompt of which a prefix is exact computes every row in the
layers before the check layer, and from there on the fresh rows and a share `r` of the cached ones.
Rows attend to all that stands before them whichever others are computed, so its time is taken to be
that share of a whole pass. Where the engine loads layer by layer beside the pass, rows whose
computation hides behind the load cost nothing; else the floor is taken. If computing everything is
predicted to be as fast as load and pass, there is nothing to blend.

Source: Yao et al., "CacheBlend" (EuroSys'25), §5.1 (the loading controller).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvist.accel.blend.schedule import CHECK_LAYER
from kvist.core.errors import ConfigError
from kvist.cost.plan_load import Overlap
from kvist.cost.prefill import PrefillCoefficients

FLOOR_RATIO = 0.15
_STEP = 0.2  # of a new observation of how fast passes are
_MOST_FACTOR = 16.0
_FADE = 0.02  # towards 1, of a prompt that was not blended


class RatioReason(Enum):
    """Why a ratio was chosen; the label of metrics and logs."""

    UNMEASURED = "unmeasured"  # the floor: nothing is known yet that speaks against it
    FLOOR = "floor"  # what quality needs is more than hides behind the load
    HIDES = "hides"  # the load takes long enough to compute more than the floor
    WHOLE = "whole"  # the load takes long enough to compute everything
    RECOMPUTE_FASTER = "recompute_faster"  # do not blend: load and pass take as long as a prefill


@dataclass(frozen=True, slots=True)
class RatioChoice:
    """The ratio with the times it was chosen from; a ratio of 1 leaves nothing to blend."""

    ratio: float
    reason: RatioReason
    load_s: float = 0.0
    pass_s: float = 0.0
    full_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BlendWork:
    """A prompt as the budget sees it: `exact_tokens` of a prefix, `cached_tokens` in spans.

    Raises:
        ConfigError: sizes that cannot be.
    """

    prompt_tokens: int
    exact_tokens: int
    cached_tokens: int
    layers: int
    check_layer: int = CHECK_LAYER

    def __post_init__(self) -> None:
        known = self.exact_tokens + self.cached_tokens
        if min(self.exact_tokens, self.cached_tokens) < 0 or not known <= self.prompt_tokens:
            raise ConfigError(f"{known} tokens known of {self.prompt_tokens}", path="cached_tokens")
        if not 1 <= self.check_layer <= self.layers:
            raise ConfigError(f"no layer {self.check_layer} of {self.layers}", path="check_layer")

    @property
    def new_tokens(self) -> int:
        """Rows that a pass over this prompt has at most."""
        return self.prompt_tokens - self.exact_tokens

    def share(self, ratio: float) -> float:
        """Of a whole pass over `new_tokens`: the part of its rows that is computed."""
        if not self.new_tokens:
            return 0.0
        fresh = self.new_tokens - self.cached_tokens
        kept = (fresh + ratio * self.cached_tokens) / self.new_tokens
        first = self.check_layer / self.layers if 0 < ratio < 1 else 0.0
        return first + (1 - first) * kept


def choose_ratio(
    work: BlendWork,
    prefill: PrefillCoefficients | None,
    *,
    load_s: float,
    floor_ratio: float = FLOOR_RATIO,
    overlap: Overlap = Overlap.NONE,
    pass_factor: float = 1.0,
    margin_ratio: float = 0.0,
) -> RatioChoice:
    """`max(floor, largest ratio whose computation hides behind the load)`, or none at all.

    Args:
        work: the prompt.
        prefill: what a pass takes; `None` before anything was measured.
        load_s: predicted seconds to bring the spans' rows.
        floor_ratio: what quality needs.
        overlap: whether the engine computes while it loads (`LAYERWISE`) or after it.
        pass_factor: how much slower a blended pass is than its share of a whole one.
        margin_ratio: of the time of full prefill, what blending must be predicted to save.

    Raises:
        ConfigError: a ratio, factor or time out of range.
    """
    if not (0 <= floor_ratio <= 1 and 0 <= margin_ratio < 1 and pass_factor > 0 <= load_s):
        raise ConfigError(f"floor {floor_ratio}, margin {margin_ratio}, factor {pass_factor}, "
                          f"load {load_s} s", path="blend")  # fmt: skip
    if prefill is None:
        return RatioChoice(floor_ratio, RatioReason.UNMEASURED)
    full_s = prefill.prefill_s(work.new_tokens, work.exact_tokens)

    def pass_s(ratio: float) -> float:
        return prefill.a_s + (full_s - prefill.a_s) * work.share(ratio) * pass_factor

    ratio, reason = floor_ratio, RatioReason.FLOOR
    if overlap is Overlap.LAYERWISE:
        hidden = _largest_hidden(work, load_s, pass_s(0.5), pass_s(0.25))
        if hidden > floor_ratio:
            ratio, reason = hidden, RatioReason.HIDES
    if ratio >= 1:
        return RatioChoice(1.0, RatioReason.WHOLE, load_s, full_s, full_s)
    taken_s = pass_s(ratio)
    total_s = max(load_s, taken_s) if overlap is Overlap.LAYERWISE else load_s + taken_s
    if total_s >= full_s * (1 - margin_ratio):
        return RatioChoice(1.0, RatioReason.RECOMPUTE_FASTER, load_s, taken_s, full_s)
    return RatioChoice(ratio, reason, load_s, taken_s, full_s)


def _largest_hidden(work: BlendWork, load_s: float, half_s: float, quarter_s: float) -> float:
    """The ratio at which a pass takes `load_s`: its time is linear in the ratio between 0 and 1."""
    slope = (half_s - quarter_s) / 0.25
    if slope <= 0:
        return 0.0
    return min(1.0, max(0.0, 0.5 + (load_s - half_s) / slope))


class PassFactor:
    """How much slower blended passes are than their share of a whole one, learned. One owner.

    It is learned from blends alone, so where it has ended them it fades (`declined`): a stall costs
    some prompts their blend, not all.
    """

    __slots__ = ("_factor", "observed")

    def __init__(self) -> None:
        self._factor = 1.0
        self.observed = 0

    @property
    def factor(self) -> float:
        """What is believed now; 1 before anything was seen."""
        return self._factor

    def observe(self, choice: RatioChoice, taken_s: float) -> None:
        """A pass that was predicted as `choice` says took `taken_s`."""
        if choice.pass_s <= 0 or taken_s <= 0 or choice.reason is RatioReason.UNMEASURED:
            return
        seen = self._factor * taken_s / choice.pass_s
        seen = min(_MOST_FACTOR, max(1 / _MOST_FACTOR, seen))
        self._factor += _STEP * (seen - self._factor)
        self.observed += 1

    def declined(self) -> None:
        """A prompt was not blended since that would not have paid."""
        self._factor += _FADE * (1.0 - self._factor)
