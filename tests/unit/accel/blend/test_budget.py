"""The ratio: no less than the floor, no more than hides, and none where recomputing is as fast."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.accel.blend.budget import (
    BlendWork,
    PassFactor,
    RatioChoice,
    RatioReason,
    choose_ratio,
)
from kvist.core.errors import ConfigError
from kvist.cost.plan_load import Overlap
from kvist.cost.prefill import PrefillCoefficients

PREFILL = PrefillCoefficients(5e-3, 1e-3, 1e-7)
WORK = BlendWork(prompt_tokens=2000, exact_tokens=100, cached_tokens=1800, layers=30)
FULL_S = PREFILL.prefill_s(1900, 100)


def test_without_overlap_the_floor_is_taken() -> None:
    found = choose_ratio(WORK, PREFILL, load_s=0.05)
    assert (found.ratio, found.reason) == (0.15, RatioReason.FLOOR)
    assert found.full_s == FULL_S
    # One layer of 30 whole; of the others 100 fresh rows and 15 % of 1,800, of 1,900.
    assert WORK.share(0.15) == pytest.approx(1 / 30 + 29 / 30 * 370 / 1900)
    assert found.pass_s == pytest.approx(5e-3 + (FULL_S - 5e-3) * WORK.share(0.15))


def test_a_load_that_hides_more_gives_more() -> None:
    layerwise = {"overlap": Overlap.LAYERWISE}
    short = choose_ratio(WORK, PREFILL, load_s=0.1, **layerwise)
    assert (short.ratio, short.reason) == (0.15, RatioReason.FLOOR)
    longer = choose_ratio(WORK, PREFILL, load_s=1.2, **layerwise)
    assert longer.reason is RatioReason.HIDES
    assert 0.15 < longer.ratio < 1
    assert longer.pass_s == pytest.approx(1.2)  # the largest that hides


def test_a_load_as_slow_as_computing_everything_is_not_worth_its_while() -> None:
    slow = choose_ratio(WORK, PREFILL, load_s=FULL_S, overlap=Overlap.LAYERWISE)
    assert slow.ratio == 1
    after = choose_ratio(WORK, PREFILL, load_s=FULL_S)
    assert (after.ratio, after.reason) == (1, RatioReason.RECOMPUTE_FASTER)


def test_passes_that_turn_out_slow_are_not_begun_again() -> None:
    learned, blended = PassFactor(), 0
    for _ in range(200):
        choice = choose_ratio(WORK, PREFILL, load_s=0.01, pass_factor=learned.factor)
        if choice.ratio < 1:
            learned.observe(choice, 2 * FULL_S)
            blended += 1
        else:
            learned.declined()
    assert 3 < blended < 30  # now and then it is tried
    observed = learned.observed
    learned.observe(RatioChoice(0.15, RatioReason.UNMEASURED), 1.0)  # says nothing
    assert learned.observed == observed


def test_a_stall_does_not_end_blending_for_good() -> None:
    learned = PassFactor()
    for _ in range(10):
        learned.observe(choose_ratio(WORK, PREFILL, load_s=0.0), 100 * FULL_S)
    found = []
    for _ in range(200):
        choice = choose_ratio(WORK, PREFILL, load_s=0.01, pass_factor=learned.factor)
        found.append(choice.reason)
        if choice.ratio < 1:
            learned.observe(choice, choice.pass_s / learned.factor)
        else:
            learned.declined()
    assert found[0] is RatioReason.RECOMPUTE_FASTER
    assert found[-1] is RatioReason.FLOOR
    assert learned.factor == pytest.approx(1, abs=0.1)


def test_what_is_unknown_is_blended_at_the_floor() -> None:
    assert choose_ratio(WORK, None, load_s=9.0, floor_ratio=0.2) == RatioChoice(
        0.2, RatioReason.UNMEASURED
    )


@given(
    load_s=st.floats(0, 10),
    floor=st.floats(0, 1),
    cached=st.integers(0, 1900),
    overlap=st.sampled_from([Overlap.NONE, Overlap.LAYERWISE]),
)
def test_no_choice_is_below_the_floor_or_slower_than_full_prefill(
    load_s: float, floor: float, cached: int, overlap: Overlap
) -> None:
    work = BlendWork(2000, 100, cached, 30)
    found = choose_ratio(work, PREFILL, load_s=load_s, floor_ratio=floor, overlap=overlap)
    assert floor <= found.ratio <= 1
    if found.ratio < 1:
        together = max if overlap is Overlap.LAYERWISE else lambda a, b: a + b
        assert together(found.load_s, found.pass_s) < found.full_s


@pytest.mark.parametrize(
    "wrong",
    [
        {"load_s": -1.0},
        {"load_s": math.nan},
        {"load_s": 0.0, "floor_ratio": 1.5},
        {"load_s": 0.0, "pass_factor": 0.0},
        {"load_s": 0.0, "margin_ratio": 1.0},
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        choose_ratio(WORK, PREFILL, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [(10, 5, 6, 30, 1), (10, -1, 2, 30, 1), (10, 1, 2, 30, 31)])
def test_work_that_cannot_be_is_refused(wrong: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(ConfigError):
        BlendWork(*wrong)
