"""HBM by reference, tiers by policy."""

from __future__ import annotations

import pytest

from kvist.core.hints import Hints
from kvist.core.keys import Key
from kvist.sim.contenders import contender
from kvist.sim.des.pools import HbmPool, TierPool, hbm_order
from kvist.sim.traces import Request, Trace


def _keys(name: str, count: int) -> tuple[Key, ...]:
    return tuple(f"{name}{i}".encode() for i in range(count))


def _hbm(order: str = "lru", blocks: int = 4) -> HbmPool:
    return HbmPool(blocks * 10, 10, hbm_order(order), keeps=True)


@pytest.mark.parametrize("order", ["lru", "leaf-lru"])
def test_a_released_chain_stays_until_room_is_needed_and_goes_tail_first(order: str) -> None:
    pool, chain = _hbm(order), _keys("a", 3)
    assert pool.take(30)
    pool.name(chain)
    assert (pool.used_tokens, pool.spare_tokens) == (30, 10)
    pool.release(chain)
    assert (pool.used_tokens, pool.spare_tokens) == (30, 40)
    assert pool.take(15)
    assert pool.matched(chain) == 2
    assert pool.take(25)
    assert pool.matched(chain) == 0
    assert not pool.take(1)


def test_blocks_that_a_request_holds_are_never_evicted() -> None:
    pool, chain = _hbm(), _keys("a", 3)
    pool.take(30)
    pool.name(chain)
    pool.release(chain)
    pool.hold(chain[:2])
    assert not pool.take(21)
    assert pool.take(20)
    assert pool.matched(chain) == 2


def test_a_block_that_two_requests_computed_is_kept_once() -> None:
    pool, chain = _hbm(), _keys("a", 2)
    for _ in range(2):
        pool.take(20)
    pool.name(chain)
    pool.name(chain)
    assert pool.used_tokens == 20
    pool.release(chain)
    assert pool.spare_tokens == 20
    pool.release(chain)
    assert pool.spare_tokens == 40


def _tier(policy: str, blocks: int, gone: list[Key]) -> TierPool:
    trace = Trace.of("t", 10, [Request(0.0, _keys("a", 9), 90)])
    return TierPool(contender(policy, trace, blocks), blocks, gone.append)


def _fill(pool: TierPool, keys: tuple[Key, ...], now_s: float = 0.0) -> list[Key]:
    entered = pool.offer(keys, Hints(), now_s)
    for key in entered:
        pool.arrived(key)
    return entered


@pytest.mark.parametrize("policy", ["lru", "leaf-lru", "value", "s3-fifo"])
def test_a_tier_never_holds_more_than_it_may_and_says_what_went(policy: str) -> None:
    gone: list[Key] = []
    pool, entered = _tier(policy, 5, gone), 0
    for n in range(6):
        entered += len(_fill(pool, _keys("abc"[n % 3], 3), float(n)))
        assert len(pool) <= 5
    assert entered - len(gone) == len(pool)


def test_a_chain_longer_than_a_tier_keeps_its_root() -> None:
    pool = _tier("lru", 3, [])
    _fill(pool, _keys("a", 5))
    assert pool.keys()[::-1] == list(_keys("a", 3))


@pytest.mark.parametrize("policy", ["lru", "value"])
def test_pinned_blocks_stay_and_what_is_on_its_way_is_not_there_yet(policy: str) -> None:
    pool, first = _tier(policy, 3, []), _keys("a", 3)
    entered = pool.offer(first, Hints(), 0.0)
    assert set(entered) == set(first)
    assert first[0] not in pool
    assert pool.offer(_keys("b", 2), Hints(), 1.0) == []
    for key in first:
        pool.arrived(key)
    assert first[0] in pool
    pool.pin(first[2])
    _fill(pool, _keys("b", 2), 2.0)
    assert first[2] in pool
    pool.unpin(first[2])


def test_lost_bytes_take_their_block_with_them() -> None:
    gone: list[Key] = []
    pool, keys = _tier("lru", 3, gone), _keys("a", 2)
    for key in pool.offer(keys, Hints(), 0.0):
        pool.lost(key)
    pool.lost(keys[0])
    pool.arrived(keys[0])
    assert len(pool) == 0
    assert set(gone) == set(keys)


def test_second_sight_lets_in_what_was_offered_before() -> None:
    pool, keys = _tier("second-sight", 4, []), _keys("a", 2)
    assert _fill(pool, keys) == []
    assert set(_fill(pool, keys)) == set(keys)
