"""NodeStore passes the published suite against a real node, with and without a tier below.

Every test has a keyspace of its own: the last one, which nobody uses any more, gives way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_process import NodeProcess

from kvist.core.lease import BlockStore
from kvist.node.client import NodeStore
from kvist.testing.store_suite import WAIT_S, StoreSuite, ref

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def dram_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path_factory.mktemp("n") / "n.sock") as process:
        yield process


@pytest.fixture(scope="module")
def ssd_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    folder: Path = tmp_path_factory.mktemp("n")
    with NodeProcess(folder / "n.sock", ssd=folder / "ssd") as process:
        yield process


def fresh(process: NodeProcess) -> Iterator[NodeStore]:
    """The store of a new keyspace."""
    with process.client(next(_numbers)) as store:
        store.clear()  # keys are the same in all tests, and what is on SSD stays
        yield store
        process.assert_sound()


class TestDramOnly(StoreSuite):
    @pytest.fixture
    def store(self, dram_node: NodeProcess) -> Iterator[NodeStore]:
        yield from fresh(dram_node)


class TestWithTierBelow(StoreSuite):
    @pytest.fixture
    def store(self, ssd_node: NodeProcess) -> Iterator[NodeStore]:
        yield from fresh(ssd_node)

    def drop_from_dram(self, store: BlockStore) -> None:
        assert isinstance(store, NodeStore)
        assert store.flush(WAIT_S)
        with store.write([ref(n) for n in range(900, 900 + self.capacity_blocks)]):
            stats = store.stats()
            assert stats is not None
            assert stats.dram_blocks == 0

    def wait_for_room(self, store: BlockStore, blocks: int) -> None:
        assert isinstance(store, NodeStore)
        if store.room_blocks() < blocks:
            assert store.flush(WAIT_S)
