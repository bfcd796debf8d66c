"""Events, lists, statistics, closing and the integrity check; the null store."""

from collections.abc import Callable

import pytest

from kvist.core.errors import ClosedError, NoSpaceError, StoreError, TierError
from kvist.core.events import KvEvent, Removed, Stored
from kvist.core.outcome import BlockRef, Outcome, Tier
from kvist.policy import Lru
from kvist.store import NullStore, TieredStore
from kvist.store.entry import State
from kvist.testing.store_suite import RAW_BYTES, WAIT_S, DictTier, content, key, put, ref
from kvist.tiers.dram import PAGE_BYTES, Arena

MakeStore = Callable[..., TieredStore]


def below(tier: DictTier, *numbers: int) -> None:
    """Puts blocks straight into the tier."""
    for n in numbers:
        tier.blocks[key(n)] = content(key(n))


def test_events_tell_each_arrival_and_departure_in_order(make_store: MakeStore) -> None:
    events: list[KvEvent] = []
    store = make_store(blocks=1, events=events.append)
    put(store, [0])
    assert store.flush(WAIT_S)
    put(store, [1])
    assert store.flush(WAIT_S)
    store.close()
    assert events == [
        Stored((key(0),), None, Tier.DRAM),
        Stored((key(0),), None, Tier.SSD),
        Removed((key(0),), Tier.DRAM),
        Stored((key(1),), key(0), Tier.DRAM),
        Stored((key(1),), key(0), Tier.SSD),
    ]


def test_a_listener_may_call_the_store(make_store: MakeStore) -> None:
    seen: list[int] = []
    store = make_store(lower=None, events=lambda e: seen.append(len(store.match([key(0)]))))
    put(store, [0])
    store.evict([key(0)])
    assert seen == [1, 0]


def test_list_shows_resident_blocks_up_to_the_limit(make_store: MakeStore) -> None:
    store = make_store(lower=None)
    put(store, range(3))
    with store.write([ref(9)]):
        shown = store.list(2)
    assert [(b.key, b.parent, b.state) for b in shown] == [
        (key(0), None, State.CLEAN),
        (key(1), key(0), State.CLEAN),
    ]
    assert len(store.list(100)) == 3


def test_stats_count_by_outcome(make_store: MakeStore, tier: DictTier) -> None:
    store = make_store()
    below(tier, 1)
    put(store, [0])
    with store.read([key(n) for n in range(3)], deadline_s=WAIT_S) as lease, store.write([ref(5)]):
        assert lease.wait(1) is Outcome.HIT
        stats = store.stats()
    assert (stats.read_dram, stats.read_lower, stats.read_absent, stats.loaded) == (1, 1, 1, 1)
    assert (stats.capacity_blocks, stats.free_blocks, stats.dram_blocks) == (8, 5, 2)
    assert (stats.writing_blocks, stats.leased_blocks, stats.leases) == (1, 3, 2)
    assert stats.dram_bytes == 2 * store.raw_bytes
    assert make_store(lower=None).stats().lower_read is None


def test_a_closed_store_refuses_but_leases_can_be_released(
    make_store: MakeStore, tier: DictTier
) -> None:
    store = make_store()
    lease = store.write([ref(0), ref(1)])
    lease.commit(0)
    store.close()
    store.close()
    assert tier.closed
    assert set(tier.blocks) == {key(0)}
    assert len(store.match([key(0)])) == 0
    with pytest.raises(ClosedError):
        store.read([key(0)], deadline_s=WAIT_S)
    with pytest.raises(ClosedError):
        store.write([ref(0)])
    lease.release()


def test_wrong_sizes_are_refused() -> None:
    with Arena(PAGE_BYTES, slot_bytes=RAW_BYTES) as arena:
        with pytest.raises(ValueError, match="slot"):
            TieredStore(arena, Lru(), None, raw_bytes=PAGE_BYTES + 1)
        with pytest.raises(ValueError, match="io_threads"):
            TieredStore(arena, Lru(), None, raw_bytes=1, io_threads=0)


def test_the_integrity_check_sees_a_leaked_slot_and_a_lost_reference() -> None:
    with TieredStore(
        Arena(2 * PAGE_BYTES, slot_bytes=RAW_BYTES), Lru(), None, raw_bytes=RAW_BYTES
    ) as store:
        slot = store.arena.alloc()
        assert slot is not None
        with pytest.raises(StoreError, match="unowned"):
            store.check_integrity()
        store.arena.free(slot)
        with store.write([BlockRef(key(0), None)]) as lease:
            lease.held()[0].refs += 1
            with pytest.raises(StoreError, match="references"):
                store.check_integrity()
            lease.held()[0].refs -= 1
        store.check_integrity()


def test_a_tier_that_cannot_close_is_reported_after_everything_else_is_closed(
    make_store: MakeStore,
) -> None:
    class Unclosable(DictTier):
        def close(self) -> None:
            raise TierError("close: broken")

    store = make_store(lower=Unclosable())
    with pytest.raises(TierError):
        store.close()
    assert store.arena.fd == -1


def test_the_null_store_misses_and_refuses() -> None:
    store = NullStore()
    assert len(store.match([key(0)])) == 0
    assert store.room_blocks() == 0
    with store.read([key(0)], deadline_s=1) as lease:
        assert (len(lease), lease.hits(), lease.ready()) == (1, 0, True)
        assert lease.outcome(0) is lease.wait(0) is Outcome.MISS
        for use in (lease.slot, lease.buffer, lease.commit):
            with pytest.raises(StoreError):
                use(0)
        assert not lease.present(0)
    assert len(store.write([])) == 0
    with pytest.raises(NoSpaceError):
        store.write([ref(0)])


def test_a_long_match_takes_the_lock_once(make_store: MakeStore) -> None:
    store = make_store()
    taken = 0
    lock = store._lock

    class Counting:
        def __enter__(self) -> None:
            nonlocal taken
            taken += 1
            lock.acquire(timeout=WAIT_S)

        def __exit__(self, *_: object) -> None:
            lock.release()

    put(store, [0])
    store._lock = Counting()  # type: ignore[assignment]
    assert len(store.match([key(0)] * 8192)) == 8192
    store._lock = lock
    assert taken == 1
