"""After a start the newest blocks come back to DRAM: bounded, in order, and in nobody's way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvist.core.outcome import BlockRef, Outcome, Tier
from kvist.policy import LeafLru
from kvist.store import TieredStore
from kvist.testing.store_suite import RAW_BYTES, WAIT_S, DictTier, content, key, put
from kvist.tiers.dram import PAGE_BYTES, Arena
from kvist.tiers.protocol import Payload
from kvist.tiers.ssd import SsdTier

MakeStore = Callable[..., TieredStore]
Eventually = Callable[[TieredStore, Callable[[], bool]], None]


def fill(tier: DictTier, *numbers: int) -> None:
    for n in numbers:
        tier.blocks[key(n)] = content(key(n))


def resident(store: TieredStore) -> set[bytes]:
    return {block.key for block in store.list(1000, Tier.DRAM)}


def test_the_newest_blocks_come_back_and_are_read_without_the_tier(
    make_store: MakeStore, tier: DictTier, eventually: Eventually
) -> None:
    fill(tier, *range(20))
    store = make_store(16, restore_blocks=6)
    eventually(store, lambda: store.stats().restored == 6)
    assert resident(store) == {key(n) for n in range(14, 20)}
    with store.read([key(n) for n in range(14, 20)], deadline_s=WAIT_S) as lease:
        assert lease.hits() == 6
        assert bytes(lease.buffer(0)) == content(key(14))
    stats = store.stats()
    assert (stats.read_dram, stats.read_lower, stats.prefetching_blocks) == (6, 0, 0)


def test_nothing_is_evicted_for_what_is_restored(
    make_store: MakeStore, tier: DictTier, eventually: Eventually
) -> None:
    fill(tier, *range(20))
    tier.listable.clear()  # the store holds blocks of its own before the list is to be had
    store = make_store(4, restore_blocks=4)
    with store.write([BlockRef(key(n), None) for n in (50, 51, 52)]) as lease:
        for i in range(3):
            lease.buffer(i)[:] = content(key(50 + i))
            lease.commit(i)
    tier.listable.set()
    eventually(store, lambda: store.stats().restored == 1)
    assert {key(50), key(51), key(52)} <= resident(store)
    assert store.stats().evicted == 0


def test_restored_blocks_are_evicted_in_the_order_of_their_writes(
    make_store: MakeStore, tier: DictTier, eventually: Eventually
) -> None:
    fill(tier, *range(4))
    store = make_store(4, restore_blocks=4)
    eventually(store, lambda: store.stats().restored == 4)
    put(store, [90])
    assert resident(store) == {key(1), key(2), key(3), key(90)}


def test_a_block_that_is_gone_or_fails_to_come_is_simply_not_there(
    make_store: MakeStore, tier: DictTier, eventually: Eventually
) -> None:
    fill(tier, *range(3))
    tier.forgetful = True
    store = make_store(8, restore_blocks=8)
    eventually(store, lambda: store.stats().load_missed == 3)
    assert resident(store) == set()
    assert store.match([key(0)]).tiers == ()


def test_a_tier_that_cannot_be_listed_restores_nothing(
    make_store: MakeStore, tier: DictTier, eventually: Eventually
) -> None:
    fill(tier, 1)
    tier.broken = True
    store = make_store(8, restore_blocks=8)
    restorer: Any = store._restorer
    restorer.thread.join(WAIT_S)
    assert not restorer.thread.is_alive()
    tier.broken = False
    with store.read([key(1)], deadline_s=WAIT_S) as lease:
        assert lease.wait(0) is Outcome.HIT
    assert store.stats().restored == 0


def test_a_store_that_closes_meanwhile_does_not_wait_for_the_rest(
    make_store: MakeStore, tier: DictTier
) -> None:
    fill(tier, *range(8))
    tier.open.clear()
    store = make_store(8, restore_blocks=8)
    assert tier.hanging.acquire(timeout=WAIT_S)
    tier.open.set()
    store.close(deadline_s=WAIT_S)
    restorer: Any = store._restorer
    assert not restorer.thread.is_alive()
    assert tier.closed


def test_blocks_of_other_keyspaces_are_not_brought_back(tmp_path: Path) -> None:
    """Two models in one folder: the other's blocks would fill DRAM and be of no use."""
    for name, numbers in ((b"o" * 32, range(10, 20)), (b"k" * 32, range(3))):
        tier = SsdTier.open(tmp_path, keyspace=name, capacity_bytes=1 << 20)
        tier.put([Payload(key(n), None, memoryview(content(key(n)))) for n in numbers])
        tier.close()
    lower = SsdTier.open(tmp_path, keyspace=b"k" * 32, capacity_bytes=1 << 20)
    arena = Arena(16 * PAGE_BYTES, slot_bytes=RAW_BYTES)
    with TieredStore(arena, LeafLru(), lower, raw_bytes=RAW_BYTES, restore_blocks=16) as store:
        restorer: Any = store._restorer
        restorer.thread.join(WAIT_S)
        assert resident(store) == {key(n) for n in range(3)}
        assert store.stats().load_missed == 0
