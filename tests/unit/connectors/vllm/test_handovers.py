"""A prompt that another engine has computed: its blocks are waited for, not for long."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm_fakes import BLOCK, TABLE, FakeRequest, Side, learn_prefill, promise, request, scheduled

from kvist.core.outcome import Tier


class Clock:
    """A clock that stands still, and a sleep that moves it."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.naps = 0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.naps += 1


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def side(clock: Clock) -> Iterator[Side]:
    """A side with that clock, in which nothing may stay leased."""
    made = Side()
    waits = made.side._handovers
    waits.clock, waits.sleep = lambda: clock.now_s, clock.sleep
    yield made
    assert waits._until == {}


def handed(side: Side, name: str, count: int, computed: object = None) -> FakeRequest:
    """A request of `count` tokens that arrived, of which another engine is said to have some."""
    told = {"kvist.computed": count if computed is None else computed}
    req = request(name, count, kv_transfer_params=told)
    side.side.arrive(req)
    return req


def keys_of(side: Side, req: FakeRequest) -> list[bytes]:
    return list(side.side._live[req.request_id].chain.extend(req.tokens))


def test_blocks_that_are_being_saved_are_waited_for(side: Side, clock: Clock) -> None:
    req = handed(side, "a", 3 * BLOCK + 1)
    keys = keys_of(side, req)
    for key in keys:
        assert promise(side, req) == (None, False)
        side.idle()
        side.store.blocks[key] = Tier.DRAM
    assert clock.naps == 3
    assert promise(side, req) == (3 * BLOCK, True)
    side.side.finish(req, TABLE)


def test_wait_is_over_when_its_time_is_and_what_is_there_is_loaded(
    side: Side, clock: Clock
) -> None:
    req = handed(side, "a", 3 * BLOCK)
    side.store.blocks[keys_of(side, req)[0]] = Tier.DRAM
    assert promise(side, req) == (None, False)
    clock.now_s += 0.99
    assert promise(side, req) == (None, False)
    clock.now_s += 0.02
    assert promise(side, req) == (BLOCK, True)
    assert side.side.tally.take()["kvist_misses_total.unsaved"] == 2
    side.side.finish(req, TABLE)


def test_nothing_is_waited_for_longer_than_it_takes_to_compute(side: Side, clock: Clock) -> None:
    learn_prefill(side)
    req = handed(side, "a", 10 * BLOCK)
    assert promise(side, req) == (None, False)
    clock.now_s += 0.03  # a token takes a millisecond
    assert promise(side, req) == (None, False)
    clock.now_s += 0.03
    assert promise(side, req) == (0, False)
    side.side.finish(req, TABLE)


def test_what_the_engine_has_itself_is_not_waited_for(side: Side) -> None:
    req = handed(side, "a", 3 * BLOCK)
    assert promise(side, req, computed=3 * BLOCK) == (0, False)
    side.side.finish(req, TABLE)


def test_a_step_that_computes_does_not_sleep(side: Side, clock: Clock) -> None:
    req, other = handed(side, "a", 2 * BLOCK), request("b", BLOCK, first=700)
    side.side.arrive(other)
    assert promise(side, req) == (None, False)
    plan = side.side.plan_step(scheduled(new=[(other, BLOCK, TABLE)]))
    assert clock.naps == 0
    side.done(*[job.job_id for job in plan.saves])
    for each in (req, other):
        side.side.finish(each, TABLE)


def test_request_that_is_aborted_waits_no_more(side: Side, clock: Clock) -> None:
    req = handed(side, "a", 2 * BLOCK)
    assert promise(side, req) == (None, False)
    side.side.finish(req, TABLE)
    side.idle()
    assert clock.naps == 0


@pytest.mark.parametrize("told", [0, -5, True, "12", None, 1.5, [4]], ids=str)
def test_what_is_no_number_of_tokens_is_not_waited_for(side: Side, told: object) -> None:
    req = request("a", 2 * BLOCK, kv_transfer_params={"kvist.computed": told})
    side.side.arrive(req)
    assert promise(side, req) == (0, False)
    side.side.finish(req, TABLE)


def test_side_that_does_not_load_does_not_wait() -> None:
    side = Side(load=False)
    assert promise(side, handed(side, "a", 2 * BLOCK)) == (0, False)


def test_prompt_for_another_engine_is_saved_though_nobody_asks_twice() -> None:
    saved = []
    for told in ({}, {"kvist.save": True}):
        side = Side(save_unseen=False)
        side.side._saves.save_ratio = lambda: 1.0
        side.side._saves.reuse._share = 0.0
        req = request("a", 3 * BLOCK, kv_transfer_params=told)
        side.save_all(req, TABLE)
        saved.append(len(side.store.blocks))
    assert saved == [0, 3]
