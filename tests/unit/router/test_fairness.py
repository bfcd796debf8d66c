"""Waiting requests: fair between tenants by tokens, urgent first within one, bounded, no leaks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_router import ask

from kvist.router.fairness import OVERTAKEN_S, QUANTUM_TOKENS, STRETCH, FairQueue
from kvist.router.protocol import Ask, Need, Refused


def _queue(**changes: Any) -> FairQueue:
    return FairQueue(**({"capacity": 10_000, "tenant_capacity": 10_000} | changes))


def _fill(queue: FairQueue, tenant: str, count: int, cost: int) -> None:
    for n in range(count):
        assert queue.offer(ask(f"{tenant}{n}", tenant=tenant), Need(cost, 0.0), 0.0) is None


def _take(queue: FairQueue) -> Ask:
    found = queue.take()
    assert found is not None
    return found


def test_weights_share_the_tokens_that_are_computed() -> None:
    queue = _queue(weights={"big": 4.0})
    _fill(queue, "big", 320, 512)
    _fill(queue, "small", 320, 512)
    first = Counter(_take(queue).tenant for _ in range(320))
    assert first["big"] == pytest.approx(256, abs=QUANTUM_TOKENS // 512 * 4)


def test_a_tenant_of_long_prompts_gets_no_more_tokens_than_one_of_short() -> None:
    queue = _queue()
    _fill(queue, "long", 50, 20_000)
    _fill(queue, "short", 2000, 500)
    sent = Counter(_take(queue).tenant for _ in range(800))
    assert sent["long"] * 20_000 == pytest.approx(sent["short"] * 500, rel=0.15)


def test_a_tenant_that_comes_late_does_not_wait_for_a_backlog() -> None:
    queue = _queue()
    _fill(queue, "flood", 5000, 4000)
    for _ in range(10):
        queue.take()
    _fill(queue, "late", 1, 4000)
    assert "late" in {_take(queue).tenant for _ in range(3)}


def test_a_tenant_saves_nothing_while_it_is_away() -> None:
    queue = _queue()
    _fill(queue, "a", 1, 1)
    assert _take(queue).tenant == "a"
    _fill(queue, "b", 100, QUANTUM_TOKENS)
    _fill(queue, "a", 100, QUANTUM_TOKENS)
    first = Counter(_take(queue).tenant for _ in range(20))
    assert first == {"a": 10, "b": 10}


def test_priority_goes_first_then_the_earlier_deadline_then_who_came_first() -> None:
    queue = _queue()
    for name, more in {
        "plain": {}, "late": {"deadline_s": 9.0}, "soon": {"deadline_s": 5.0},
        "urgent": {"priority": 1}, "low": {"priority": -1}, "second": {},
    }.items():  # fmt: skip
        queue.offer(ask(name, **more), Need(1, 0.0), 0.0)
    taken = [_take(queue).request for _ in range(6)]
    assert taken == ["urgent", "soon", "late", "plain", "second", "low"]


def test_priority_of_one_tenant_does_not_starve_another() -> None:
    queue = _queue()
    for n in range(100):
        queue.offer(ask(f"a{n}", tenant="a", priority=9), Need(QUANTUM_TOKENS, 0.0), 0.0)
        queue.offer(ask(f"b{n}", tenant="b"), Need(QUANTUM_TOKENS, 0.0), 0.0)
    assert Counter(_take(queue).tenant for _ in range(40)) == {"a": 20, "b": 20}


def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    queue = _queue(capacity=3, tenant_capacity=2)
    _fill(queue, "a", 2, 1)
    full = queue.offer(ask("a9", tenant="a"), Need(1, 0.0), 0.0)
    assert isinstance(full, Refused)
    assert full.reason == "queue-full"
    assert full.retry_after_s > 0
    _fill(queue, "b", 1, 1)
    assert queue.offer(ask("c", tenant="c"), Need(1, 0.0), 0.0) is not None
    assert len(queue) == 3
    queue.take()
    assert queue.offer(ask("c", tenant="c"), Need(1, 0.0), 0.0) is None


def test_what_is_too_late_is_given_back_once_and_not_served() -> None:
    queue = _queue()
    queue.offer(ask("late", deadline_s=1.0), Need(1, 0.0), 0.0)
    queue.offer(ask("fine", deadline_s=5.0), Need(1, 0.0), 0.0)
    assert [a.request for a in queue.expire(2.0)] == ["late"]
    assert queue.expire(2.0) == []
    assert _take(queue).request == "fine"
    assert queue.take() is None
    assert queue.expire(9.0) == []


def test_who_goes_away_is_not_served() -> None:
    queue = _queue()
    _fill(queue, "a", 3, 1)
    assert queue.remove("a0")
    assert not queue.remove("a0")
    assert [_take(queue).request for _ in range(2)] == ["a1", "a2"]
    assert queue.take() is None


def test_a_name_that_waits_already_is_refused() -> None:
    queue = _queue()
    _fill(queue, "a", 1, 1)
    with pytest.raises(ValueError, match="'a0' waits already"):
        queue.offer(ask("a0"), Need(1, 0.0), 0.0)
    with pytest.raises(ValueError, match="above 0"):
        _queue(weights={"a": 0.0})


def test_the_shortest_goes_first_until_a_longer_one_has_waited_long_enough() -> None:
    queue = _queue(overtaken_s=10.0)
    queue.offer(ask("long"), Need(50_000, 5.0), 0.0)
    queue.offer(ask("short"), Need(1000, 0.1), 3.0)
    queue.offer(ask("soon"), Need(2000, 0.2), 3.5)
    queue.offer(ask("late"), Need(1000, 0.1), 10.5)
    assert [_take(queue).request for _ in range(4)] == ["short", "soon", "long", "late"]


def test_urgency_is_above_length() -> None:
    queue = _queue(overtaken_s=10.0)
    queue.offer(ask("short"), Need(100, 0.01), 0.0)
    queue.offer(ask("due", deadline_s=90.0), Need(50_000, 5.0), 0.0)
    queue.offer(ask("urgent", priority=1), Need(50_000, 5.0), 0.0)
    assert [_take(queue).request for _ in range(3)] == ["urgent", "due", "short"]


@given(
    st.lists(
        st.tuples(st.floats(0, 20), st.floats(0, 30), st.sampled_from("ab"), st.booleans()),
        max_size=60,
    )
)
def test_nobody_is_overtaken_by_who_comes_much_later_or_is_longer(
    steps: list[tuple[float, float, str, bool]],
) -> None:
    queue, now_s = _queue(overtaken_s=OVERTAKEN_S), 0.0
    waiting: dict[str, tuple[float, float, str]] = {}
    for number, (passed_s, serve_s, tenant, takes) in enumerate(steps):
        now_s += passed_s
        waiting[str(number)] = now_s, serve_s, tenant
        queue.offer(ask(str(number), tenant=tenant), Need(1000, serve_s), now_s)
        if takes:
            came_s, took_s, whose = waiting.pop(_take(queue).request)
            for other_s, needs_s, other in waiting.values():
                if other == whose and other_s < came_s:
                    assert took_s < needs_s
                    assert came_s - other_s <= min(OVERTAKEN_S, STRETCH * needs_s) + 1e-6


@given(
    st.lists(
        st.tuples(st.sampled_from("ot-e"), st.sampled_from("abc"), st.integers(1, 50_000)),
        max_size=80,
    )
)
def test_everything_offered_leaves_exactly_once(steps: list[tuple[str, str, int]]) -> None:
    queue = _queue(capacity=20, tenant_capacity=8)
    inside: set[str] = set()
    for number, (what, tenant, size) in enumerate(steps):
        if what == "o":
            name = f"{tenant}{number}"
            deadline_s = None if size % 3 else float(size % 70)
            one = ask(name, tenant=tenant, priority=size % 3 - 1, deadline_s=deadline_s)
            if queue.offer(one, Need(size, 0.0), 0.0) is None:
                inside.add(name)
        elif what == "t":
            found = queue.take()
            assert (found is None) == (not inside)
            inside -= {found.request} if found else set()
        elif what == "-":
            some = min(inside, default="nobody")
            assert queue.remove(some) == (some in inside)
            inside.discard(some)
        else:
            late = {a.request for a in queue.expire(float(number))}
            assert late <= inside
            inside -= late
        assert len(queue) == len(inside)
    while inside:
        inside.remove(_take(queue).request)
    assert queue.take() is None
