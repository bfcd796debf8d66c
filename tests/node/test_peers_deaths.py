"""The owner or the link fails while blocks are on their way: a miss in time, and no lease stays."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from node_process import eventually
from peer_nodes import (
    BLOCK_BYTES,
    BLOCKS,
    TIMEOUT_S,
    client_of,
    fill,
    found,
    free_port,
    key,
    learn,
    no_lease_left,
    peer_node,
    proxied_pair,
    read,
)

NUMBERS = range(BLOCKS)
MIDWAY_BYTES = BLOCKS * BLOCK_BYTES // 2
LATE_S = 4 * TIMEOUT_S  # far below the deadline of a read, far above what a miss may take


def test_owner_killed_while_it_sends_is_a_miss_and_is_read_again_when_back(folder: Path) -> None:
    with proxied_pair(folder) as (owner, proxy, reader), client_of(reader) as engine:
        with client_of(owner) as writer:
            fill(writer, NUMBERS)
            learn(engine, NUMBERS)
            proxy.spoil_after(MIDWAY_BYTES, "stall")
            lease = engine.read(_keys(), deadline_s=LATE_S)
            assert proxy.spoiled.wait(LATE_S)
            owner.kill()
            proxy.heal()
            outcomes = [lease.wait(i).value for i in range(BLOCKS)]
            assert "miss" in outcomes
            lease.release()
        no_lease_left(reader)
        owner.start_again()
        with client_of(owner) as writer:
            fill(writer, NUMBERS)
            learn(engine, NUMBERS)
            assert read(engine, NUMBERS) == [True] * BLOCKS
            no_lease_left(owner, reader)


def test_owner_that_is_stopped_costs_one_timeout_and_no_more(folder: Path) -> None:
    """Its kernel still takes connections and requests; nobody ever answers."""
    port = free_port()
    with (
        peer_node(folder / "a.sock", listen=port) as owner,
        peer_node(folder / "b.sock", members=[port]) as reader,
        client_of(reader) as engine,
        client_of(owner) as writer,
    ):
        fill(writer, NUMBERS)
        learn(engine, NUMBERS)
        assert read(engine, NUMBERS[:4]) == [True] * 4
        owner.stop()
        began = time.monotonic()
        assert read(engine, NUMBERS, 3 * LATE_S) == [True] * 4 + [False] * (BLOCKS - 4)
        assert time.monotonic() - began < LATE_S
        # known to be away: nothing is believed to be there
        assert found(engine, range(100, 100 + BLOCKS)) == 0
        assert found(engine, NUMBERS) == 4
        no_lease_left(reader)
        owner.go_on()
        learn(engine, NUMBERS)
        assert read(engine, NUMBERS) == [True] * BLOCKS
        no_lease_left(owner, reader)


@pytest.mark.parametrize("how", ["stall", "cut", "flip"])
def test_link_that_spoils_blocks_gives_misses_and_no_wrong_byte(folder: Path, how: str) -> None:
    with (
        proxied_pair(folder) as (owner, proxy, reader),
        client_of(reader) as engine,
        client_of(owner) as writer,
    ):
        fill(writer, NUMBERS)
        learn(engine, NUMBERS)
        proxy.spoil_after(MIDWAY_BYTES + BLOCK_BYTES // 3, how)
        began = time.monotonic()
        hits = read(engine, NUMBERS, 3 * LATE_S)  # compares what came
        assert time.monotonic() - began < LATE_S
        assert proxy.spoiled.is_set()
        assert False in hits
        if how == "flip":
            assert hits.count(False) == 1
        proxy.heal()
        no_lease_left(owner, reader)
        engine.clear()
        learn(engine, NUMBERS)
        assert read(engine, NUMBERS) == [True] * BLOCKS
        no_lease_left(owner, reader)


def test_reader_killed_while_it_receives_leaves_the_owner_no_lease(folder: Path) -> None:
    with proxied_pair(folder) as (owner, proxy, reader), client_of(owner) as writer:
        fill(writer, NUMBERS)
        engine = client_of(reader)
        learn(engine, NUMBERS)
        proxy.spoil_after(MIDWAY_BYTES, "stall")
        engine.read(_keys(), deadline_s=LATE_S)
        assert proxy.spoiled.wait(LATE_S)
        reader.kill()
        engine.close()
        proxy.heal()
        no_lease_left(owner)
        assert read(writer, NUMBERS) == [True] * BLOCKS


def test_peer_that_nobody_hears_of_is_left_alone_until_it_is_there(folder: Path) -> None:
    port = free_port()
    with peer_node(folder / "b.sock", members=[port]) as reader, client_of(reader) as engine:
        for _ in range(3):
            assert found(engine, NUMBERS) == 0
        eventually(lambda: reader.store_stats()["samples"][_resting(port)] == 1)
        with peer_node(folder / "a.sock", listen=port) as owner, client_of(owner) as writer:
            fill(writer, NUMBERS)
            learn(engine, NUMBERS)
            assert reader.store_stats()["samples"][_resting(port)] == 0
            assert read(engine, NUMBERS) == [True] * BLOCKS


def test_owner_that_ends_in_order_gives_back_what_readers_hold(folder: Path) -> None:
    with proxied_pair(folder) as (owner, proxy, reader), client_of(reader) as engine:
        writer = client_of(owner)
        fill(writer, NUMBERS)
        learn(engine, NUMBERS)
        proxy.spoil_after(MIDWAY_BYTES, "stall")
        lease = engine.read(_keys(), deadline_s=LATE_S)
        assert proxy.spoiled.wait(LATE_S)
        writer.close()
        owner.terminate()
        proxy.heal()
        assert "miss" in [lease.wait(i).value for i in range(BLOCKS)]
        lease.release()
        no_lease_left(reader)


def _keys() -> list[bytes]:
    return [key(n) for n in NUMBERS]


def _resting(port: int) -> str:
    return f"kvist_peer_resting.127.0.0.1:{port}"
