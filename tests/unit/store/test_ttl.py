"""Time-to-live: what nobody uses goes, in both tiers; what is held or used stays."""

from collections.abc import Callable
from typing import Any

import pytest

from kvist.core.events import KvEvent, Removed
from kvist.core.hints import Hints
from kvist.core.outcome import Outcome, Tier
from kvist.store import TieredStore
from kvist.store.ages import SWEEP_BLOCKS
from kvist.testing.store_suite import WAIT_S, DictTier, content, key, put, ref

MakeStore = Callable[..., TieredStore]
Eventually = Callable[[TieredStore, Callable[[], bool]], None]
TTL_S = 10.0


@pytest.fixture
def make(make_store: MakeStore, clock: Any) -> MakeStore:
    """Makes stores with a time-to-live."""
    return lambda *args, **more: make_store(*args, clock=clock, ttl_s=TTL_S, **more)


def read(store: TieredStore, n: int) -> bool:
    with store.read([key(n)], deadline_s=WAIT_S) as lease:
        return lease.wait(0) is Outcome.HIT


def present(store: TieredStore, *numbers: int) -> int:
    return len(store.match([key(n) for n in numbers]))


def test_a_block_that_nobody_uses_is_gone_from_both_tiers(
    make: MakeStore, tier: DictTier, clock: Any, eventually: Eventually
) -> None:
    events: list[KvEvent] = []
    store = make(events=events.append)
    put(store, [0])
    assert store.flush(WAIT_S)
    clock.now_s = TTL_S - 0.1
    assert present(store, 0) == 1
    clock.now_s = TTL_S
    assert present(store, 0) == 0
    assert not read(store, 0)
    eventually(store, lambda: not tier.blocks)
    assert store.stats().dram_blocks == 0
    assert store.stats().expired == 1
    store.close()
    assert events[2:] == [Removed((key(0),), Tier.DRAM), Removed((key(0),), Tier.SSD)]


def test_the_writer_sweeps_without_being_asked(
    make: MakeStore, tier: DictTier, clock: Any, eventually: Eventually
) -> None:
    store = make()
    put(store, range(4))
    assert store.flush(WAIT_S)
    clock.now_s = TTL_S
    eventually(store, lambda: not tier.blocks and store.stats().dram_blocks == 0)


def test_reading_renews_a_block_and_matching_does_not(make: MakeStore, clock: Any) -> None:
    store = make()
    put(store, [0, 1])
    assert store.flush(WAIT_S)
    clock.now_s = 6.0
    assert present(store, 0, 1) == 2
    assert read(store, 0)
    clock.now_s = 12.0
    assert present(store, 0, 1) == 1
    assert present(store, 1) == 0


def test_a_block_read_back_from_below_lives_on(make: MakeStore, clock: Any, tier: DictTier) -> None:
    store = make(blocks=1)
    put(store, [0])
    assert store.flush(WAIT_S)
    put(store, [1])
    assert store.flush(WAIT_S)
    clock.now_s = 6.0
    assert read(store, 0)
    clock.now_s = 12.0
    assert (present(store, 0), present(store, 1)) == (1, 0)
    assert read(store, 0)


def test_a_leased_block_does_not_expire_and_its_release_is_a_use(
    make: MakeStore, clock: Any
) -> None:
    store = make()
    put(store, [0])
    assert store.flush(WAIT_S)
    with store.read([key(0)], deadline_s=1000) as lease:
        clock.now_s = 3 * TTL_S
        assert present(store, 0) == 1
        assert bytes(lease.buffer(0)) == content(key(0))
    clock.now_s += TTL_S - 0.1
    assert present(store, 0) == 1
    clock.now_s += 0.2
    assert present(store, 0) == 0


def test_a_pinned_block_does_not_expire_until_it_is_unpinned(make: MakeStore, clock: Any) -> None:
    store = make(lower=None)
    put(store, [0])
    store.pin([key(0)])
    clock.now_s = 2.5 * TTL_S
    assert present(store, 0) == 1
    store.unpin([key(0)])
    clock.now_s += TTL_S - 0.1
    assert present(store, 0) == 1
    clock.now_s += TTL_S
    assert present(store, 0) == 0
    assert store.stats().free_blocks == 8


def test_blocks_of_an_earlier_process_age_from_the_open(
    make: MakeStore, tier: DictTier, clock: Any, eventually: Eventually
) -> None:
    clock.now_s = 100.0
    for n in range(3):
        tier.blocks[key(n)] = content(key(n))
    store = make()
    clock.now_s = 100.0 + TTL_S - 0.1
    assert present(store, 0, 1, 2) == 3
    assert read(store, 1)
    clock.now_s = 100.0 + TTL_S
    assert present(store, 0, 1, 2) == 0
    assert present(store, 1) == 1
    assert not read(store, 2)
    eventually(store, lambda: set(tier.blocks) == {key(1)})
    assert store.stats().expired == 2


def test_an_expired_block_can_be_written_again_and_becomes_durable(
    make: MakeStore, tier: DictTier, clock: Any
) -> None:
    store = make()
    put(store, [0])
    assert store.flush(WAIT_S)
    clock.now_s = TTL_S
    with store.write([ref(0)]) as lease:
        assert not lease.present(0)
        assert present(store, 0) == 0
        lease.buffer(0)[:] = content(key(0))
        assert lease.commit(0)
    assert store.flush(WAIT_S)
    assert present(store, 0) == 1
    assert set(tier.blocks) == {key(0)}
    clock.now_s += TTL_S - 0.1
    assert present(store, 0) == 1


def test_a_write_under_way_does_not_expire(make: MakeStore, clock: Any) -> None:
    """The second write took a slot of its own under the same key, and the first one's leaked."""
    store = make(lower=None)
    clock.now_s = 2 * TTL_S
    with store.write([ref(0)]) as first, store.write([ref(0)]) as second:
        assert second.present(0)
        assert not first.present(0)
        clock.now_s += 2 * TTL_S
        assert not read(store, 0)
        store.check_integrity()
    assert store.room_blocks() == 8


def test_a_removal_that_fails_leaves_a_miss(
    make: MakeStore, tier: DictTier, clock: Any, eventually: Eventually
) -> None:
    store = make()
    put(store, [0])
    assert store.flush(WAIT_S)
    tier.broken = True
    clock.now_s = TTL_S
    assert present(store, 0) == 0
    with store._lock:
        assert store._link is not None
        writes = store._link.write
    eventually(store, lambda: writes.failed > 0)
    assert present(store, 0) == 0
    assert not read(store, 0)
    tier.broken = False


def test_match_is_exact_though_more_expired_than_one_sweep_takes(
    make: MakeStore, clock: Any
) -> None:
    count = 3 * SWEEP_BLOCKS
    store = make(blocks=count, lower=None)
    put(store, range(count))
    clock.now_s = TTL_S / 2
    assert read(store, count - 1)
    clock.now_s = TTL_S
    assert present(store, count - 2) == 0
    assert present(store, count - 1) == 1
    assert not read(store, count // 2)
    for _ in range(3):
        store.match([])
    assert store.stats().dram_blocks == 1


def test_the_end_of_a_request_renews_what_the_engine_used_without_asking(
    make: MakeStore, clock: Any
) -> None:
    store = make()
    put(store, [0, 1])
    assert store.flush(WAIT_S)
    clock.now_s = 6.0
    store.ended([key(0), key(7)], Hints())
    clock.now_s = 12.0
    assert (present(store, 0), present(store, 1), present(store, 7)) == (1, 0, 0)


def test_lists_leave_out_what_has_expired(make: MakeStore, clock: Any, tier: DictTier) -> None:
    store = make()
    put(store, [0, 1])
    assert store.flush(WAIT_S)
    tier.open.clear()
    with store.read([key(1)], deadline_s=1000):
        clock.now_s = TTL_S
        assert [info.key for info in store.list(9, Tier.DRAM)] == [key(1)]
        assert store.stat(key(0)) == ()
        assert [info.tier for info in store.stat(key(1))] == [Tier.DRAM, Tier.SSD]
        assert [info.key for info in store.list(9, Tier.SSD)] == [key(1)]


def test_an_expired_block_is_not_prefetched(make: MakeStore, tier: DictTier, clock: Any) -> None:
    tier.blocks[key(0)] = content(key(0))
    store = make()
    clock.now_s = TTL_S
    assert store.prefetch([key(0)], deadline_s=WAIT_S) == 0


def test_without_a_time_to_live_nothing_expires(make_store: MakeStore, clock: Any) -> None:
    store = make_store(clock=clock)
    put(store, [0])
    clock.now_s = 1e9
    assert present(store, 0) == 1
    with pytest.raises(ValueError, match="ttl_s"):
        make_store(ttl_s=0.0)


def test_a_match_of_what_is_alive_takes_the_lock_once(make: MakeStore, clock: Any) -> None:
    """The check of ages must not cost a lock for each key."""
    store = make()
    put(store, [0])
    assert store.flush(WAIT_S)
    clock.now_s = TTL_S / 2
    assert read(store, 0)
    clock.now_s = TTL_S + 1
    taken = 0
    lock = store._desk.lock

    class Counting:
        def __enter__(self) -> None:
            nonlocal taken
            taken += 1
            lock.acquire(timeout=WAIT_S)

        def __exit__(self, *_: object) -> None:
            lock.release()

    store._lock = store._desk.lock = Counting()  # type: ignore[assignment]
    assert len(store.match([key(0)] * 8192)) == 8192
    store._lock = store._desk.lock = lock
    assert taken == 1
