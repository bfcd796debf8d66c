"""Processes die and stop, for real: SIGKILL and SIGSTOP to engines, their workers and the node."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_process import SLOTS, NodeProcess, eventually
from slow_node import BELOW

from kvist.core.errors import LeaseError, NoSpaceError
from kvist.core.outcome import Outcome
from kvist.node.client import BASE_SHIFT
from kvist.testing.store_suite import WAIT_S, content, key, put, ref

DEADLINE_S = 5.0


@pytest.fixture
def slow_node(folder: Path) -> Iterator[NodeProcess]:
    """A node whose tier below never answers."""
    script = str(Path(__file__).with_name("slow_node.py"))
    with NodeProcess(folder / "n.sock", command=(sys.executable, script)) as process:
        yield process


def test_killed_engine_gives_back_what_it_read(node: NodeProcess) -> None:
    engine = node.engine("put:0:3", "read:0:3")
    assert node.store_stats()["leased_blocks"] == 3
    engine.kill()
    eventually(lambda: node.store_stats()["leases"] == 0)
    with node.client() as store:
        assert len(store.match([key(n) for n in range(3)])) == 3  # committed, so it stays
        assert store.room_blocks() == SLOTS


def test_killed_engine_frees_the_slots_that_it_was_writing(node: NodeProcess) -> None:
    engine = node.engine("put:0:2", "write:2:6")
    assert node.store_stats()["writing_blocks"] == 6
    engine.kill()
    eventually(lambda: node.store_stats()["leases"] == 0)
    with node.client() as store:
        assert len(store.match([key(n) for n in range(SLOTS)])) == 2
        assert put(store, range(2, SLOTS)) == [True] * 6
        with store.read([key(n) for n in range(SLOTS)], deadline_s=WAIT_S) as lease:
            assert [bytes(lease.buffer(i)) for i in range(SLOTS)] == [
                content(key(n)) for n in range(SLOTS)
            ]


def test_slots_wait_for_the_last_process_that_could_write_them(node: NodeProcess) -> None:
    """The engine is killed; a worker that maps the arena lives on and may be in mid-copy. Were the
    slots given to another engine now, the late copy would spoil what that one commits."""
    engine = node.engine("write:0:8", "worker")
    engine.kill()
    eventually(lambda: node.status()["lingering"] == 1)
    assert node.store_stats()["writing_blocks"] == SLOTS
    with node.client() as store:
        with pytest.raises(NoSpaceError):
            store.write([ref(20)])
        os.kill(engine.worker, signal.SIGKILL)
        eventually(lambda: node.status()["lingering"] == 0)
        assert put(store, [20]) == [True]


def test_killed_node_decides_every_wait_and_is_found_again(node: NodeProcess) -> None:
    with node.client(answer_s=DEADLINE_S) as store:
        assert all(put(store, range(3)))
        read = store.read([key(0)], deadline_s=WAIT_S)
        kept = read.buffer(0)
        write = store.write([ref(5), ref(6)])
        node.kill()
        eventually(lambda: not store.attached)
        assert (read.outcome(0), read.hits(), read.ready()) == (Outcome.MISS, 0, True)
        assert not write.commit(0)
        for use in (read.slot, read.buffer, write.slot, write.buffer):
            with pytest.raises(LeaseError):
                use(0)
        assert bytes(kept) == content(key(0))  # who copies just then copies the right bytes
        assert len(store.match([key(0)])) == 0
        assert store.read([key(0)], deadline_s=WAIT_S).wait(0) is Outcome.MISS
        with pytest.raises(NoSpaceError):
            store.write([ref(7)])
        assert (store.room_blocks(), store.stats(), store.locator()) == (0, None, None)
        node.start_again()
        eventually(lambda: store.attached)
        assert len(store.match([key(0)])) == 0  # the arena is new
        assert put(store, range(3)) == [True] * 3
        with store.read([key(0)], deadline_s=WAIT_S) as again:
            assert again.slot(0) >> BASE_SHIFT == 1
        read.release()
        write.release()
        assert put(store, [5]) == [True]


def test_killed_node_ends_waits_for_blocks_at_once(slow_node: NodeProcess) -> None:
    with slow_node.client() as store:
        keys = [key(n) for n in BELOW]
        lease = store.read(keys, deadline_s=60.0)
        assert [lease.outcome(i) for i in range(len(keys))] == [Outcome.PENDING] * len(keys)
        found: list[Outcome] = []
        threads = [
            threading.Thread(target=lambda i=i: found.append(lease.wait(i)))
            for i in range(len(keys))
        ]
        for thread in threads:
            thread.start()
        slow_node.kill()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert found == [Outcome.MISS] * len(keys)


def test_blocks_that_do_not_come_are_misses_at_the_deadline(slow_node: NodeProcess) -> None:
    with slow_node.client() as store:
        with store.read([key(n) for n in BELOW], deadline_s=0.2) as lease:
            assert not lease.ready()
            assert lease.wait(0, timeout_s=0.01) is Outcome.PENDING
            assert [lease.wait(i) for i in range(len(lease))] == [Outcome.MISS] * len(lease)
            assert lease.ready()
        slow_node.assert_sound()


def test_engine_killed_while_it_waits_leaves_no_lease(slow_node: NodeProcess) -> None:
    engine = slow_node.engine("read:100:4")
    assert slow_node.store_stats()["loading_blocks"] == 4
    engine.kill()
    eventually(lambda: slow_node.store_stats()["leases"] == 0)
    slow_node.assert_sound()


def test_stopped_node_costs_one_deadline_and_then_nothing(node: NodeProcess) -> None:
    with node.client(answer_s=0.3) as store:
        assert all(put(store, range(3)))
        lease = store.read([key(1)], deadline_s=WAIT_S)
        node.stop()
        began = time.monotonic()
        assert len(store.match([key(0)])) == 0
        assert time.monotonic() - began >= 0.3
        for _ in range(2000):  # at once, or this would take ten minutes
            assert len(store.match([key(0)])) == 0
        with pytest.raises(NoSpaceError):
            store.write([ref(9)])
        assert not store.attached
        assert lease.outcome(0) is Outcome.HIT  # a stopped node gives its slot to nobody
        node.go_on()
        eventually(lambda: store.attached)
        assert len(store.match([key(0)])) == 1
        lease.release()
        assert store.room_blocks() == SLOTS
        assert store.attachments == 1


def test_lease_that_is_granted_too_late_is_given_back(node: NodeProcess) -> None:
    with node.client(answer_s=0.2) as store:
        assert all(put(store, range(2)))
        node.stop()
        assert store.read([key(0), key(1)], deadline_s=WAIT_S).outcome(0) is Outcome.MISS
        node.go_on()
        eventually(lambda: store.attached)
        eventually(lambda: node.store_stats()["leases"] == 0)


def test_node_that_takes_nothing_any_more_is_given_up(node: NodeProcess) -> None:
    """Its socket is full: no message can be sent whole, so the connection cannot go on."""
    with node.client(answer_s=0.2) as store:
        assert all(put(store, range(2)))
        read = store.read([key(0)], deadline_s=WAIT_S)
        node.stop()
        keys = [key(n) for n in range(60_000)]
        assert len(store.match(keys)) == 0
        eventually(lambda: store.locator() is None)
        assert read.outcome(0) is Outcome.MISS
        node.go_on()
        eventually(lambda: store.attachments == 2)
        assert len(store.match([key(0)])) == 1
        # the lease of the first attachment is out until its holder lets go
        eventually(lambda: node.store_stats()["leases"] == 1)
        read.release()
        eventually(lambda: node.store_stats()["leases"] == 0)
