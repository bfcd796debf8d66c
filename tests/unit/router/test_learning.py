"""Speeds from the times of tokens."""

from __future__ import annotations

import pytest
from small_router import DECODE, PREFILL

from kvist.cost.decode import DecodeTimes
from kvist.cost.prefill import PrefillTimes
from kvist.router.bookings import Contexts
from kvist.router.learning import MAX_PROMPTS, BusyPeriod, Stretch
from kvist.router.lengths import Distribution

TIMES = Distribution()


def _period(times: PrefillTimes, prompts: list[int], seconds: float, *, spoil: bool) -> None:
    period = BusyPeriod()
    period.begin(10.0)
    for tokens in prompts:
        period.computed(tokens, 0)
    if spoil:
        period.spoil()
    period.end(10.0 + seconds, times)
    period.end(99.0, times)  # nothing is left to learn


def test_a_busy_period_is_one_pass_of_all_its_prompts() -> None:
    times = PrefillTimes(PREFILL)
    for n in range(1, 20):
        _period(times, [1000] * n, 3 * (0.01 + 1e-4 * 1000 * n), spoil=False)
    assert times.observed == 19
    assert times.prefill_s(5000, 0) == pytest.approx(3 * PREFILL.prefill_s(5000, 0), rel=0.05)


def test_a_spoilt_or_endless_period_teaches_nothing() -> None:
    times = PrefillTimes(PREFILL)
    _period(times, [1000], 9.0, spoil=True)
    _period(times, [1000] * (MAX_PROMPTS + 1), 9.0, spoil=False)
    _period(times, [], 9.0, spoil=False)
    _period(times, [1000], 0.0, spoil=False)
    assert times.observed == 0


def test_a_stretch_teaches_only_where_the_same_requests_decode_alone() -> None:
    contexts, times = Contexts(), DecodeTimes(DECODE)
    contexts.expect(1, 1000, 0.0, TIMES)
    contexts.begin(1, 0.0)
    stretch = Stretch(0.0, 1, contexts.changes)
    stretch.look(11, 1.0, contexts, times, alone=False)
    contexts.expect(2, 1000, 0.0, TIMES)
    contexts.begin(2, 0.0)
    stretch.look(21, 2.0, contexts, times, alone=True)
    assert times.observed == 0
    for n in range(1, 20):
        stretch.look(21 + 10 * n, 2.0 + n, contexts, times, alone=True)
    assert times.observed == 19
    assert times.decode_s(2, 2000) == pytest.approx(0.1, rel=0.05)
