"""Engines on one node: what one writes, the others read, whatever comes between."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
from node_process import SLOTS, NodeProcess, attach, eventually
from node_thread import Raw, dram_store, serving

from kvist.core.errors import LeaseError, NoSpaceError
from kvist.core.events import Cleared, KvEvent, Removed, Stored
from kvist.core.hints import Finish, Hints
from kvist.core.lease import commit_each
from kvist.core.outcome import BlockRef, Outcome, Tier
from kvist.node import keyspaces as keyspaces_module
from kvist.node import messages as m
from kvist.node.client import NodeStore
from kvist.node.protocol import join_keys
from kvist.testing.store_suite import RAW_BYTES, WAIT_S, content, key, put, ref

RUN_S = 3.0


def test_what_one_engine_writes_another_reads(node: NodeProcess) -> None:
    with node.client(name="a") as a, node.client(name="b") as b:
        assert all(put(a, range(4)))
        assert len(b.match([key(n) for n in range(5)])) == 4
        with b.read([key(n) for n in range(4)], deadline_s=WAIT_S) as lease:
            assert lease.hits() == 4
            assert all(bytes(lease.buffer(i)) == content(key(i)) for i in range(4))
        assert put(b, range(4)) == [False] * 4


def test_block_that_another_engine_writes_is_not_written_twice(node: NodeProcess) -> None:
    with node.client() as a, node.client() as b:
        with a.write([ref(0)]) as first, b.write([ref(0)]) as second:
            assert second.present(0)
            assert b.read([key(0)], deadline_s=WAIT_S).outcome(0) is Outcome.MISS
            first.buffer(0)[:] = content(key(0))
            assert first.commit(0)
        assert len(b.match([key(0)])) == 1


def test_many_commits_are_one_question(node: NodeProcess) -> None:
    with node.client() as store:
        with store.write([ref(n) for n in range(4)]) as lease:
            for i in range(4):
                lease.buffer(i)[:] = content(key(i))
            assert commit_each(lease, [0, 1, 3], [None, 5, None]) == [True] * 3
            with pytest.raises(LeaseError):
                lease.commit_many([2, 3], [None, None])
            with pytest.raises(TypeError):
                lease.buffer(0)[0] = 1
        assert len(store.match([key(n) for n in range(4)])) == 2


def test_engines_hear_of_what_others_store_and_what_goes(folder: Path) -> None:
    heard: list[KvEvent] = []
    path = folder / "n.sock"
    with (
        serving(path),
        NodeStore(path, attach(1)) as a,
        NodeStore(path, attach(1), on_event=heard.append),
    ):
        assert all(put(a, range(3)))
        assert a.evict([key(1), key(2)]) == 2
        a.clear()
        eventually(lambda: Cleared() in heard)
    stored = [e for e in heard if isinstance(e, Stored)]
    assert [k for e in stored for k in e.keys] == [key(n) for n in range(3)]
    assert [e.parent for e in stored] == [None, *(e.keys[-1] for e in stored[:-1])]
    removed = [k for e in heard if isinstance(e, Removed) for k in e.keys]
    assert removed[:2] == [key(1), key(2)]
    assert {e.tier for e in heard if not isinstance(e, Cleared)} == {Tier.DRAM}


def test_engines_hear_that_a_node_is_gone_with_all_it_held(folder: Path) -> None:
    heard: list[KvEvent] = []
    with serving(folder / "n.sock") as server:
        store = NodeStore(folder / "n.sock", attach(1), on_event=heard.append)
        assert all(put(store, range(2)))
        eventually(lambda: heard)
        server.stop("the node ends")
        eventually(lambda: Cleared() in heard)
        store.close()
        heard.clear()


def test_events_that_pile_up_end_as_one_that_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who keeps an index must not believe blocks that it heard nothing more of."""
    monkeypatch.setattr(keyspaces_module, "_MOST_EVENTS", 3)
    heard: list[KvEvent] = []
    path = folder / "n.sock"
    with (
        serving(path) as server,
        NodeStore(path, attach(1)) as a,
        NodeStore(path, attach(1), on_event=heard.append),
    ):
        (keyspace,) = server.keyspaces
        with a.write([ref(n) for n in range(SLOTS)]) as lease:
            assert commit_each(lease, range(SLOTS), [None] * SLOTS) == [True] * SLOTS
        eventually(lambda: Cleared() in heard)
        assert len(keyspace.events) <= 3


def test_numbers_of_a_node_are_those_of_its_store(node: NodeProcess) -> None:
    with node.client() as store:
        assert all(put(store, range(3)))
        stats = store.stats()
        assert stats is not None
        assert (stats.capacity_blocks, stats.dram_blocks, stats.committed) == (SLOTS, 3, 3)
        assert store.flush(WAIT_S)
        assert store.read_totals() == {}
        assert store.prefetch([key(0)], deadline_s=1.0) == 0
        store.ended([key(0)], Hints(Finish.TOOL_USE, -5, key(9)))
        assert store.room_blocks() == SLOTS


def test_names_of_tenants_may_be_as_long_as_they_like(node: NodeProcess) -> None:
    with node.client() as store:
        with store.write([BlockRef(key(0), None, "x" * 5000)]) as lease:
            assert lease.commit(0)
        assert store.room_blocks("y" * 5000) == SLOTS
        assert store.attachments == 1


def test_more_blocks_than_a_message_holds_are_refused_or_cut(node: NodeProcess) -> None:
    keys = [key(n) for n in range(m.MOST_KEYS + 1)]
    with node.client() as store:
        assert all(put(store, range(2)))
        assert len(store.match(keys)) == 2
        assert store.prefetch(keys, deadline_s=1.0) == 0
        with pytest.raises(NoSpaceError, match="in one lease"):
            store.read(keys, deadline_s=1.0)
        with pytest.raises(NoSpaceError, match="in one lease"):
            store.write([BlockRef(k, None) for k in keys])
        assert store.attachments == 1


def test_engine_that_is_cut_off_keeps_its_slots_until_it_lets_go(folder: Path) -> None:
    """Its connection is over, but it may be in the middle of a copy."""
    with serving(folder / "n.sock") as server, Raw(folder / "n.sock") as raw:
        assert isinstance(raw.hello(), m.Welcome)
        refs = join_keys([key(n) for n in range(SLOTS)])
        raw.send(m.Write(1, refs, refs, (), ("",)))
        assert isinstance(raw.reply(), m.Reserved)
        raw.link.sendall(b"\x01\0\0\0x")
        assert isinstance(raw.reply(), m.Refused)
        (keyspace,) = server.keyspaces
        with NodeStore(folder / "n.sock", attach(1)) as other:
            assert other.room_blocks() == 0
            raw.let_go()
            eventually(lambda: other.room_blocks() == SLOTS)
        eventually(lambda: not keyspace.sessions)


def test_engine_that_reads_no_answers_is_cut_off(folder: Path) -> None:
    with serving(folder / "n.sock") as server, Raw(folder / "n.sock") as raw:
        assert isinstance(raw.hello(wants_events=True), m.Welcome)
        (keyspace,) = server.keyspaces
        with NodeStore(folder / "n.sock", attach(1)) as other:
            for _ in range(20):
                event = Stored(tuple(key(n) for n in range(30_000)), None, Tier.DRAM)
                keyspace.events.append(event)
                server.poke()
                other.match([key(0)])
            raw.close()
            eventually(lambda: len(keyspace.sessions) == 1)
            assert all(put(other, range(2)))


def test_closed_store_refuses_and_a_second_close_does_nothing(node: NodeProcess) -> None:
    store = node.client()
    assert all(put(store, range(1)))
    lease = store.read([key(0)], deadline_s=WAIT_S)
    for _ in range(2):
        store.close()
    assert len(store.match([key(0)])) == 0
    assert lease.outcome(0) is Outcome.MISS
    with pytest.raises(RuntimeError):
        store.read([key(0)], deadline_s=1.0)
    with pytest.raises(RuntimeError):
        store.write([ref(1)])
    lease.release()
    eventually(lambda: node.store_stats()["sessions"] == 0)


class Hammer(threading.Thread):
    """Writes and reads runs of blocks until the end, and compares every byte."""

    def __init__(self, store: NodeStore, seed: int, until: float) -> None:
        super().__init__(daemon=True)
        self._store, self._chance, self._until = store, random.Random(seed), until
        self.failure: BaseException | None = None
        self.checked = self.written = 0

    def run(self) -> None:
        try:
            while time.monotonic() < self._until:
                first = self._chance.randrange(40)
                numbers = range(first, first + self._chance.randrange(1, 5))
                try:
                    self.written += sum(put(self._store, numbers))
                    self._check(numbers)
                except NoSpaceError:
                    continue
        except BaseException as error:
            self.failure = error
            raise

    def _check(self, numbers: range) -> None:
        with self._store.read([key(n) for n in numbers], deadline_s=WAIT_S) as lease:
            for i, n in enumerate(numbers):
                if lease.wait(i) is Outcome.HIT:
                    view = lease.buffer(i)
                    assert bytes(view) == content(key(n))
                    self.checked += 1


def test_engines_and_threads_that_share_few_slots_never_see_a_torn_block(folder: Path) -> None:
    """Two clients with two threads each, sixteen slots and an SSD below, for some seconds."""
    with (
        NodeProcess(folder / "n.sock", slots=16, ssd=folder / "ssd") as node,
        node.client() as a,
        node.client() as b,
    ):
        until = time.monotonic() + RUN_S
        threads = [Hammer(store, seed, until) for seed, store in enumerate((a, a, b, b))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(RUN_S + 30.0)
            assert not thread.is_alive()
        assert [t.failure for t in threads if t.failure is not None] == []
        assert min(sum(t.checked for t in threads), sum(t.written for t in threads)) > 0
        eventually(lambda: node.store_stats()["leases"] == 0)
        node.assert_sound()


def test_raw_size_is_not_the_slots(folder: Path) -> None:
    with (
        serving(folder / "n.sock", dram_store),
        NodeStore(folder / "n.sock", attach(1)) as store,
        store.write([ref(0)]) as lease,
    ):
        assert len(lease.buffer(0)) == RAW_BYTES
