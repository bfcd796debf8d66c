"""What a person does to a store: runs, sums, pins, moves; and that a tenant's are its own alone."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from kvist.core.errors import NoSpaceError, StoreError
from kvist.core.keys import Key
from kvist.core.outcome import BlockRef, Outcome, Tier
from kvist.store import TieredStore
from kvist.store.caretaker import Done
from kvist.store.owners import Owners
from kvist.testing.store_suite import WAIT_S, DictTier, content, key
from kvist.tiers.ssd import FsyncMode, SsdTier

MakeStore = Callable[..., TieredStore]


@pytest.fixture
def disk(tmp_path: Path) -> SsdTier:
    """A real log, whose frames name parents."""
    return SsdTier.open(
        tmp_path / "d", keyspace=bytes(32), capacity_bytes=64 << 20, fsync=FsyncMode.OFF
    )


def write(
    store: TieredStore, numbers: Iterable[int], tenant: str = "", parent: int | None = None
) -> None:
    """A prompt of blocks: each the child of the one before, the first of `parent`."""
    before = None if parent is None else key(parent)
    blocks = []
    for n in numbers:
        blocks.append(BlockRef(key(n), before, tenant))
        before = key(n)
    with store.write(blocks) as lease:
        for i, block in enumerate(blocks):
            lease.buffer(i)[:] = content(block.key)
            assert lease.commit(i)


def keys(*numbers: int) -> list[Key]:
    return [key(n) for n in numbers]


def in_dram(store: TieredStore) -> set[Key]:
    return {b.key for b in store.list(99, Tier.DRAM)}


def shown_runs(store: TieredStore, tier: Tier, of: str | None = None) -> set[tuple[Any, ...]]:
    return {
        (int.from_bytes(r.first), int.from_bytes(r.last), r.blocks, r.tenant)
        for r in store.caretaker.runs(tier, of)
    }


def test_runs_end_where_prompts_part_and_where_tenants_change(make_store: MakeStore) -> None:
    store = make_store(lower=None)
    write(store, [0, 1])
    write(store, [2, 3], parent=1)
    write(store, [4], parent=1)
    write(store, [5], "a", parent=4)
    assert shown_runs(store, Tier.DRAM) == {
        (0, 1, 2, ""),
        (2, 3, 2, ""),
        (4, 4, 1, ""),
        (5, 5, 1, "a"),
    }
    assert shown_runs(store, Tier.DRAM, "a") == {(5, 5, 1, "a")}


def test_every_block_is_in_one_run(make_store: MakeStore) -> None:
    store = make_store(lower=None, blocks=64)
    for start in range(0, 60, 6):
        write(store, range(start, start + 6), parent=start // 2 if start else None)
    runs = list(store.caretaker.runs(Tier.DRAM, None))
    assert sum(run.blocks for run in runs) == 60
    assert sum(run.size_bytes for run in runs) == 60 * store.raw_bytes


def test_age_is_the_time_in_dram(make_store: MakeStore, clock: Any) -> None:
    store = make_store(lower=None, clock=clock)
    write(store, [0])
    clock.now_s = 7.0
    write(store, [1], parent=0)
    (run,) = store.caretaker.runs(Tier.DRAM, None)
    assert run.age_s == 0.0
    assert [b.age_s for b in store.caretaker.blocks(Tier.DRAM, None)] == [7.0, 0.0]


def test_runs_below_are_those_written_one_after_the_other(
    make_store: MakeStore, disk: SsdTier
) -> None:
    store = make_store(lower=disk)
    write(store, [0, 1, 2])
    assert store.flush(WAIT_S)
    write(store, [3], "a", parent=2)
    assert store.flush(WAIT_S)
    assert shown_runs(store, Tier.SSD) == {(0, 2, 3, ""), (3, 3, 1, "a")}
    for held in store.caretaker.usage(None):
        assert held.size_bytes >= held.blocks * store.raw_bytes


def test_a_prefix_is_found_by_the_first_digits_of_its_last_key(
    make_store: MakeStore, disk: SsdTier
) -> None:
    """Also where its blocks have left DRAM, and their parents are known from frames alone."""
    store = make_store(lower=disk, blocks=4)
    care = store.caretaker
    write(store, [0, 1, 2])
    assert store.flush(WAIT_S)
    care.demote(keys(0, 1, 2), None, deadline_s=WAIT_S)
    write(store, [7], parent=2)
    assert store.flush(WAIT_S)
    found = list(care.prefix(key(7).hex(), None, None, alone=False))
    assert [b.key for b in found if b.tier is Tier.SSD] == keys(0, 1, 2, 7)
    assert [b.parent for b in found if b.tier is Tier.SSD] == [None, *keys(0, 1, 2)]
    assert [b.key for b in care.prefix(key(2).hex(), None, None, alone=True)] == keys(2)
    with pytest.raises(StoreError, match="several"):
        list(care.prefix("00", None, None, alone=False))
    with pytest.raises(StoreError, match="no block"):
        list(care.prefix("ff", None, None, alone=False))
    with pytest.raises(StoreError, match="no block"):
        list(care.prefix(key(8).hex(), None, None, alone=False))


def test_sums_are_by_tenant_and_tier_also_after_dram_has_forgotten(make_store: MakeStore) -> None:
    store = make_store()
    write(store, [0, 1], "a")
    write(store, [2], "b")
    write(store, [3])
    assert store.flush(WAIT_S)
    care = store.caretaker
    care.demote(keys(0, 2, 3), None, deadline_s=WAIT_S)
    got = {(h.tier, h.tenant): h.blocks for h in care.usage(None)}
    assert got == {(Tier.DRAM, "a"): 1, (Tier.SSD, "a"): 2, (Tier.SSD, "b"): 1, (Tier.SSD, None): 1}
    assert {(h.tier, h.tenant) for h in care.usage("b")} == {(Tier.SSD, "b")}


def test_pins_hold_and_have_a_bound(make_store: MakeStore) -> None:
    store = make_store(lower=None)
    care = store.caretaker
    write(store, range(6))
    assert care.pin(keys(0, 1, 2, 9), None) == Done(3, 0, 1)
    assert care.pin(keys(2, 3), None) == Done(1, 1, 0)
    with pytest.raises(NoSpaceError, match="at most 4"):
        care.pin(keys(4), None)
    assert care.pin(keys(0), None) == Done(0, 1, 0)
    write(store, range(10, 14))
    assert set(keys(0, 1, 2, 3)) <= in_dram(store)
    assert care.unpin(keys(0, 1, 9), None) == Done(2, 1, 0)


def test_demotion_waits_for_what_is_on_its_way_and_leaves_what_is_held(
    make_store: MakeStore, tier: DictTier
) -> None:
    store = make_store()
    tier.open.clear()
    write(store, range(4))
    care = store.caretaker
    assert care.demote(keys(0), None, deadline_s=0.0).changed == 0
    tier.open.set()
    care.pin(keys(1), None)
    with store.read(keys(2), deadline_s=WAIT_S):
        assert store.flush(WAIT_S)
        assert care.demote(keys(0, 1, 2, 3, 9), None, deadline_s=WAIT_S) == Done(2, 0, 3)
    assert in_dram(store) == set(keys(1, 2))
    assert care.demote(keys(0), None, deadline_s=WAIT_S) == Done(0, 1, 0)
    with store.read(keys(0), deadline_s=WAIT_S) as lease:
        assert lease.wait(0) is Outcome.HIT


def test_demotion_needs_something_below(make_store: MakeStore) -> None:
    store = make_store(lower=None)
    write(store, [0])
    with pytest.raises(StoreError, match="nothing is below"):
        store.caretaker.demote(keys(0), None, deadline_s=WAIT_S)


def test_promotion_moves_bytes_and_keeps_who_follows_whom(
    make_store: MakeStore, disk: SsdTier
) -> None:
    store = make_store(lower=disk, blocks=64)
    care = store.caretaker
    write(store, range(20), "a")
    write(store, range(30, 40), "b")
    assert store.flush(WAIT_S)
    everything = [*range(20), *range(30, 40)]
    care.demote(keys(*everything), None, deadline_s=WAIT_S)
    assert in_dram(store) == set()
    parents = [None, *keys(*range(19)), None, *keys(*range(30, 39))]
    done = care.promote(keys(*everything), parents, None, deadline_s=WAIT_S)
    assert done == Done(30, 0, 0)
    assert shown_runs(store, Tier.DRAM) == {(0, 19, 20, "a"), (30, 39, 10, "b")}
    with store.read(keys(*range(20)), deadline_s=0.0) as lease:
        assert all(bytes(lease.buffer(i)) == content(key(i)) for i in range(20))
    assert care.promote(keys(0, 50), [None, None], None, deadline_s=WAIT_S) == Done(0, 1, 1)


def test_promotion_ends_at_its_deadline_when_the_medium_hangs(
    make_store: MakeStore, tier: DictTier
) -> None:
    store = make_store(stuck_s=60.0)
    tier.blocks = {k: content(k) for k in keys(0, 1)}
    tier.open.clear()
    assert store.caretaker.promote(keys(0, 1), [None, key(0)], None, deadline_s=0.1).changed == 0
    tier.open.set()


def test_promotion_of_more_than_dram_holds_says_what_is_left(
    make_store: MakeStore, tier: DictTier
) -> None:
    store = make_store(blocks=4)
    tier.blocks = {k: content(k) for k in keys(*range(10))}
    write(store, [20, 21])
    assert store.flush(WAIT_S)
    store.caretaker.pin(keys(20, 21), None)
    done = store.caretaker.promote(keys(*range(10)), [None] * 10, None, deadline_s=WAIT_S)
    assert done.left == 10 - done.changed - done.present
    assert set(keys(20, 21)) <= in_dram(store)


def test_a_tenant_touches_no_block_of_another_in_any_tier(make_store: MakeStore) -> None:
    store = make_store()
    care = store.caretaker
    write(store, [0, 1], "a")
    write(store, [2, 3], "b")
    assert store.flush(WAIT_S)
    care.demote(keys(1), None, deadline_s=WAIT_S)
    foreign, absent = keys(0, 1), keys(8, 9)
    for named in (foreign, absent):  # the same answer to both
        assert care.evict(named, "b") == Done(0, 0, 2)
        assert care.pin(named, "b") == Done(0, 0, 2)
        assert care.unpin(named, "b").changed == 0
        assert care.demote(named, "b", deadline_s=0.0) == Done(0, 0, 2)
        assert care.promote(named, [None, None], "b", deadline_s=WAIT_S) == Done(0, 0, 2)
        for one in named:
            with pytest.raises(StoreError, match="no block"):
                list(care.prefix(one.hex(), None, "b", alone=False))
    assert len(store.match(keys(0, 1))) == 2
    assert in_dram(store) == set(keys(0, 2, 3))
    assert {b.key for b in care.blocks(None, "b")} == set(keys(2, 3))
    assert care.clear("b", deadline_s=WAIT_S) == (2, True)
    assert len(store.match(keys(0, 1))) == 2
    assert len(store.match(keys(2))) == 0


def test_a_foreign_key_takes_the_way_of_an_absent_one(make_store: MakeStore) -> None:
    """Neither the policy nor the tier below is asked about it: there is nothing to time."""
    asked: list[Key] = []

    class Watched(DictTier):
        def contains(self, key: Key) -> bool:
            asked.append(key)
            return super().contains(key)

    store = make_store(lower=Watched())
    care = store.caretaker
    write(store, [0, 1], "a")
    assert store.flush(WAIT_S)
    care.demote(keys(1), None, deadline_s=WAIT_S)
    asked.clear()
    before = store.stats()
    for one in keys(0, 1, 9):
        care.evict([one], "b")
        care.pin([one], "b")
        care.demote([one], "b", deadline_s=0.0)
        care.promote([one], [None], "b", deadline_s=WAIT_S)
        with pytest.raises(StoreError):
            list(care.prefix(one.hex(), None, "b", alone=False))
    assert asked == []
    assert store.stats() == before


def test_a_tenant_touches_its_own_block_that_has_left_dram(make_store: MakeStore) -> None:
    store = make_store()
    care = store.caretaker
    write(store, [0, 1], "a")
    assert store.flush(WAIT_S)
    assert care.demote(keys(0, 1), "a", deadline_s=WAIT_S) == Done(2, 0, 0)
    assert care.promote(keys(0), [None], "a", deadline_s=WAIT_S) == Done(1, 0, 0)
    assert care.evict(keys(0, 1), "a") == Done(2, 0, 0)
    assert len(store.match(keys(0))) == len(store.match(keys(1))) == 0


def test_a_parent_that_is_another_tenants_is_not_touched(make_store: MakeStore) -> None:
    """Naming it would keep it in DRAM, and tell by the time whether it is there."""
    store = make_store()
    care = store.caretaker
    write(store, [0], "a")
    write(store, [5], "b")
    assert store.flush(WAIT_S)
    care.demote(keys(5), None, deadline_s=WAIT_S)
    before = store.stats().read_dram
    assert care.promote(keys(5), keys(0), "b", deadline_s=WAIT_S) == Done(1, 0, 0)
    assert store.stats().read_dram == before
    (block,) = care.blocks(Tier.DRAM, "b")
    assert block.parent is None


def test_clearing_a_tenant_leaves_what_is_pinned(make_store: MakeStore) -> None:
    store = make_store()
    write(store, [0, 1], "a")
    store.caretaker.pin(keys(0), None)
    assert store.flush(WAIT_S)
    assert store.caretaker.clear("a", deadline_s=WAIT_S) == (1, True)
    assert in_dram(store) == set(keys(0))
    assert store.caretaker.clear(None, deadline_s=WAIT_S) == (1, True)
    assert store.list(9) == []


def test_owners_are_bounded_and_forget_what_is_gone(make_store: MakeStore, tier: DictTier) -> None:
    owners = Owners(2)
    for n in range(3):
        owners.note(key(n), "a")
    assert [owners.of(key(n)) for n in range(3)] == [None, "a", "a"]
    assert (len(owners), owners.forgotten) == (2, 1)
    owners.note(key(1), "")
    owners.forget(keys(2, 5))
    assert len(owners) == 0
    none = Owners(0)
    none.note(key(0), "a")
    assert len(none) == 0
    store = make_store(blocks=2)
    tier.most_blocks = 2
    for n in range(6):
        write(store, [n], "a")
        assert store.flush(WAIT_S)
    assert len(store._table.owners) <= 2  # the tier below told what it dropped
