"""Prefetch: behind every read, bounded, single flight, and never an error."""

from collections.abc import Callable
from typing import Any

import pytest

from kvist.core.outcome import Outcome, Tier
from kvist.store import Quota, TieredStore
from kvist.store.prefetch import CAPACITY_DIVISOR
from kvist.testing.store_suite import WAIT_S, DictTier, content, key, put

MakeStore = Callable[..., TieredStore]
Eventually = Callable[[TieredStore, Callable[[], bool]], None]
BLOCKS = 64
MOST = BLOCKS // CAPACITY_DIVISOR


@pytest.fixture
def filled(tier: DictTier) -> DictTier:
    """A tier with blocks 0 to 19."""
    for n in range(20):
        tier.blocks[key(n)] = content(key(n))
    return tier


def keys(*numbers: int) -> list[bytes]:
    return [key(n) for n in numbers]


def idle(store: TieredStore) -> bool:
    return store.stats().prefetching_blocks == 0


def test_a_prefetch_brings_blocks_to_dram_and_a_read_uses_them(
    make_store: MakeStore, filled: DictTier, eventually: Eventually
) -> None:
    store = make_store(BLOCKS)
    assert store.prefetch(keys(0, 1, 2, 99), deadline_s=WAIT_S) == 3
    eventually(store, lambda: idle(store))
    assert store.match(keys(0, 1, 2)).tiers == (Tier.DRAM,) * 3
    assert store.prefetch(keys(0, 1, 2), deadline_s=WAIT_S) == 0
    with store.read(keys(0, 1), deadline_s=WAIT_S) as lease:
        assert [bytes(lease.buffer(i)) for i in range(2)] == [content(key(0)), content(key(1))]
    with store.read(keys(0), deadline_s=WAIT_S):
        stats = store.stats()
    assert (stats.prefetch_asked, stats.prefetch_loaded) == (3, 3)
    assert (stats.prefetch_dropped, stats.prefetch_used) == (0, 2)
    assert stats.read_lower == 0


def test_wishes_are_bounded_until_what_they_brought_is_read(
    make_store: MakeStore, filled: DictTier, eventually: Eventually
) -> None:
    store = make_store(BLOCKS)
    assert store.prefetch(keys(*range(20)), deadline_s=WAIT_S) == MOST
    eventually(store, lambda: idle(store))
    assert store.stats().prefetch_dropped == 20 - MOST
    assert store.stats().dram_blocks == MOST
    assert store.prefetch(keys(19), deadline_s=WAIT_S) == 0
    with store.read(keys(0), deadline_s=WAIT_S):
        assert store.prefetch(keys(19), deadline_s=WAIT_S) == 1
    eventually(store, lambda: idle(store))


def test_what_came_too_long_ago_and_was_not_read_makes_room_for_new_wishes(
    make_store: MakeStore, filled: DictTier, eventually: Eventually, clock: Any
) -> None:
    store = make_store(BLOCKS, clock=clock)
    store.prefetch(keys(*range(MOST)), deadline_s=5)
    eventually(store, lambda: idle(store))
    assert store.prefetch(keys(19), deadline_s=5) == 0
    clock.now_s = 6.0
    assert store.prefetch(keys(19), deadline_s=5) == 1
    eventually(store, lambda: idle(store))


def test_a_read_joins_a_prefetch_that_is_under_way(make_store: MakeStore, filled: DictTier) -> None:
    store = make_store(BLOCKS)
    filled.open.clear()
    store.prefetch(keys(0), deadline_s=WAIT_S)
    assert filled.hanging.acquire(timeout=WAIT_S)
    with store.read(keys(0), deadline_s=WAIT_S) as lease:
        assert lease.outcome(0) is Outcome.PENDING
        filled.open.set()
        assert lease.wait(0) is Outcome.HIT
    assert filled.reads == keys(0)
    stats = store.stats()
    assert (stats.prefetch_loaded, stats.prefetch_used, stats.read_joined) == (1, 1, 1)


def test_a_reader_that_leaves_does_not_cancel_a_prefetch(
    make_store: MakeStore, filled: DictTier, eventually: Eventually
) -> None:
    store = make_store(BLOCKS)
    filled.open.clear()
    store.prefetch(keys(0), deadline_s=WAIT_S)
    assert filled.hanging.acquire(timeout=WAIT_S)
    store.read(keys(0), deadline_s=WAIT_S).release()
    store.check_integrity()
    filled.open.set()
    eventually(store, lambda: store.stats().dram_blocks == 1)


def test_reads_go_before_prefetches_that_were_asked_for_earlier(
    make_store: MakeStore, filled: DictTier, eventually: Eventually
) -> None:
    store = make_store(BLOCKS, io_threads=1)
    filled.open.clear()
    with store.read(keys(9), deadline_s=WAIT_S) as first:
        assert filled.hanging.acquire(timeout=WAIT_S)
        store.prefetch(keys(0, 1), deadline_s=WAIT_S)
        with store.read(keys(2), deadline_s=WAIT_S) as second:
            filled.open.set()
            assert first.wait(0) is second.wait(0) is Outcome.HIT
    eventually(store, lambda: idle(store))
    assert filled.reads == keys(9, 2, 0, 1)


def test_one_thread_stays_free_for_reads(make_store: MakeStore, filled: DictTier) -> None:
    store = make_store(BLOCKS, io_threads=2)
    filled.open.clear()
    store.prefetch(keys(0, 1, 2), deadline_s=WAIT_S)
    assert filled.hanging.acquire(timeout=WAIT_S)
    with store.read(keys(9), deadline_s=WAIT_S):
        assert filled.hanging.acquire(timeout=WAIT_S)
        assert filled.reads == keys(0, 9)


def test_a_read_overtakes_a_wish_that_waits(
    make_store: MakeStore, filled: DictTier, eventually: Eventually
) -> None:
    store = make_store(BLOCKS, io_threads=1)
    filled.open.clear()
    with store.read(keys(9), deadline_s=WAIT_S):
        assert filled.hanging.acquire(timeout=WAIT_S)
        store.prefetch(keys(0), deadline_s=WAIT_S)
        with store.read(keys(0), deadline_s=WAIT_S) as lease:
            filled.open.set()
            assert lease.wait(0) is Outcome.HIT
    assert filled.reads == keys(9, 0)
    assert store.stats().prefetch_dropped == 1
    assert idle(store)


def test_a_wish_that_has_not_begun_by_its_deadline_is_dropped(
    make_store: MakeStore, filled: DictTier, eventually: Eventually, clock: Any
) -> None:
    store = make_store(BLOCKS, io_threads=1, clock=clock)
    filled.open.clear()
    with store.read(keys(9), deadline_s=100):
        assert filled.hanging.acquire(timeout=WAIT_S)
        store.prefetch(keys(0), deadline_s=1)
        clock.now_s = 2.0
        filled.open.set()
        eventually(store, lambda: idle(store))
    assert filled.reads == keys(9)
    assert store.stats().prefetch_dropped == 1


def test_a_prefetch_evicts_neither_pinned_nor_leased_nor_unwritten_blocks(
    make_store: MakeStore, filled: DictTier, eventually: Eventually
) -> None:
    store = make_store(3)
    put(store, [100, 101])
    assert store.flush(WAIT_S)
    store.pin(keys(100))
    with store.read(keys(101), deadline_s=WAIT_S):
        filled.full = True
        put(store, [102])
        store.prefetch(keys(0), deadline_s=WAIT_S)
        eventually(store, lambda: idle(store))
        assert store.stats().prefetch_dropped == 1
        assert store.stats().no_space == 0
        assert store.match(keys(100, 101, 102)).tiers == (Tier.DRAM,) * 3


def test_a_prefetch_does_not_evict_the_parent_of_what_it_brings(
    make_store: MakeStore, filled: DictTier, eventually: Eventually
) -> None:
    store = make_store(8)
    with store.read(keys(0), deadline_s=WAIT_S) as lease:
        assert lease.wait(0) is Outcome.HIT
    put(store, range(100, 107))
    assert store.flush(WAIT_S)
    store.prefetch(keys(0, 1), deadline_s=WAIT_S)
    eventually(store, lambda: idle(store))
    assert store.match(keys(0, 1)).tiers == (Tier.DRAM, Tier.DRAM)


def test_a_prefetch_at_its_tenants_share_evicts_that_tenants_blocks_only(
    make_store: MakeStore, filled: DictTier, eventually: Eventually
) -> None:
    store = make_store(8, quota=Quota(0.25))
    for n in (0, 1):
        with store.read(keys(n), deadline_s=WAIT_S, tenant="a") as lease:
            assert lease.wait(0) is Outcome.HIT
    store.prefetch(keys(2), deadline_s=WAIT_S, tenant="a")
    eventually(store, lambda: idle(store))
    assert store.stats().dram_blocks == 2
    assert store.match(keys(2)).tiers == (Tier.DRAM,)


def test_a_prefetch_never_raises_where_nothing_can_be_brought(
    make_store: MakeStore, filled: DictTier, eventually: Eventually, clock: Any
) -> None:
    assert make_store(lower=None).prefetch(keys(0), deadline_s=1) == 0
    closed = make_store()
    closed.close()
    assert closed.prefetch(keys(0), deadline_s=1) == 0
    store = make_store(clock=clock)
    with store._lock:
        assert store._link is not None
        store._link.read.trip()
    assert store.prefetch(keys(0), deadline_s=1) == 1
    clock.now_s = 2.0
    eventually(store, lambda: idle(store))
    assert (store.stats().prefetch_dropped, store.stats().load_failed) == (1, 0)


def test_a_prefetch_of_a_block_that_the_tier_lost_is_dropped(
    make_store: MakeStore, filled: DictTier, eventually: Eventually
) -> None:
    store = make_store()
    filled.forgetful = True
    store.prefetch(keys(0), deadline_s=WAIT_S)
    eventually(store, lambda: idle(store))
    assert (store.stats().prefetch_loaded, store.stats().prefetch_dropped) == (0, 1)
    assert store.room_blocks() == 8


def test_clear_drops_wishes_and_lets_one_under_way_end(
    make_store: MakeStore, filled: DictTier, eventually: Eventually
) -> None:
    store = make_store(BLOCKS, io_threads=1)
    filled.open.clear()
    store.prefetch(keys(0, 1), deadline_s=WAIT_S)
    assert filled.hanging.acquire(timeout=WAIT_S)
    store.clear()
    store.check_integrity()
    filled.open.set()
    eventually(store, lambda: idle(store))
    assert store.stats().free_blocks == BLOCKS
    assert store.stats().prefetch_asked == 2
