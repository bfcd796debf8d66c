"""The replica with the fewest requests, in turn among equals, and none that cannot serve."""

from __future__ import annotations

from kvist.router.plain import NO_REPLICA, LeastBooked
from kvist.router.protocol import Ask, Choice, Refused


def router(*names: str) -> LeastBooked:
    """A router of replicas that are up."""
    found = LeastBooked()
    for name in names:
        found.add(name)
    return found


def choose(router: LeastBooked, *exclude: str) -> Choice | Refused:
    """What it says to a request that some replicas failed."""
    return router.choose(Ask("r", (), 1, exclude=frozenset(exclude)), 0.0)


def chosen(router: LeastBooked, *exclude: str) -> str:
    """The replica that it chooses."""
    found = choose(router, *exclude)
    assert isinstance(found, Choice)
    return found.replica


def test_requests_go_round_while_all_are_equally_busy() -> None:
    three = router("a", "b", "c")
    assert [chosen(three) for _ in range(6)] == ["a", "b", "c"] * 2


def test_replica_with_the_fewest_requests_is_next() -> None:
    two = router("a", "b")
    first, second = choose(two), choose(two)
    assert isinstance(second, Choice)
    two.finish(second.booking, 1.0)
    assert isinstance(first, Choice)
    assert chosen(two) == second.replica
    assert two.booked == 2


def test_replicas_that_cannot_serve_get_nothing() -> None:
    three = router("a", "b", "c")
    three.set_state("a", healthy=False)
    three.set_state("b", healthy=True, draining=True)
    assert [chosen(three) for _ in range(2)] == ["c", "c"]
    found = choose(three, "c")
    assert isinstance(found, Refused)
    assert (found.reason, found.retry_after_s > 0) == (NO_REPLICA, True)
    three.set_state("a", healthy=True)
    assert chosen(three) == "a"


def test_booking_is_given_back_once_even_when_its_replica_has_gone() -> None:
    one = router("a")
    booked = choose(one)
    assert isinstance(booked, Choice)
    one.remove("a")
    for _ in range(2):
        one.finish(booked.booking, 1.0, failed=True)
    assert one.booked == 0
    one.add("a")
    assert chosen(one) == "a"
