"""Nodes that find each other through a folder: what one stores, the others know of and read."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster_nodes import cluster_node, cluster_of, keys, met, sample, token_file
from node_process import attach, clean_env, eventually
from peer_nodes import (
    BLOCK_BYTES,
    BLOCKS,
    LONG_S,
    TIMEOUT_S,
    client_of,
    fill,
    found,
    learn,
    no_lease_left,
    read,
    ref,
)

from kvist.core.outcome import Outcome, Tier
from kvist.metrics import BY_NAME
from kvist.node.http.prometheus import page

pytest.importorskip("zmq")
NUMBERS = range(BLOCKS)
EXPIRES_S = 40.0  # far above the ten seconds after which a silent node is gone
LATE_S = 4 * TIMEOUT_S


def test_block_of_one_node_is_read_through_others_without_a_probe(folder: Path) -> None:
    token = token_file(folder)
    with (
        cluster_node(folder, "a", token=token) as a,
        cluster_node(folder, "b", token=token) as b,
        cluster_node(folder, "c", token=token) as c,
        client_of(a) as writer,
        client_of(b) as reader,
        client_of(c) as third,
    ):
        met(a, b, c)
        fill(writer, NUMBERS)
        learn(reader, NUMBERS)
        assert set(reader.match(keys(NUMBERS)).tiers) == {Tier.PEER}
        # what is nowhere is known to be nowhere
        assert found(reader, range(500, 500 + BLOCKS)) == 0
        assert [_readers(node) for node in (a, b, c)] == [0, 0, 0]  # nobody was asked
        assert read(reader, NUMBERS) == [True] * BLOCKS
        assert reader.read_totals()[Tier.PEER].size_bytes == BLOCKS * BLOCK_BYTES
        assert _readers(a) > 0
        assert _readers(c) == 0
        # what the reader has now, the third may read from either
        eventually(lambda: sample(c, "kvist_directory_blocks") == BLOCKS)
        learn(third, NUMBERS)
        assert read(third, NUMBERS) == [True] * BLOCKS
        for node in (a, b, c):
            node.assert_sound()
        no_lease_left(a, b, c)


def _readers(node) -> int:  # type: ignore[no-untyped-def]
    """Connections of other nodes that are open."""
    return int(node.status()["peers"]["readers"])


def test_killed_holder_is_a_miss_in_time_and_is_forgotten_and_known_again(folder: Path) -> None:
    with (
        cluster_node(folder, "a", ssd=True) as a,
        cluster_node(folder, "b") as b,
        client_of(b) as reader,
    ):
        with client_of(a) as writer:
            met(a, b)
            fill(writer, NUMBERS)
            assert writer.flush(LONG_S)
            learn(reader, NUMBERS)
            assert read(reader, NUMBERS[:2]) == [True] * 2
        a.kill()
        began = time.monotonic()
        assert read(reader, NUMBERS, 3 * LATE_S) == [True] * 2 + [False] * (BLOCKS - 2)
        assert time.monotonic() - began < LATE_S
        assert found(reader, NUMBERS) == 2
        eventually(lambda: sample(b, "kvist_directory_blocks") == 0, EXPIRES_S)
        eventually(lambda: cluster_of(b)["nodes"] == {}, EXPIRES_S)
        a.start_again()
        with client_of(a):  # what is on its disk is known as soon as its keyspace is open
            met(a, b)
            learn(reader, NUMBERS)
            assert read(reader, NUMBERS) == [True] * BLOCKS
        no_lease_left(b)


def test_node_that_ends_in_order_is_forgotten_at_once(folder: Path) -> None:
    with cluster_node(folder, "b") as b, client_of(b) as reader:
        with cluster_node(folder, "a", options=["node.cluster.drain_on_stop_s=0"]) as a:
            writer = client_of(a)
            met(a, b)
            fill(writer, NUMBERS)
            learn(reader, NUMBERS)
            writer.close()
            a.terminate()
            eventually(lambda: found(reader, NUMBERS) == 0)
            eventually(lambda: cluster_of(b)["nodes"] == {})
        assert "drained" in a.log_text()


def test_evicted_blocks_are_forgotten_by_others_and_known_again_when_stored(folder: Path) -> None:
    with (
        cluster_node(folder, "a", blocks=BLOCKS) as a,
        cluster_node(folder, "b") as b,
        client_of(a) as writer,
        client_of(b) as reader,
    ):
        met(a, b)
        fill(writer, NUMBERS)
        learn(reader, NUMBERS)
        with writer.write([ref(n) for n in range(900, 900 + BLOCKS)]):
            assert read(reader, NUMBERS) == [False] * BLOCKS
            eventually(lambda: found(reader, NUMBERS) == 0)
        fill(writer, NUMBERS)
        learn(reader, NUMBERS)
        assert read(reader, NUMBERS) == [True] * BLOCKS


def test_node_with_another_secret_hears_nothing_and_reads_nothing(folder: Path) -> None:
    ours, other = token_file(folder), token_file(folder, "other")
    with (
        cluster_node(folder, "a", token=ours) as a,
        cluster_node(folder, "b", token=ours) as b,
        cluster_node(folder, "c", token=other) as c,
        client_of(a) as writer,
        client_of(b) as reader,
        client_of(c) as stranger,
    ):
        fill(writer, NUMBERS)
        learn(reader, NUMBERS)
        fill(stranger, range(100, 104))
        assert found(stranger, NUMBERS) == 0
        assert read(stranger, NUMBERS) == [False] * BLOCKS
        assert sample(c, "kvist_directory_blocks") == 0
        assert sample(a, "kvist_directory_blocks") == 0
        assert found(reader, range(100, 104)) == 0
        assert a.status()["peers"]["sent_blocks"] == 0
        assert c.status()["peers"]["sent_blocks"] == 0
        assert b.status()["peers"]["sent_blocks"] == 0


def test_blocks_of_another_keyspace_are_never_read_though_their_keys_are_equal(
    folder: Path,
) -> None:
    """No two keyspaces have a key in common; if they had, who holds a block would still refuse."""
    with (
        cluster_node(folder, "a") as a,
        cluster_node(folder, "b") as b,
        client_of(a, 1) as writer,
        client_of(b, 2) as other,
    ):
        met(a, b)
        fill(writer, NUMBERS)
        eventually(lambda: sample(b, "kvist_directory_blocks") == BLOCKS)
        with other.read(keys(NUMBERS), deadline_s=LONG_S) as lease:
            assert {lease.wait(i) for i in range(BLOCKS)} == {Outcome.MISS}
        assert a.status()["peers"]["sent_blocks"] == 0
        eventually(lambda: found(other, NUMBERS) == 0)
        assert sample(b, "kvist_directory_corrections_total") == BLOCKS
        assert [k["fingerprint"] for k in a.status()["keyspaces"]] == [attach(1).fingerprint.hex()]


def test_keyspace_that_gives_way_to_another_is_forgotten_by_others(folder: Path) -> None:
    with (
        cluster_node(folder, "a") as a,
        cluster_node(folder, "b") as b,
        client_of(b) as reader,
    ):
        with client_of(a) as writer:
            met(a, b)
            fill(writer, NUMBERS)
            learn(reader, NUMBERS)
        eventually(lambda: a.store_stats()["sessions"] == 0)
        with client_of(a, 2):
            eventually(lambda: found(reader, NUMBERS) == 0)


def test_what_a_node_knows_of_its_cluster_is_shown(folder: Path) -> None:
    """By the command, and for Prometheus under the names that are documented."""
    with (
        cluster_node(folder, "a") as a,
        cluster_node(folder, "b", options=["node.cluster.domain=rack"]) as b,
        client_of(a) as writer,
    ):
        met(a, b)
        fill(writer, range(2))
        eventually(lambda: sample(b, "kvist_directory_blocks") == 2)
        shown = _kvist_node("status", b.path).stdout
        assert "node b of a cluster is active; others: a (active); 2 blocks are known" in shown
        text = page(b.status())
        assert "\nkvist_directory_blocks 2" in text
        assert '\nkvist_cluster_nodes{state="active"} 2' in text
        assert text.count("# TYPE kvist_cluster_nodes gauge") == 1
        assert set(cluster_of(b)["samples"]) <= {*BY_NAME, "kvist_cluster_nodes.active"}
        own = cluster_of(b)
        assert (own["node"], own["state"]) == ("b", "active")
        assert own["blocks"] == b.status()["peers"]["listen"]


def test_node_without_a_cluster_says_so_when_it_is_to_be_drained(folder: Path, node) -> None:  # type: ignore[no-untyped-def]
    done = _kvist_node("drain", node.path)
    assert done.returncode == 2
    assert "is in no cluster" in done.stderr
    assert node.process.poll() is None


def _kvist_node(action: str, socket: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvist.cli.main", "node", action, "--socket", str(socket)],
        capture_output=True,
        text=True,
        timeout=120,
        env=clean_env(),
        check=False,
    )
