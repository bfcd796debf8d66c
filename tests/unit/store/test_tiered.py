"""Between DRAM and the tier below: loads, write-through, eviction, clearing."""

from collections.abc import Callable

import pytest

from kvist.core.errors import NoSpaceError, TierError
from kvist.core.events import Cleared, KvEvent, Removed, Stored
from kvist.core.outcome import Match, Outcome, Tier
from kvist.store import TieredStore
from kvist.store.writeback import BATCH_BLOCKS
from kvist.testing.store_suite import WAIT_S, DictTier, content, key, put, ref

MakeStore = Callable[..., TieredStore]


def below(tier: DictTier, *numbers: int) -> None:
    """Puts blocks straight into the tier."""
    for n in numbers:
        tier.blocks[key(n)] = content(key(n))


def test_commits_go_below_in_order_and_in_batches(make_store: MakeStore, tier: DictTier) -> None:
    store = make_store(blocks=24)
    put(store, range(20))
    assert store.flush(WAIT_S)
    assert [k for batch in tier.puts for k in batch] == [key(n) for n in range(20)]
    assert all(len(batch) <= BATCH_BLOCKS for batch in tier.puts)
    assert store.stats().dirty_blocks == 0
    assert store.stats().flushed == 20


def test_match_says_where_each_block_is(make_store: MakeStore, tier: DictTier) -> None:
    store = make_store()
    put(store, [0, 1])
    below(tier, 2)
    assert store.match([key(n) for n in range(4)]) == Match((Tier.DRAM, Tier.DRAM, Tier.SSD))


def test_blocks_below_need_no_write(make_store: MakeStore, tier: DictTier) -> None:
    store = make_store()
    below(tier, 0)
    with store.write([ref(0), ref(1)]) as lease:
        assert [lease.present(0), lease.present(1)] == [True, False]
    assert store.stats().write_present == 1


def test_two_readers_share_one_load(make_store: MakeStore, tier: DictTier) -> None:
    store = make_store()
    below(tier, 0)
    tier.open.clear()
    with (
        store.read([key(0)], deadline_s=WAIT_S) as first,
        store.read([key(0), key(0)], deadline_s=WAIT_S) as second,
    ):
        assert tier.hanging.acquire(timeout=WAIT_S)
        assert first.outcome(0) is Outcome.PENDING
        assert not second.ready()
        assert second.hits() == 0
        tier.open.set()
        assert first.wait(0) is second.wait(0) is second.wait(1) is Outcome.HIT
        assert second.ready()
    assert tier.reads == [key(0)]
    assert store.stats().read_joined == 2


def test_a_reader_that_leaves_does_not_cancel_another(
    make_store: MakeStore, tier: DictTier
) -> None:
    store = make_store(io_threads=1)
    below(tier, 0, 1)
    tier.open.clear()
    first = store.read([key(0), key(1)], deadline_s=WAIT_S)
    second = store.read([key(1)], deadline_s=WAIT_S)
    assert tier.hanging.acquire(timeout=WAIT_S)
    first.release()
    tier.open.set()
    with second:
        assert second.wait(0) is Outcome.HIT
        assert bytes(second.buffer(0)) == content(key(1))


def test_release_cancels_queued_loads(make_store: MakeStore, tier: DictTier) -> None:
    store = make_store(io_threads=1)
    below(tier, *range(4))
    tier.open.clear()
    with store.read([key(n) for n in range(4)], deadline_s=WAIT_S):
        assert tier.hanging.acquire(timeout=WAIT_S)
    assert store.stats().load_cancelled == 3
    assert store.stats().loading_blocks == 1
    assert store.room_blocks() == 7
    store.check_integrity()
    tier.open.set()
    assert store.read([key(0)], deadline_s=WAIT_S).wait(0) is Outcome.HIT
    assert tier.reads == [key(0)]


def test_after_the_deadline_a_load_is_a_miss_here_and_a_gain_later(
    make_store: MakeStore, tier: DictTier
) -> None:
    store = make_store(io_threads=1)
    below(tier, 0, 1)
    tier.open.clear()
    with store.read([key(0), key(1)], deadline_s=0.05) as lease:
        assert tier.hanging.acquire(timeout=WAIT_S)
        assert lease.wait(0) is Outcome.MISS
        assert lease.outcome(1) is Outcome.MISS
        assert lease.ready()
        store.check_integrity()
        with store.read([key(0)], deadline_s=WAIT_S) as patient:
            tier.open.set()
            assert patient.wait(0) is Outcome.HIT
        assert lease.outcome(0) is Outcome.MISS
        assert lease.hits() == 0
    assert store.match([key(0)]).tiers == (Tier.DRAM,)
    assert store.stats().late == 2


@pytest.mark.parametrize("look", ["outcome", "ready"])
def test_a_passed_deadline_is_seen_without_waiting(
    make_store: MakeStore, tier: DictTier, look: str
) -> None:
    store = make_store()
    below(tier, 0)
    tier.open.clear()
    with store.read([key(0)], deadline_s=0) as lease:
        seen = lease.ready() if look == "ready" else lease.outcome(0) is Outcome.MISS
        assert seen


def test_a_block_that_the_tier_lost_is_a_miss_and_frees_its_slot(
    make_store: MakeStore, tier: DictTier
) -> None:
    events: list[KvEvent] = []
    store = make_store(events=events.append)
    below(tier, 0)
    tier.forgetful = True
    with store.read([key(0)], deadline_s=WAIT_S) as lease:
        assert lease.wait(0) is Outcome.MISS
        assert store.room_blocks() == 8
    assert store.stats().load_missed == 1
    store.flush(WAIT_S)
    store.close()
    assert events == [Removed((key(0),), Tier.SSD)]


def test_a_refused_read_reserves_and_holds_nothing(make_store: MakeStore, tier: DictTier) -> None:
    store = make_store(blocks=4)
    put(store, [0, 1])
    assert store.flush(WAIT_S)
    below(tier, *range(2, 6))
    with pytest.raises(NoSpaceError):
        store.read([key(n) for n in range(6)], deadline_s=WAIT_S)
    store.check_integrity()
    assert store.room_blocks() == 4
    assert store.stats().no_space == 1
    assert len(store.match([key(0), key(1)])) == 2


def test_a_refused_read_gives_up_only_its_own_hold_on_a_load(
    make_store: MakeStore, tier: DictTier
) -> None:
    store = make_store(blocks=2)
    below(tier, 0, 1, 2)
    tier.open.clear()
    with store.read([key(0)], deadline_s=WAIT_S) as first:
        with pytest.raises(NoSpaceError):
            store.read([key(n) for n in range(3)], deadline_s=WAIT_S)
        tier.open.set()
        assert first.wait(0) is Outcome.HIT


def test_dirty_blocks_are_not_evicted_while_the_tier_is_healthy(
    make_store: MakeStore, tier: DictTier
) -> None:
    store = make_store(blocks=2)
    tier.open.clear()
    put(store, [0, 1])
    assert tier.hanging.acquire(timeout=WAIT_S)
    with pytest.raises(NoSpaceError):
        store.write([ref(2)])
    assert not store.flush(0.02)
    tier.open.set()
    assert store.flush(WAIT_S)
    assert put(store, [2]) == [True]
    assert store.stats().evicted == 1


def test_pinned_blocks_stay_until_unpinned(make_store: MakeStore) -> None:
    store = make_store(blocks=2, lower=None)
    put(store, [0, 1])
    assert store.pin([key(0), key(1), key(9)]) == 2
    assert store.pin([key(0)]) == 0
    assert store.evict([key(0)]) == 0
    with pytest.raises(NoSpaceError):
        store.write([ref(2)])
    assert store.stats().pinned_blocks == 2
    assert store.unpin([key(0)]) == 1
    assert put(store, [2]) == [True]
    assert len(store.match([key(1)])) == 1


def test_evict_forgets_in_every_tier_but_spares_what_is_leased(
    make_store: MakeStore, tier: DictTier
) -> None:
    events: list[KvEvent] = []
    store = make_store(events=events.append)
    put(store, [0, 1])
    assert store.flush(WAIT_S)
    below(tier, 2)
    with store.read([key(1)], deadline_s=WAIT_S):
        assert store.evict([key(0), key(0), key(1), key(2), key(3)]) == 2
    assert [len(store.match([key(n)])) for n in range(3)] == [0, 1, 0]
    assert set(tier.blocks) == {key(1)}
    assert events[-2:] == [Removed((key(0),), Tier.DRAM), Removed((key(0), key(2)), Tier.SSD)]


def test_clear_empties_every_tier_but_leases_keep_their_bytes(
    make_store: MakeStore, tier: DictTier
) -> None:
    events: list[KvEvent] = []
    store = make_store(events=events.append)
    put(store, [0, 1])
    store.pin([key(1)])
    assert store.flush(WAIT_S)
    with store.read([key(0)], deadline_s=WAIT_S) as lease:
        store.clear()
        assert len(store.match([key(0)])) == 0
        assert not tier.blocks
        assert bytes(lease.buffer(0)) == content(key(0))
        store.check_integrity()
        assert store.room_blocks() == 7
    assert store.room_blocks() == 8
    assert events[-1] == Cleared()


def test_clear_uses_the_tiers_own_clear(make_store: MakeStore) -> None:
    class Clearing(DictTier):
        def clear(self) -> None:
            self.blocks.clear()

    tier = Clearing()
    below(tier, 7)
    store = make_store(lower=tier)
    store.clear()
    assert not tier.blocks


def test_a_block_cleared_while_on_its_way_down_does_not_come_back(
    make_store: MakeStore, tier: DictTier
) -> None:
    store = make_store()
    tier.open.clear()
    put(store, [0])
    assert tier.hanging.acquire(timeout=WAIT_S)
    store.clear()
    store.check_integrity()
    assert store.room_blocks() == 7
    tier.open.set()
    put(store, [1])
    assert store.flush(WAIT_S)
    assert set(tier.blocks) == {key(1)}
    assert store.room_blocks() == 8


def test_a_load_cleared_under_way_still_serves_its_lease(
    make_store: MakeStore, tier: DictTier
) -> None:
    store = make_store(io_threads=1)
    below(tier, 0, 1)
    tier.open.clear()
    with store.read([key(0), key(1)], deadline_s=WAIT_S) as lease:
        assert tier.hanging.acquire(timeout=WAIT_S)
        with store._lock:
            store._table.detach_all()
        store.check_integrity()
        tier.open.set()
        assert lease.wait(0) is Outcome.HIT
        assert bytes(lease.buffer(0)) == content(key(0))
    store.check_integrity()
    assert store.stats().free_blocks == 8


def test_a_queued_load_that_was_cleared_is_cancelled_once(
    make_store: MakeStore, tier: DictTier
) -> None:
    """A queued load was detached by `clear`; the release of its lease freed its slot twice."""
    store = make_store(io_threads=1)
    below(tier, 0, 1)
    tier.open.clear()
    with store.read([key(0), key(1)], deadline_s=WAIT_S):
        assert tier.hanging.acquire(timeout=WAIT_S)
        store.clear()
    store.check_integrity()
    assert store.stats().free_blocks == 7
    tier.open.set()


def test_a_write_that_was_cleared_under_way_commits_unless_another_was_first(
    make_store: MakeStore,
) -> None:
    store = make_store(lower=None)
    with store.write([ref(0), ref(1)]) as lease:
        store.clear()
        store.check_integrity()
        assert put(store, [0]) == [True]
        lease.buffer(1)[:] = content(key(1))
        assert [lease.commit(0), lease.commit(1)] == [False, True]
        store.check_integrity()
    with store.write([ref(2)]):
        store.clear()
    store.check_integrity()
    assert store.stats().write_lost == 1
    assert store.stats().abandoned == 1


def test_a_committed_block_stays_readable_in_its_write_lease_but_not_writable(
    make_store: MakeStore,
) -> None:
    store = make_store()
    with store.write([ref(0)]) as lease:
        lease.buffer(0)[:] = content(key(0))
        lease.commit(0)
        assert bytes(lease.buffer(0)) == content(key(0))
        with pytest.raises(TypeError):
            lease.buffer(0)[0] = 0
        assert store.arena.offset(0) == lease.slot(0)
        store.clear()


def test_blocks_read_in_another_order_never_become_each_others_parents(
    make_store: MakeStore, tier: DictTier
) -> None:
    """A ring of parents has no leaf: none of it could ever be evicted."""
    store = make_store(blocks=4)
    below(tier, 0, 1, 2)
    with store.read([key(n) for n in range(3)], deadline_s=WAIT_S) as lease:
        assert lease.wait(2) is Outcome.HIT
    store.evict([key(0)])
    below(tier, 0)
    with store.read([key(2), key(0)], deadline_s=WAIT_S) as lease:  # 0 under 2 under 1 under 0
        assert lease.wait(1) is Outcome.HIT
    store.check_integrity()
    assert store.room_blocks() == 4
    put(store, [10, 11, 12, 13])
    store.check_integrity()


def test_forgetting_on_a_hung_tier_ends_in_time_and_says_so(
    make_store: MakeStore, tier: DictTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(stuck_s=0.05)
    put(store, [0, 1])
    assert store.flush(WAIT_S)
    monkeypatch.setattr(tier, "remove", lambda keys: tier.open.wait(WAIT_S))
    tier.open.clear()
    with pytest.raises(TierError, match="remove has not come back within"):
        store.evict([key(0)])
    with pytest.raises(TierError, match="has not come back"):
        store.clear()
    assert store.list(9, Tier.DRAM) == []
    tier.open.set()


def test_a_block_that_was_pushed_out_by_its_own_batch_is_not_announced_below(
    make_store: MakeStore, tier: DictTier
) -> None:
    told: list[KvEvent] = []
    tier.most_blocks = 2
    store = make_store(blocks=8, events=told.append)
    tier.open.clear()
    put(store, [0])  # under way: the others go in one batch
    assert tier.hanging.acquire(timeout=WAIT_S)
    put(store, range(1, 6))
    tier.open.set()
    assert store.flush(WAIT_S)
    below = {e.keys[0] for e in told if isinstance(e, Stored) and e.tier is Tier.SSD}
    assert {key(4), key(5)} <= below <= {key(0), key(4), key(5)}


def test_a_checksum_that_the_writer_took_goes_down_with_its_block(
    make_store: MakeStore, tier: DictTier
) -> None:
    store = make_store()
    with store.write([ref(0), ref(1)]) as lease:
        for i in range(2):
            lease.buffer(i)[:] = content(key(i))
        lease.commit(0, checksum=77)
        lease.commit(1)
    assert store.flush(WAIT_S)
    assert tier.checksums == {key(0): 77, key(1): None}
