"""Distributions: right to a bucket, forgetting, and bounded."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvist.router.lengths import HALF_LIFE, MAX_GROUPS, Distribution, Groups


@example([1.0, 1.0, 1.0, 1.0, 2.0], 1.0)  # sums that differ in their last bit
@given(st.lists(st.floats(1.0, 1e6), min_size=1, max_size=300), st.floats(0.01, 1.0))
def test_a_quantile_is_a_value_that_was_seen_to_five_percent(
    values: list[float], ratio: float
) -> None:
    found = Distribution()
    for value in values:
        found.add(value)
    at = found.quantile(ratio)
    assert min(abs(at / value - 1) for value in values) < 0.05


def test_quantiles_and_survival_of_known_values() -> None:
    stream, found = random.Random(1), Distribution(0.001)
    for _ in range(HALF_LIFE):
        found.add(stream.expovariate(0.1))
    assert found.quantile(0.5) == pytest.approx(6.93, rel=0.1)
    assert found.survival(10.0) == pytest.approx(0.368, abs=0.03)
    assert found.survival(0.0) == 1.0
    assert found.survival(1e12) == 0.0
    # Without memory: what is old lasts as long again as what is new.
    assert found.outlives(10.0, 5.0) == pytest.approx(found.survival(5.0), abs=0.05)
    assert found.outlives(1e6, 5.0) == 0.5


@given(st.lists(st.floats(0.001, 1e4), max_size=50), st.floats(0, 1e5), st.floats(0, 1e5))
def test_survival_falls_and_stays_between_0_and_1(
    values: list[float], one: float, more: float
) -> None:
    found = Distribution(0.001)
    for value in values:
        found.add(value)
    assert 1.0 >= found.survival(one) >= found.survival(one + more) >= 0.0
    assert 0.0 <= found.outlives(one, more) <= 1.0


def test_the_old_fades_and_weights_stay_finite() -> None:
    found = Distribution()
    for _ in range(HALF_LIFE * 60):  # beyond the point at which weights are scaled down
        found.add(100.0)
    for _ in range(HALF_LIFE * 3):
        found.add(1000.0)
    assert found.quantile(0.5) == pytest.approx(1000, rel=0.05)
    assert found.survival(500.0) == pytest.approx(7 / 8, abs=0.01)
    assert found.total < 1e13
    assert found.mean == pytest.approx(100 + 900 * 7 / 8, rel=0.01)


def test_lengths_are_learned_by_tenant_and_endpoint_and_else_those_of_all() -> None:
    lengths = Groups()
    assert lengths.of("a", "/chat").quantile(0.9) == 0.0
    for _ in range(100):
        lengths.observe("a", "/chat", 50)
        lengths.observe("b", "/chat", 800)
    assert lengths.of("a", "/chat").quantile(0.9) == pytest.approx(50, rel=0.05)
    assert lengths.of("b", "/chat").quantile(0.9) == pytest.approx(800, rel=0.05)
    assert lengths.of("new", "/chat").quantile(0.9) == pytest.approx(800, rel=0.05)


def test_the_least_recently_used_group_is_forgotten() -> None:
    lengths = Groups()
    for tenant in range(MAX_GROUPS + 10):
        for _ in range(20):
            lengths.observe(str(tenant), "", 10 if tenant == 0 else 1000)
        for _ in range(2):
            lengths.observe("0", "", 10)
    assert len(lengths) == MAX_GROUPS
    assert lengths.of("0", "").quantile(0.5) == pytest.approx(10, rel=0.05)
    assert lengths.of("1", "").quantile(0.5) > 100
