"""The tiered store passes the published suite, with and without a tier below."""

from collections.abc import Iterator

import pytest

from kvist.core.lease import BlockStore
from kvist.policy import LeafLru, Lru
from kvist.store import TieredStore
from kvist.testing.store_suite import RAW_BYTES, WAIT_S, DictTier, StoreSuite, ref
from kvist.tiers.dram import PAGE_BYTES, Arena


class TestDramOnly(StoreSuite):
    @pytest.fixture
    def store(self) -> Iterator[TieredStore]:
        arena = Arena(self.capacity_blocks * PAGE_BYTES, slot_bytes=RAW_BYTES)
        with TieredStore(arena, Lru(), None, raw_bytes=RAW_BYTES) as store:
            yield store
            store.check_integrity()


class TestWithTierBelow(StoreSuite):
    @pytest.fixture
    def store(self) -> Iterator[TieredStore]:
        arena = Arena(self.capacity_blocks * PAGE_BYTES, slot_bytes=RAW_BYTES)
        with TieredStore(arena, LeafLru(), DictTier(), raw_bytes=RAW_BYTES) as store:
            yield store
            store.check_integrity()

    def drop_from_dram(self, store: BlockStore) -> None:
        assert isinstance(store, TieredStore)
        assert store.flush(WAIT_S)
        with store.write([ref(n) for n in range(900, 900 + self.capacity_blocks)]):
            assert store.stats().dram_blocks == 0

    def wait_for_room(self, store: BlockStore, blocks: int) -> None:
        assert isinstance(store, TieredStore)
        if store.room_blocks() < blocks:
            assert store.flush(WAIT_S)
