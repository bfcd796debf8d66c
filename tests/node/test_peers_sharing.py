"""Two real nodes over TCP: what an engine of one wrote, engines of the other read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from node_process import NodeProcess, attach, eventually
from peer_nodes import (
    BLOCK_BYTES,
    BLOCKS,
    client_of,
    fill,
    found,
    free_port,
    key,
    learn,
    peer_node,
    read,
    ref,
)

from kvist.core.lease import BlockStore
from kvist.core.outcome import Tier
from kvist.node.client import NodeStore
from kvist.node.http.prometheus import page
from kvist.testing.store_suite import WAIT_S, StoreSuite

NUMBERS = range(BLOCKS)


def test_what_one_host_wrote_another_reads_with_equal_bytes(folder: Path) -> None:
    port, other = free_port(), free_port()
    both = [port, other]  # the same list on both: each leaves itself out
    with (
        peer_node(folder / "a.sock", listen=port, members=both) as a,
        peer_node(folder / "b.sock", listen=other, members=both) as b,
        client_of(a) as writer,
        client_of(b) as reader,
    ):
        fill(writer, NUMBERS)
        learn(reader, range(BLOCKS + 3))
        assert set(reader.match([key(n) for n in NUMBERS]).tiers) == {Tier.PEER}
        assert read(reader, NUMBERS) == [True] * BLOCKS
        assert set(reader.match([key(n) for n in NUMBERS]).tiers) == {Tier.DRAM}
        assert reader.read_totals()[Tier.PEER].size_bytes == BLOCKS * BLOCK_BYTES
        fill(reader, range(100, 104))
        learn(writer, range(100, 104), 4)
        assert read(writer, range(100, 104)) == [True] * 4
        text = page(b.status())  # what its operator's Prometheus sees
        assert f'\nkvist_peer_blocks_total{{peer="127.0.0.1:{port}"}} {BLOCKS}.0\n' in text
        assert f'\nkvist_peer_resting{{peer="127.0.0.1:{port}"}} 0.0\n' in text
        assert '\nkvist_breaker_open{tier="below-dram"} 0.0\n' in text
        name = f"127.0.0.1:{port}"
        assert b.store_stats()["samples"][f"kvist_peer_blocks_total.{name}"] == BLOCKS
        assert a.status()["peers"]["sent_blocks"] == BLOCKS
        assert f"peer 127.0.0.1:{other} is this node itself" in b.log_text()
        for node in (a, b):
            node.assert_sound()
            assert node.store_stats()["leases"] == 0


def test_what_an_owner_has_only_on_ssd_is_brought_up_and_read(folder: Path) -> None:
    port = free_port()
    with (
        peer_node(folder / "a.sock", listen=port, ssd=folder / "a", blocks=BLOCKS) as a,
        peer_node(folder / "b.sock", members=[port], ssd=folder / "b") as b,
        client_of(a) as writer,
        client_of(b) as reader,
    ):
        fill(writer, NUMBERS)
        assert writer.flush(10.0)
        with writer.write([ref(n) for n in range(900, 900 + BLOCKS)]):
            assert a.store_stats()["dram_blocks"] == 0
        learn(reader, NUMBERS)
        assert read(reader, NUMBERS) == [True] * BLOCKS
        # kept here like what was written here
        assert reader.flush(10.0)
        a.kill()
        reader_gone = [ref(n) for n in range(900, 900 + 2 * BLOCKS)]
        with reader.write(reader_gone):
            assert b.store_stats()["dram_blocks"] == 0
        assert set(reader.match([key(n) for n in NUMBERS]).tiers) == {Tier.SSD}
        assert read(reader, NUMBERS) == [True] * BLOCKS


def test_more_blocks_than_the_owner_has_room_for_come_all_the_same(folder: Path) -> None:
    """Its DRAM holds less than a reader asks for at once, and half of that is leased."""
    port = free_port()
    with (
        peer_node(folder / "a.sock", listen=port, ssd=folder / "a", blocks=4) as a,
        peer_node(folder / "b.sock", members=[port]) as b,
        client_of(a) as writer,
        client_of(b) as reader,
    ):
        for start in range(0, BLOCKS, 2):
            fill(writer, range(start, start + 2))
            assert writer.flush(10.0)
        with writer.read([key(n) for n in range(2)], deadline_s=10.0):
            learn(reader, NUMBERS)
            assert read(reader, NUMBERS).count(True) >= BLOCKS // 2
        eventually(lambda: a.store_stats()["leases"] == 0)


def test_keyspaces_that_a_reader_does_not_name_are_never_served(folder: Path) -> None:
    port = free_port()
    with (
        peer_node(folder / "a.sock", listen=port) as a,
        peer_node(folder / "b.sock", members=[port]) as b,
    ):
        with client_of(a, 1) as writer, client_of(b, 2) as reader:
            fill(writer, NUMBERS)
            assert found(reader, NUMBERS) == 0
            assert read(reader, NUMBERS) == [False] * BLOCKS
        assert a.status()["peers"]["sent_blocks"] == 0
        # the keyspace that is in use there did not give way to the one that was asked for
        assert [k["fingerprint"] for k in a.status()["keyspaces"]] == [attach(1).fingerprint.hex()]


def test_block_that_a_peer_has_is_still_written_here(folder: Path) -> None:
    """It was computed here anyway, and the peer may drop it at any moment."""
    port = free_port()
    with (
        peer_node(folder / "a.sock", listen=port) as a,
        peer_node(folder / "b.sock", members=[port]) as b,
        client_of(a) as writer,
        client_of(b) as reader,
    ):
        fill(writer, range(2))
        learn(reader, range(2), 2)
        fill(reader, range(2))
        assert set(reader.match([key(0), key(1)]).tiers) == {Tier.DRAM}


@pytest.fixture(scope="module")
def reading_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    folder = tmp_path_factory.mktemp("n")
    port = free_port()
    with (
        NodeProcess(folder / "a.sock", options=(f"--set=node.peers.listen=127.0.0.1:{port}",)),
        NodeProcess(
            folder / "b.sock", options=(f"--set=node.peers.members=127.0.0.1:{port}",)
        ) as node,
    ):
        yield node


class TestBesideAPeer(StoreSuite):
    """The suite of every store, on a node that asks another for what it has not."""

    @pytest.fixture
    def store(self, reading_node: NodeProcess) -> Iterator[NodeStore]:
        with reading_node.client(1) as store:
            store.clear()
            yield store
            reading_node.assert_sound()

    def wait_for_room(self, store: BlockStore, blocks: int) -> None:
        assert isinstance(store, NodeStore)
        if store.room_blocks() < blocks:
            assert store.flush(WAIT_S)
