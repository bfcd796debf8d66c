"""Loads through a tier that reads many blocks at once: settled one by one, none left in limbo."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from kvist.core.errors import TierError
from kvist.core.keys import Key
from kvist.core.outcome import Outcome, ReadTotals, Tier
from kvist.store import TieredStore
from kvist.testing.store_suite import RAW_BYTES, WAIT_S, DictTier, content, key, put

MakeStore = Callable[..., TieredStore]


class BatchTier(DictTier):
    """Yields outcomes in reverse order; waits for `gate` before the last."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.batches: list[int] = []
        self.bad: set[Key] = set()
        self.raises: Exception | None = None

    def read_many(
        self, items: Sequence[tuple[Key, memoryview]]
    ) -> Iterator[tuple[int, Outcome | TierError]]:
        self.batches.append(len(items))
        for i in reversed(range(len(items))):
            block, out = items[i]
            if i == 0:
                assert self.gate.wait(WAIT_S)
                if self.raises is not None:
                    raise self.raises
            if block in self.bad:
                yield i, TierError(5, "bad sector")
            else:
                yield i, self.read_into(block, out)


def filled(count: int) -> BatchTier:
    tier = BatchTier()
    for n in range(count):
        tier.blocks[key(n)] = content(key(n))
    return tier


def test_blocks_of_a_batch_arrive_before_it_ends(make_store: MakeStore) -> None:
    tier = filled(8)
    tier.gate.clear()
    store = make_store(blocks=16, lower=tier, io_threads=1)
    with store.read([key(n) for n in range(8)], deadline_s=WAIT_S) as lease:
        assert lease.wait(1) is Outcome.HIT
        assert lease.outcome(0) is Outcome.PENDING
        tier.gate.set()
        assert lease.wait(0) is Outcome.HIT
        assert all(lease.wait(n) is Outcome.HIT for n in range(8))
        assert all(bytes(lease.buffer(n)) == content(key(n)) for n in range(8))
    assert store.stats().loaded == 8
    assert max(tier.batches) > 1
    store.close()


def test_misses_and_errors_of_a_batch_are_their_own_blocks(make_store: MakeStore) -> None:
    tier = filled(6)
    tier.bad = {key(2)}
    store = make_store(blocks=16, lower=tier, io_threads=1)
    lease = store.read([key(n) for n in range(6)], deadline_s=WAIT_S)
    outcomes = [lease.wait(n) for n in range(6)]
    lease.release()
    assert [n for n, o in enumerate(outcomes) if o is not Outcome.HIT] == [2]
    assert store.stats().load_failed == 1
    store.close()


def test_batch_that_breaks_off_fails_what_it_did_not_bring(make_store: MakeStore) -> None:
    tier = filled(6)
    tier.raises = TierError(5, "gone")
    store = make_store(blocks=16, lower=tier, io_threads=1)
    lease = store.read([key(n) for n in range(6)], deadline_s=WAIT_S)
    assert [lease.wait(n) for n in range(6)] == [Outcome.MISS, *[Outcome.HIT] * 5]
    lease.release()
    store.check_integrity()
    store.close()


def test_match_over_both_tiers_ends_at_the_first_absent_block(make_store: MakeStore) -> None:
    tier = BatchTier()
    store = make_store(blocks=16, lower=tier)
    put(store, [0, 3, 6])
    for n in (1, 2, 4, 7):
        tier.blocks[key(n)] = content(key(n))
    dram, ssd = Tier.DRAM, Tier.SSD
    assert store.match([key(n) for n in range(9)]).tiers == (dram, ssd, ssd, dram, ssd)
    assert store.match([key(n) for n in (0, 3, 6)]).tiers == (dram,) * 3
    assert store.match([key(n) for n in (0, 3, 1, 2)]).tiers == (dram, dram, ssd, ssd)
    assert store.match([key(9)]).tiers == ()
    store.close()


def test_what_was_read_is_counted_with_the_time_in_which_anything_was(
    make_store: MakeStore, clock: Callable[[], float]
) -> None:
    tier = filled(4)
    store = make_store(blocks=8, lower=tier, io_threads=1, clock=clock)
    assert store.read_totals() == {Tier.SSD: ReadTotals()}
    tier.gate.clear()
    with store.read([key(n) for n in range(4)], deadline_s=WAIT_S) as lease:
        assert lease.wait(1) is Outcome.HIT
        clock.now_s = 0.5  # type: ignore[attr-defined]
        under_way = store.read_totals()[Tier.SSD]
        tier.gate.set()
        assert lease.wait(0) is Outcome.HIT
    assert under_way.busy_s == 0.5
    assert store.read_totals()[Tier.SSD].size_bytes == 4 * RAW_BYTES
