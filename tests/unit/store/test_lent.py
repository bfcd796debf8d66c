"""Blocks that other hosts lend: kept on this host's disk, never passed on, never waited for."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from kvist.core.errors import ClosedError
from kvist.core.keys import Key
from kvist.core.outcome import Outcome
from kvist.native import checksum
from kvist.policy import LeafLru, SecondSight
from kvist.store import TieredStore
from kvist.testing.store_suite import RAW_BYTES, WAIT_S, DictTier, content, key, put
from kvist.tiers.dram import PAGE_BYTES, Arena
from kvist.tiers.protocol import Payload

SLOTS = 8


class LendingTier(DictTier):
    """A disk and a lender in one dict: `lent` says which blocks are another host's."""

    def __init__(self) -> None:
        super().__init__()
        self.lent: set[Key] = set()
        self.has_disk = True

    def keeps(self, key: Key) -> bool:
        return self.contains(key) and key not in self.lent

    def holds(self, key: Key) -> bool:
        return self.keeps(key)

    def lacks(self, key: Key) -> bool:
        return self.has_disk and not self.keeps(key)

    def put(self, payloads: Sequence[Payload]) -> None:
        super().put(payloads)
        for payload in payloads:
            self.lent.discard(payload.key)

    def lend(self, *numbers: int) -> None:
        for n in numbers:
            self.blocks[key(n)] = content(key(n))
            self.lent.add(key(n))


@pytest.fixture
def tier() -> LendingTier:
    return LendingTier()


@pytest.fixture
def store(tier: LendingTier) -> Iterator[TieredStore]:
    with opened(tier) as store:
        yield store
        store.check_integrity()


def opened(tier: LendingTier, **options: object) -> TieredStore:
    arena = Arena(SLOTS * PAGE_BYTES, slot_bytes=RAW_BYTES)
    return TieredStore(arena, LeafLru(), tier, raw_bytes=RAW_BYTES, **options)  # type: ignore[arg-type]


def read(store: TieredStore, *numbers: int) -> list[bool]:
    with store.read([key(n) for n in numbers], deadline_s=WAIT_S) as lease:
        hits = [lease.wait(i) is Outcome.HIT for i in range(len(numbers))]
        for i, n in enumerate(numbers):
            assert not hits[i] or bytes(lease.buffer(i)) == content(key(n))
        return hits


def test_block_read_from_another_host_is_written_to_the_disk(
    store: TieredStore, tier: LendingTier
) -> None:
    tier.lend(0, 1)
    assert read(store, 0, 1) == [True, True]
    assert store.flush(WAIT_S)
    assert {k for batch in tier.puts for k in batch} == {key(0), key(1)}
    assert not tier.lent
    before = len(tier.puts)
    assert read(store, 0, 1) == [True, True]
    assert store.flush(WAIT_S)
    assert len(tier.puts) == before


def test_without_a_disk_nothing_is_written_back_to_where_it_came_from(
    store: TieredStore, tier: LendingTier
) -> None:
    tier.has_disk = False
    tier.lend(0)
    assert read(store, 0) == [True]
    assert store.flush(WAIT_S)
    assert tier.puts == []


def test_insert_filter_decides_about_lent_blocks_as_about_others(tier: LendingTier) -> None:
    tier.lend(0)
    with opened(tier, insert_filter=SecondSight(100)) as store:
        assert read(store, 0) == [True]
        assert store.flush(WAIT_S)
        assert tier.puts == []
        assert store.stats().filtered == 1
        assert read(store, 0) == [True]  # seen twice
        assert store.flush(WAIT_S)
        assert tier.puts == [(key(0),)]
        store.check_integrity()


def test_lent_blocks_never_keep_others_out_while_the_disk_hangs(
    store: TieredStore, tier: LendingTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are elsewhere: what waits for a slow disk may be dropped, all but what it writes."""
    tier.lend(*range(3 * SLOTS))
    hanging, gate = threading.Event(), threading.Event()

    def hang(payloads: Sequence[Payload]) -> None:
        hanging.set()
        assert gate.wait(WAIT_S)

    with monkeypatch.context() as patch:
        patch.setattr(tier, "put", hang)
        assert read(store, 0) == [True]
        assert hanging.wait(WAIT_S)
        for first in range(1, 3 * SLOTS - 1, 2):
            assert read(store, first, first + 1) == [True, True]
        assert store.room_blocks() == SLOTS - 1
        store.check_integrity()
        gate.set()
    assert store.flush(WAIT_S)


def test_block_that_only_others_have_is_written_when_it_was_computed(
    store: TieredStore, tier: LendingTier
) -> None:
    tier.lend(0)
    assert put(store, [0]) == [True]
    assert put(store, [0]) == [False]
    assert store.flush(WAIT_S)
    assert tier.puts == [(key(0),)]


def test_others_get_what_is_here_and_nothing_that_is_lent(
    store: TieredStore, tier: LendingTier
) -> None:
    assert all(put(store, [0]))
    tier.blocks[key(1)] = content(key(1))
    tier.lend(2)
    keys = [key(n) for n in range(4)]
    assert store.own.held(keys) == [True, True, False, False]
    with store.own.read(keys, deadline_s=WAIT_S) as lease:
        assert [lease.wait(i) for i in range(4)] == [
            Outcome.HIT,
            Outcome.HIT,
            Outcome.MISS,
            Outcome.MISS,
        ]
        assert [lease.checksum(i) for i in range(2)] == [checksum(content(k)) for k in keys[:2]]
    assert key(2) not in tier.reads


def test_load_from_another_host_is_not_joined_by_other_hosts(
    store: TieredStore, tier: LendingTier
) -> None:
    """Two hosts that read the same block from each other would wait for each other."""
    tier.lend(0)
    tier.open.clear()
    try:
        with store.read([key(0)], deadline_s=WAIT_S) as lease:
            assert tier.hanging.acquire(timeout=WAIT_S)
            assert store.own.held([key(0)]) == [False]
            with store.own.read([key(0)], deadline_s=WAIT_S) as theirs:
                assert theirs.outcome(0) is Outcome.MISS
            tier.open.set()
            assert lease.wait(0) is Outcome.HIT
    finally:
        tier.open.set()


def test_closed_store_lends_nothing(tier: LendingTier) -> None:
    store = opened(tier)
    store.close()
    with pytest.raises(ClosedError):
        store.own.held([key(0)])
    with pytest.raises(ClosedError):
        store.own.read([key(0)], deadline_s=1.0)
