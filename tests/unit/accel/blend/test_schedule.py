"""Fewer and fewer tokens are computed again, as many on average as asked for."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.accel.blend.schedule import RepairPlan, kept_tokens


@given(
    ratio=st.floats(0.001, 1),
    cached=st.integers(0, 5000),
    layers=st.integers(2, 80),
    spread=st.floats(0, 1),
)
def test_kept_tokens_fall_and_their_mean_is_the_ratio(
    ratio: float, cached: int, layers: int, spread: float
) -> None:
    kept = kept_tokens(RepairPlan(ratio, spread_ratio=spread), cached, layers)
    assert len(kept) == layers - 1
    assert list(kept) == sorted(kept, reverse=True)
    assert all(0 <= n <= cached for n in kept)
    assert abs(sum(kept) / len(kept) - ratio * cached) <= 1 + 1e-6 * cached


def test_a_falling_schedule_begins_above_its_mean_and_ends_below() -> None:
    kept = kept_tokens(RepairPlan(0.15, spread_ratio=0.3), 1000, 31)
    assert kept[0] == 195
    assert kept[-1] == 105


@pytest.mark.parametrize(("ratio", "want"), [(0.0, 0), (1.0, 77)])
def test_nothing_and_everything_are_the_same_in_every_layer(ratio: float, want: int) -> None:
    assert set(kept_tokens(RepairPlan(ratio), 77, 12)) == {want}


@pytest.mark.parametrize("ratio", [0.9, 0.999])
def test_no_layer_keeps_more_than_there_is(ratio: float) -> None:
    assert kept_tokens(RepairPlan(ratio), 100, 12)[0] == 100


@pytest.mark.parametrize(
    "wrong",
    [
        {"ratio": -0.1},
        {"ratio": 1.1},
        {"ratio": math.nan},
        {"ratio": 0.1, "check_layer": 0},
        {"ratio": 0.1, "most_deviation_ratio": math.nan},
        {"ratio": 0.1, "spread_ratio": 2.0},
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"ratio|repair|spread"):
        RepairPlan(**wrong)  # type: ignore[arg-type]
