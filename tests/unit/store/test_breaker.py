"""The breaker on a clock that the test moves."""

import pytest

from kvist.store.breaker import Breaker, BreakerState


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock=clock, random=lambda: 0.5, threshold=3, window_s=10, probe_s=1)


def test_fewer_failures_than_the_threshold_leave_it_closed(breaker: Breaker) -> None:
    breaker.fail()
    breaker.fail()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.acquire()
    assert breaker.wait_s() == 0


def test_failures_spread_over_more_than_the_window_leave_it_closed(
    breaker: Breaker, clock: Clock
) -> None:
    for _ in range(6):
        breaker.fail()
        clock.now_s += 6
    assert breaker.state is BreakerState.CLOSED


def test_it_opens_at_the_threshold_and_lets_nothing_pass(breaker: Breaker) -> None:
    for _ in range(3):
        breaker.fail()
    assert breaker.state is BreakerState.OPEN
    assert not breaker.peek()
    assert not breaker.acquire()
    assert breaker.wait_s() == 1
    assert (breaker.opened, breaker.failed) == (1, 3)


def test_one_probe_passes_and_its_success_closes_it(breaker: Breaker, clock: Clock) -> None:
    breaker.trip()
    clock.now_s += 1
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.acquire()
    assert not breaker.acquire()
    breaker.succeed()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.acquire()


def test_a_failed_probe_opens_it_for_twice_as_long_up_to_a_limit(clock: Clock) -> None:
    breaker = Breaker(clock=clock, random=lambda: 0.5, probe_s=1, probe_max_s=4)
    breaker.trip()
    waits = []
    for _ in range(5):
        waits.append(breaker.wait_s())
        clock.now_s += waits[-1]
        assert breaker.acquire()
        breaker.trip()
    assert waits == [1, 2, 4, 4, 4]


def test_a_late_answer_from_before_changes_nothing(breaker: Breaker) -> None:
    breaker.trip()
    breaker.succeed()
    breaker.fail()
    assert breaker.state is BreakerState.OPEN
    assert breaker.wait_s() == 1
    assert breaker.opened == 1


def test_a_probe_that_never_answers_is_replaced(breaker: Breaker, clock: Clock) -> None:
    breaker.trip()
    clock.now_s += 1
    assert breaker.acquire()
    assert breaker.wait_s() == 2
    clock.now_s += 2
    assert breaker.acquire()
    assert breaker.wait_s() == 4
    breaker.succeed()
    assert breaker.state is BreakerState.CLOSED


def test_the_delay_is_jittered(clock: Clock) -> None:
    waits = set()
    for draw in (0.0, 0.25, 0.99):
        breaker = Breaker(clock=clock, random=lambda draw=draw: draw)
        breaker.trip()
        waits.add(breaker.wait_s())
    assert len(waits) == 3
    assert all(0.5 <= wait < 1.5 for wait in waits)
