"""Copies in a cluster: what only one node holds is offered, fetched and kept, and moves away."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from cluster_nodes import cluster_node, cluster_of, met, sample
from node_process import NodeProcess, attach, clean_env, eventually
from peer_nodes import (
    BLOCK_BYTES,
    BLOCKS,
    LONG_S,
    client_of,
    fill,
    found,
    key,
    no_lease_left,
    read,
    ref,
)
from test_tenants import names

from kvist.core.outcome import BlockRef, Outcome, Tier
from kvist.node.cache import messages as cache
from kvist.node.cache.client import CacheClient
from kvist.node.client import NodeStore
from kvist.testing.store_suite import content

pytest.importorskip("zmq")
NUMBERS = range(BLOCKS // 2)


def _held_here(store, numbers: Sequence[int]) -> bool:  # type: ignore[no-untyped-def]
    tiers = store.match([key(n) for n in numbers]).tiers
    return len(tiers) == len(numbers) and Tier.PEER not in tiers


def test_blocks_get_a_second_copy_where_others_have_room(folder: Path) -> None:
    with (
        cluster_node(folder, "a", replicas=2) as a,
        cluster_node(folder, "b", replicas=2, ssd=True) as b,
        client_of(a) as writer,
        client_of(b) as other,
    ):
        met(a, b)
        fill(writer, NUMBERS)
        eventually(lambda: _held_here(other, NUMBERS), LONG_S)
        eventually(lambda: sample(b, "kvist_replica_fetched_total") == len(NUMBERS), LONG_S)
        assert sample(a, "kvist_replica_offers_total") >= len(NUMBERS)
        assert other.flush(LONG_S)  # a copy is kept like what was written here
        a.kill()
        assert read(other, NUMBERS) == [True] * len(NUMBERS)
        no_lease_left(b)


def test_with_one_copy_wanted_nothing_is_offered(folder: Path) -> None:
    with (
        cluster_node(folder, "a") as a,
        cluster_node(folder, "b") as b,
        client_of(a) as writer,
        client_of(b) as other,
    ):
        met(a, b)
        fill(writer, NUMBERS)
        eventually(lambda: found(other, NUMBERS) == len(NUMBERS))
        eventually(lambda: "kvist_replica_short_blocks" in cluster_of(a)["samples"])
        assert sample(a, "kvist_replica_offers_total") == 0
        assert sample(a, "kvist_replica_short_blocks") == 0


def test_copies_are_their_tenants_and_another_salt_reaches_none(folder: Path) -> None:
    theirs, others = names("alice"), names("bob")
    assert not set(theirs) & set(others)
    with (
        cluster_node(folder, "a", replicas=2) as a,
        cluster_node(folder, "b", replicas=2) as b,
        client_of(a) as writer,
        client_of(b) as reader,
        CacheClient(b.path) as desk,
    ):
        met(a, b)
        with writer.write([BlockRef(name, None, "alice") for name in theirs]) as lease:
            for i, name in enumerate(theirs):
                lease.buffer(i)[:] = content(name, BLOCK_BYTES)
                assert lease.commit(i)
        eventually(lambda: _usage(desk) == {("alice", len(theirs))}, LONG_S)
        assert len(reader.match(others)) == 0
        with reader.read(others, deadline_s=LONG_S, tenant="bob") as lease:
            assert {lease.wait(i) for i in range(len(others))} == {Outcome.MISS}
        assert desk.ask(cache.ClearBlocks(tenant="bob"), cache.Cleared).blocks == 0
        assert desk.ask(cache.ClearBlocks(tenant="alice"), cache.Cleared).blocks == len(theirs)


def _usage(desk: CacheClient) -> set[tuple[str, int]]:
    return {(u.tenant, u.blocks) for u in desk.ask(cache.ShowUsage(), cache.Usage).usage}


def test_node_that_drains_gives_away_what_only_it_holds_and_ends(folder: Path) -> None:
    with (
        cluster_node(folder, "a", options=["node.cluster.drain_s=50"]) as a,
        cluster_node(folder, "b") as b,
        cluster_node(folder, "c") as c,
        client_of(b) as other,
        client_of(c) as third,
    ):
        writer = client_of(a)
        met(a, b, c)
        fill(writer, NUMBERS)
        assert read(writer, NUMBERS) == [True] * len(NUMBERS)  # it serves until it ends
        _drain(a)
        writer.close()
        held = [_held_here(other, [n]) or _held_here(third, [n]) for n in NUMBERS]
        assert held == [True] * len(NUMBERS)
        assert "not all that only this node holds" not in a.log_text()
        assert a.process.wait(LONG_S) == 0


def test_drain_with_nobody_to_take_over_ends_in_time_and_says_so(folder: Path) -> None:
    with cluster_node(folder, "a", options=["node.cluster.drain_s=1"]) as a:
        with client_of(a) as writer:
            fill(writer, NUMBERS)
        _drain(a)
        assert a.process.wait(LONG_S) == 0
        assert "not all that only this node holds was taken in time" in a.log_text()


def test_node_that_is_told_to_end_gives_away_what_only_it_holds(folder: Path) -> None:
    """SIGTERM, as systemd, Kubernetes and `kvist down` send it."""
    with (
        cluster_node(folder, "a", options=["node.cluster.drain_on_stop_s=50"]) as a,
        cluster_node(folder, "b") as b,
        client_of(b) as other,
    ):
        writer = client_of(a)
        met(a, b)
        fill(writer, NUMBERS)
        a.process.terminate()
        assert a.process.wait(2 * LONG_S) == 0
        writer.close()
        assert _held_here(other, NUMBERS)
        assert "not all that only this node holds" not in a.log_text()


def test_second_signal_ends_a_node_that_gives_away_at_once(folder: Path) -> None:
    """Nobody can take anything: the other node is stopped, and not yet known to be silent."""
    with (
        cluster_node(folder, "a", options=["node.cluster.drain_on_stop_s=600"]) as a,
        cluster_node(folder, "b") as b,
        client_of(a) as writer,
    ):
        met(a, b)
        fill(writer, NUMBERS)
        b.stop()
        a.process.terminate()
        eventually(lambda: cluster_of(a)["state"] == "draining", LONG_S)
        a.process.terminate()
        assert a.process.wait(LONG_S) == 0
        b.go_on()


def test_node_that_is_told_to_end_does_not_wait_where_nobody_takes_anything(folder: Path) -> None:
    with cluster_node(folder, "a", options=["node.cluster.drain_on_stop_s=600"]) as a:
        with client_of(a) as writer:
            fill(writer, NUMBERS)
        a.process.terminate()
        assert a.process.wait(LONG_S) == 0
        assert "not all that only this node holds was taken in time" in a.log_text()


def test_hot_blocks_get_copies_on_a_node_that_is_full_of_what_others_have(folder: Path) -> None:
    """Small blocks, of which a full node takes more in a minute: a 64th of its capacity."""
    small = ["store.ssd.capacity=16MiB"]
    with (
        cluster_node(folder, "a", replicas=2, blocks=BLOCKS, ssd=True) as a,
        cluster_node(folder, "b", replicas=2, blocks=BLOCKS, ssd=True, options=small) as b,
        NodeStore(a.path, attach(1, block_bytes=SMALL_BYTES), answer_s=LONG_S) as writer,
        NodeStore(b.path, attach(1, block_bytes=SMALL_BYTES), answer_s=LONG_S) as other,
    ):
        met(a, b)
        for written in (*_ranges(0, 448, 64), *_ranges(448, 560, 8)):
            _fill_small(writer, written)
            assert writer.flush(LONG_S)
            eventually(
                lambda part=written: cluster_of(b)["full"] or _held_here(other, part), LONG_S
            )
            if cluster_of(b)["full"]:
                break
        assert cluster_of(b)["full"]
        hot = range(1000, 1008)
        _fill_small(writer, hot)
        eventually(lambda: any(_held_here(other, [n]) for n in hot), 2 * LONG_S)
        for node in (a, b):
            node.assert_sound()


SMALL_BYTES = 1 << 15


def _ranges(first: int, end: int, size: int) -> list[range]:
    return [range(start, start + size) for start in range(first, end, size)]


def _fill_small(store: NodeStore, numbers: Sequence[int]) -> None:
    with store.write([ref(n) for n in numbers]) as lease:
        for i, n in enumerate(numbers):
            lease.buffer(i)[:] = content(key(n), SMALL_BYTES)
            assert lease.commit(i)


def _drain(node: NodeProcess) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvist.cli.main", "node", "drain", "--socket", str(node.path)],
        capture_output=True,
        text=True,
        timeout=120,
        env=clean_env(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
