"""DRAM goes to the next store: proven block by block, and no slot before nobody can touch it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvist.core.outcome import BlockRef, Outcome, Tier
from kvist.native import checksum
from kvist.node.estates import LifeFences
from kvist.policy import SecondSight
from kvist.store import TieredStore
from kvist.store.desk import Holder
from kvist.store.entry import NO_SLOT
from kvist.store.quota import Quota
from kvist.store.succession import Estate
from kvist.testing.store_suite import RAW_BYTES, WAIT_S, DictTier, content, key, put, ref
from kvist.tiers.dram import ArenaMap

MakeStore = Callable[..., TieredStore]
Eventually = Callable[[TieredStore, Callable[[], bool]], None]
Pipe = tuple[int, int]
BLOCKS = 8


@pytest.fixture
def pipes() -> Iterator[Callable[[], Pipe]]:
    """Makes life pipes: a reading end, and a writing end, which is closed when the test ends."""
    writers: list[int] = []

    def make() -> Pipe:
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        writers.append(writer)
        return reader, writer

    yield make
    for writer in writers:
        try:
            os.close(writer)
        except OSError:
            continue


def leave(
    store: TieredStore, leases: Iterable[Holder] = (), *, until: float = math.inf
) -> tuple[Estate | None, int]:
    """Closes a store; what it leaves, and the memory."""
    arena = store.arena
    fd = os.dup(arena.fd)
    spare = ArenaMap(os.dup(fd), arena.size_bytes, slot_bytes=arena.slot_bytes)
    store.succession.halt()
    store.close()
    with spare:
        return store.succession.leave(list(leases), spare, until=until), fd


def pass_on(
    store: TieredStore,
    make_store: MakeStore,
    leases: Iterable[Holder] = (),
    *,
    fences: LifeFences | None = None,
    change: Callable[[Estate], Estate] = lambda estate: estate,
    **options: Any,
) -> TieredStore:
    """The store that comes after another one."""
    estate, fd = leave(store, leases)
    assert estate is not None
    new = make_store(options.pop("blocks", BLOCKS), fd=fd, **options)
    new.succession.inherit(change(estate), fences or LifeFences({}))
    return new


def slots_of(*leases: Holder) -> set[int]:
    return {e.slot for lease in leases for e in lease.held() if e.slot != NO_SLOT}


def over(store: TieredStore) -> bool:
    """Whether nothing of what was inherited is waited for."""
    return not store.succession.held() and store.stats().leases == 0


def holds(store: TieredStore, numbers: Iterable[int]) -> list[bool]:
    """Which blocks are in DRAM, of which each must have its own bytes."""
    found = []
    for n in numbers:
        with store.read([key(n)], deadline_s=WAIT_S) as lease:
            hit = lease.wait(0) is Outcome.HIT
            assert not hit or bytes(lease.buffer(0)) == content(key(n))
            found.append(hit)
    return found


def test_next_store_has_the_blocks_with_their_bytes_owners_and_pins(
    make_store: MakeStore, eventually: Eventually
) -> None:
    old = make_store(BLOCKS, lower=None)
    with old.write([BlockRef(key(n), None, "alice") for n in range(3)]) as lease:
        for i in range(3):
            lease.buffer(i)[:] = content(key(i))
            lease.commit(i)
    assert all(put(old, (4, 5)))
    assert old.pin([key(4)]) == 1
    new = pass_on(old, make_store, lower=None, quota=Quota(0.9))
    eventually(new, lambda: over(new))
    assert new.stats().adopted == 5
    assert holds(new, range(6)) == [True, True, True, False, True, True]
    (first,), (pinned,) = new.stat(key(0)), new.stat(key(4))
    assert (first.tenant, pinned.tenant, pinned.pinned) == ("alice", "", True)
    assert new.stats().pinned_blocks == 1
    new.check_integrity()


def test_order_of_eviction_goes_along(make_store: MakeStore, eventually: Eventually) -> None:
    old = make_store(4, lower=None)
    for n in (10, 20, 30, 40):
        assert put(old, [n]) == [True]
    assert holds(old, (10,)) == [True]  # the oldest is now the hottest
    new = pass_on(old, make_store, lower=None, blocks=4)
    eventually(new, lambda: over(new))
    assert put(new, [50, 60]) == [True, True]
    assert holds(new, (10, 20, 30, 40)) == [True, False, False, True]


def test_larger_arena_takes_over_the_memory_of_a_smaller_one(
    make_store: MakeStore, eventually: Eventually
) -> None:
    old = make_store(4, lower=None)
    assert all(put(old, range(4)))
    new = pass_on(old, make_store, lower=None, blocks=BLOCKS)
    eventually(new, lambda: over(new))
    assert all(put(new, range(4, BLOCKS)))
    assert holds(new, range(BLOCKS)) == [True] * BLOCKS


def test_block_whose_bytes_have_changed_is_dropped(
    make_store: MakeStore, eventually: Eventually
) -> None:
    """A process of this user writes into a slot that it has no lease on."""
    old = make_store(BLOCKS, lower=None)
    with old.write([ref(n) for n in range(3)]) as written:
        for i in range(3):  # with the checksums that a connector takes as it copies
            written.buffer(i)[:] = content(key(i))
            assert written.commit(i, checksum=checksum(written.buffer(i)))
    with old.read([key(1)], deadline_s=WAIT_S) as lease:
        slot = lease.slot(0) // old.arena.slot_bytes
    spoiler = ArenaMap(os.dup(old.arena.fd), old.arena.size_bytes, slot_bytes=old.arena.slot_bytes)
    with spoiler:
        spoiler.view(slot)[RAW_BYTES - 1] ^= 1
    new = pass_on(old, make_store, lower=None)
    eventually(new, lambda: over(new))
    assert holds(new, range(3)) == [True, False, True]
    assert (new.stats().adopted, new.stats().adopt_failed) == (2, 1)
    assert new.room_blocks() == BLOCKS


def test_slot_that_is_being_written_is_free_when_nobody_can_touch_it(
    make_store: MakeStore, eventually: Eventually, pipes: Callable[[], Pipe]
) -> None:
    old = make_store(BLOCKS, lower=None)
    assert all(put(old, range(2)))
    lease = old.write([ref(n) for n in range(2, 5)])
    late = lease.buffer(0)
    reader, writer = pipes()
    fences = LifeFences({reader: slots_of(lease)})
    new = pass_on(old, make_store, [lease], fences=fences, lower=None)
    eventually(new, lambda: new.stats().adopted == 2)
    assert new.room_blocks() == BLOCKS - 3
    assert all(put(new, range(10, 13)))
    late[:] = bytes(RAW_BYTES)  # it is nobody else's slot
    assert holds(new, (0, 1, 2, 10, 11, 12)) == [True, True, False, True, True, True]
    os.close(writer)
    eventually(new, lambda: over(new))
    assert new.room_blocks() == BLOCKS
    assert all(put(new, range(20, 20 + BLOCKS)))
    assert holds(new, range(20, 20 + BLOCKS)) == [True] * BLOCKS


def test_block_that_is_being_read_comes_when_the_last_reader_is_gone(
    make_store: MakeStore, eventually: Eventually, pipes: Callable[[], Pipe]
) -> None:
    old = make_store(BLOCKS, lower=None)
    assert all(put(old, range(2)))
    leases = [old.read([key(0)], deadline_s=WAIT_S) for _ in range(2)]
    kept = leases[0].buffer(0)
    (first, first_end), (second, second_end) = pipes(), pipes()
    fences = LifeFences({first: slots_of(leases[0]), second: slots_of(leases[1])})
    new = pass_on(old, make_store, leases, fences=fences, lower=None)
    eventually(new, lambda: new.stats().adopted == 1)
    os.close(first_end)
    assert put(new, range(10, 10 + BLOCKS - 1)) == [True] * (BLOCKS - 1)  # its slot is no victim
    assert bytes(kept) == content(key(0))
    assert holds(new, (0,)) == [False]
    os.close(second_end)
    eventually(new, lambda: over(new))
    assert holds(new, (0,)) == [True]


@pytest.mark.parametrize("how", ["cleared", "written anew", "changed late"])
def test_block_that_comes_too_late_stays_away(
    make_store: MakeStore, eventually: Eventually, pipes: Callable[[], Pipe], how: str
) -> None:
    old = make_store(BLOCKS, lower=None)
    assert all(put(old, range(2)))
    lease = old.read([key(0), key(1)], deadline_s=WAIT_S)
    reader, writer = pipes()
    slots = slots_of(lease)
    fences = LifeFences({reader: slots})
    new = pass_on(old, make_store, [lease], fences=fences, lower=None)
    if how == "cleared":
        new.clear()
    elif how == "written anew":
        assert put(new, range(2)) == [True, True]
    else:
        for slot in slots:
            new.arena.view(slot)[0] ^= 1
    os.close(writer)
    eventually(new, lambda: over(new))
    assert (new.stats().adopted, new.stats().adopt_failed) == (0, 2)
    assert holds(new, range(2)) == [how == "written anew"] * 2
    new.check_integrity()


def test_what_is_not_below_goes_there_and_what_was_refused_does_not(
    make_store: MakeStore, tier: DictTier, eventually: Eventually
) -> None:
    old = make_store(BLOCKS, insert_filter=SecondSight(100))
    assert all(put(old, range(3)))
    assert old.stats().filtered == 3
    old.evict([key(2)])
    assert put(old, [2]) == [True]  # seen twice: written below
    assert old.flush(WAIT_S)
    tier.broken = True
    old.evict([key(1)])
    assert put(old, [1]) == [True]  # seen twice, and cannot be written
    eventually(old, lambda: tier.broken and old.stats().flush_failed > 0)
    estate, fd = leave(old)
    assert estate is not None
    flags = {block.key: (block.dirty, block.refused) for block in estate.blocks}
    assert flags == {key(0): (False, True), key(1): (True, False), key(2): (False, False)}
    tier.broken = False
    new = make_store(BLOCKS, fd=fd)
    new.succession.inherit(estate, LifeFences({}))
    eventually(new, lambda: over(new))
    assert new.flush(WAIT_S)
    assert set(tier.blocks) == {key(1), key(2)}
    assert new.match([key(0)]).tiers == (Tier.DRAM,)


def test_blocks_of_a_store_without_ssd_go_to_the_ssd_of_the_next(
    make_store: MakeStore, tier: DictTier, eventually: Eventually
) -> None:
    old = make_store(BLOCKS, lower=None)
    assert all(put(old, range(3)))
    new = pass_on(old, make_store)
    eventually(new, lambda: over(new))
    assert new.flush(WAIT_S)
    assert tier.blocks == {key(n): content(key(n)) for n in range(3)}


def test_block_that_was_loaded_gets_a_checksum_or_is_not_left(
    make_store: MakeStore, tier: DictTier, eventually: Eventually
) -> None:
    for n in range(3):
        tier.blocks[key(n)] = content(key(n))
    old = make_store(BLOCKS)
    assert holds(old, range(3)) == [True] * 3
    with old.read([key(0)], deadline_s=WAIT_S) as lease:
        lease.checksum(0)  # a peer has asked for it
    estate, fd = leave(old, until=-math.inf)
    assert estate is not None
    assert [block.key for block in estate.blocks] == [key(0)]
    new = make_store(BLOCKS, fd=fd)
    new.succession.inherit(estate, LifeFences({}))
    eventually(new, lambda: over(new))
    assert new.match([key(n) for n in range(3)]).tiers == (Tier.DRAM, Tier.SSD, Tier.SSD)
    third = pass_on(new, make_store)
    eventually(third, lambda: over(third))
    assert third.stats().adopted == 1


def test_nothing_is_left_while_an_unknown_lease_is_out(make_store: MakeStore) -> None:
    store = make_store(BLOCKS, lower=None)
    assert all(put(store, range(2)))
    lease = store.read([key(0)], deadline_s=WAIT_S)
    estate, fd = leave(store)
    os.close(fd)
    assert estate is None
    lease.release()


def test_nothing_is_left_while_a_medium_may_still_fill_a_slot(
    make_store: MakeStore, tier: DictTier
) -> None:
    """The tier hangs in a read: its thread writes to the slot whenever it comes back."""
    tier.blocks[key(0)] = content(key(0))
    store = make_store(BLOCKS)
    tier.open.clear()
    lease = store.read([key(0)], deadline_s=WAIT_S)
    assert tier.hanging.acquire(timeout=WAIT_S)
    arena = store.arena
    spare = ArenaMap(os.dup(arena.fd), arena.size_bytes, slot_bytes=arena.slot_bytes)
    store.succession.halt()
    store.close(0.2)
    with spare:
        assert store.succession.leave([lease], spare, until=math.inf) is None
    tier.open.set()
    lease.release()


def test_what_is_still_fenced_goes_on_to_the_store_after_the_next(
    make_store: MakeStore, eventually: Eventually, pipes: Callable[[], Pipe]
) -> None:
    old = make_store(BLOCKS, lower=None)
    assert all(put(old, range(2)))
    reading, writing = old.read([key(0)], deadline_s=WAIT_S), old.write([ref(5)])
    reader, writer = pipes()
    fences = LifeFences({reader: slots_of(reading, writing)})
    second = pass_on(old, make_store, [reading, writing], fences=fences, lower=None)
    eventually(second, lambda: second.stats().adopted == 1)
    left = LifeFences({os.dup(fd): slots for fd, slots in second.succession.fences.items()})
    third = pass_on(second, make_store, fences=left, lower=None)
    eventually(third, lambda: third.stats().adopted == 1)
    assert third.room_blocks() == BLOCKS - 2
    os.close(writer)
    eventually(third, lambda: over(third))
    assert holds(third, (0, 1, 5)) == [True, True, False]
    assert third.room_blocks() == BLOCKS
    fences.close()


def test_estate_of_slots_that_are_not_there_is_refused(make_store: MakeStore) -> None:
    from kvist.core.errors import StoreError

    old = make_store(BLOCKS, lower=None)
    assert all(put(old, range(2)))
    estate, fd = leave(old)
    assert estate is not None
    far = [replace(block, slot=block.slot + BLOCKS) for block in estate.blocks]
    twice = [replace(block, slot=0) for block in estate.blocks]
    for blocks in (far, twice):
        new = make_store(BLOCKS, lower=None, fd=os.dup(fd))
        with pytest.raises(StoreError, match="cannot be taken"):
            new.succession.inherit(replace(estate, blocks=blocks), LifeFences({}))
        assert new.room_blocks() == BLOCKS
    os.close(fd)
