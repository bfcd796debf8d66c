"""The level of a chunk: the least lossy that arrives in time, else the text."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.codec.streaming import Bandwidth, Choice, Offer, Why, choose
from kvist.core.errors import ConfigError

CHUNKS = [Offer(1500, (8_000, 4_000, 1_000))] * 4


@pytest.mark.parametrize(
    ("bytes_per_s", "level"),
    [(1e9, 0), (32_000, 0), (31_999, 1), (16_000, 1), (15_999, 2), (4_000, 2), (3_999, None)],
)
def test_the_least_lossy_level_that_arrives_in_time_is_chosen(
    bytes_per_s: float, level: int | None
) -> None:
    choice = choose(CHUNKS, bytes_per_s=bytes_per_s, remaining_s=1.0)
    assert choice == Choice(level, Why.TEXT if level is None else Why.FITS)


def test_time_that_nothing_hides_is_kept_for_the_last_decode() -> None:
    choice = choose(CHUNKS, bytes_per_s=32_000, remaining_s=1.0, last_decode_s=0.1)
    assert choice.level == 1


def test_an_unknown_link_is_tried_with_the_least_bytes() -> None:
    assert choose(CHUNKS, bytes_per_s=None, remaining_s=1.0) == Choice(2, Why.UNKNOWN)
    assert choose(CHUNKS, bytes_per_s=None, remaining_s=0.0) == Choice(None, Why.TEXT)


def test_late_bytes_are_taken_where_computing_is_later_still() -> None:
    late = choose(CHUNKS, bytes_per_s=1_000, remaining_s=1.0, recompute_s=5.0)
    assert late == Choice(2, Why.LATE)
    assert choose(CHUNKS, bytes_per_s=1_000, remaining_s=1.0, recompute_s=4.0).level is None


def test_chunks_of_unequal_levels_are_refused() -> None:
    with pytest.raises(ConfigError):
        choose([], bytes_per_s=1.0, remaining_s=1.0)
    with pytest.raises(ConfigError):
        choose([Offer(1, (1,)), Offer(1, (1, 2))], bytes_per_s=1.0, remaining_s=1.0)


@given(
    sizes=st.lists(st.integers(1, 10**9), min_size=1, max_size=7).map(sorted),
    count=st.integers(1, 9),
    rate=st.floats(1, 1e10),
    remaining=st.floats(-1, 100),
)
def test_a_choice_that_fits_does_and_no_finer_one_would(
    sizes: list[int], count: int, rate: float, remaining: float
) -> None:
    chunks = [Offer(1, tuple(reversed(sizes)))] * count
    choice = choose(chunks, bytes_per_s=rate, remaining_s=remaining)
    fits = [count * s <= remaining * rate for s in reversed(sizes)]
    if choice.why is Why.FITS:
        assert fits.index(True) == choice.level
    else:
        assert choice == Choice(None, Why.TEXT)
        assert not any(fits)


def test_bandwidth_follows_what_is_seen() -> None:
    link = Bandwidth()
    assert link.bytes_per_s is None
    link.saw(0, 1.0)
    link.saw(10, 0.0)
    link.saw(10, math.inf)
    assert link.bytes_per_s is None
    link.saw(1_000, 1.0)
    assert link.bytes_per_s == pytest.approx(1_000)
    for _ in range(6):
        link.saw(1_000, 10.0)
    assert link.bytes_per_s == pytest.approx(100, rel=0.02)


@pytest.mark.parametrize("known", [0.0, -1.0, math.inf, math.nan])
def test_a_bandwidth_of_nothing_is_refused(known: float) -> None:
    with pytest.raises(ConfigError):
        Bandwidth(known)
