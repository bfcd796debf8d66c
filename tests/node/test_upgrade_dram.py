"""The next node takes over what is in DRAM, whatever dies meanwhile, and never a wrong block."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import random
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from node_process import START_S, NodeProcess, attach, clean_env, eventually

from kvist.core.errors import NodeAwayError, NodeRefusedError, NoSpaceError
from kvist.core.outcome import Outcome, Tier
from kvist.node import control, handover
from kvist.node import messages as m
from kvist.node.attachment import connect
from kvist.node.client import NodeStore
from kvist.node.place import NodeLock, Place
from kvist.node.protocol import Frames, encode
from kvist.testing.store_suite import WAIT_S, content, key, put, ref
from kvist.tiers.ssd import SsdTier

BLOCKS = 4
MANY = 8000  # their names do not fit into the buffers of a socket
_PART = 500


def successor(folder: Path, *options: str, slots: int = 8, ssd: bool = False) -> NodeProcess:
    return NodeProcess(
        folder / "n.sock",
        slots=slots,
        ssd=folder / "ssd" if ssd else None,
        options=("--replace", *options),
    )


def tiers(store: NodeStore, count: int = BLOCKS) -> tuple[Tier, ...]:
    return store.match([key(n) for n in range(count)]).tiers


def holds(store: NodeStore, numbers: Iterable[int]) -> list[bool]:
    """Which blocks can be read, of which each must have its own bytes."""
    found = []
    for n in numbers:
        with store.read([key(n)], deadline_s=WAIT_S) as lease:
            hit = lease.wait(0) is Outcome.HIT
            assert not hit or bytes(lease.buffer(0)) == content(key(n))
            found.append(hit)
    return found


@pytest.mark.parametrize("ssd", [False, True])
def test_engine_finds_in_dram_what_it_had_there(folder: Path, ssd: bool) -> None:
    below = folder / "ssd" if ssd else None
    with NodeProcess(folder / "n.sock", ssd=below) as old, old.client() as store:
        assert all(put(store, range(BLOCKS)))
        with successor(folder, ssd=ssd) as new:
            assert old.process.wait(START_S) == 0
            eventually(lambda: store.attachments == 2 and store.attached)
            eventually(lambda: tiers(store) == (Tier.DRAM,) * BLOCKS)
            assert holds(store, range(BLOCKS)) == [True] * BLOCKS
            assert new.store_stats()["adopted"] == BLOCKS
            eventually(lambda: new.store_stats()["leases"] == 0)
            assert put(store, [BLOCKS]) == [True]
            new.assert_sound()


def test_slots_that_a_process_of_the_old_node_could_write_wait_for_its_end(folder: Path) -> None:
    """An engine and its worker outlive the node, and the one after it: only when nobody is left who
    had mapped the arena for that engine, its slots are used again."""
    with NodeProcess(folder / "n.sock") as old, old.client() as store:
        assert all(put(store, range(2)))
        engine = old.engine("write:10:3", "worker")
        with successor(folder) as second:
            eventually(lambda: store.attachments == 2 and len(tiers(store, 2)) == 2)
            assert store.room_blocks() == 8 - 3
            engine.kill()
            with successor(folder) as third:
                assert second.process.wait(START_S) == 0
                eventually(lambda: store.attachments == 3 and len(tiers(store, 2)) == 2)
                assert store.room_blocks() == 8 - 3  # the worker lives
                assert all(put(store, range(20, 23)))
                with pytest.raises(NoSpaceError):
                    store.write([ref(n) for n in range(30, 36)])
                os.kill(engine.worker, signal.SIGKILL)
                eventually(lambda: store.room_blocks() == 8)
                assert all(put(store, range(30, 38)))
                assert holds(store, range(30, 38)) == [True] * 8
                third.assert_sound()


def test_engine_that_reads_goes_on_reading_right_bytes(folder: Path) -> None:
    with NodeProcess(folder / "n.sock") as old, old.client() as store:
        assert all(put(store, range(BLOCKS)))
        lease = store.read([key(0)], deadline_s=WAIT_S)
        kept = lease.buffer(0)
        with successor(folder) as new:
            eventually(lambda: store.attachments == 2 and store.attached)
            assert lease.outcome(0) is Outcome.MISS
            assert put(store, range(20, 27)) == [True] * 7  # all slots but that one
            assert bytes(kept) == content(key(0))
            assert holds(store, [0]) == [False]
            lease.release()
            eventually(lambda: holds(store, [0]) == [True])
            new.assert_sound()


@pytest.mark.parametrize(
    ("slots", "options"),
    [(4, ()), (8, ("--set=node.keyspaces=2",))],
    ids=["less memory", "parts of it"],
)
def test_arena_that_is_larger_than_the_new_one_may_be_is_let_go(
    folder: Path, slots: int, options: tuple[str, ...]
) -> None:
    with NodeProcess(folder / "n.sock") as old, old.client() as store:
        assert all(put(store, range(BLOCKS)))
        with successor(folder, *options, slots=slots) as new:
            eventually(lambda: store.attachments == 2 and store.attached)
            assert "DRAM starts empty" in new.log_text()
            assert tiers(store) == ()
            assert put(store, range(2)) == [True] * 2
            assert store.room_blocks() == 4


def test_dram_waits_while_the_store_cannot_be_opened(folder: Path) -> None:
    """Another process has the folder of the SSD tier; the engine is refused until it lets go."""
    with NodeProcess(folder / "n.sock") as old, old.client() as store:
        assert all(put(store, range(BLOCKS)))
        tier = SsdTier.open(folder / "ssd", keyspace=bytes(32), capacity_bytes=64 << 20)
        with contextlib.closing(tier), successor(folder, ssd=True) as new:
            eventually(lambda: "cannot open a store" in new.log_text())
            tier.close()
            eventually(lambda: store.attachments == 2 and store.attached)
            eventually(lambda: tiers(store) == (Tier.DRAM,) * BLOCKS)
            new.assert_sound()


def test_keyspace_that_nobody_asks_for_gives_way_to_one_that_is_used(folder: Path) -> None:
    with NodeProcess(folder / "n.sock") as old:
        with old.client() as store:
            assert all(put(store, range(BLOCKS)))
        with successor(folder) as new, new.client(2) as other:
            assert tiers(other) == ()
            other.close()
            with new.client(1) as store:
                assert tiers(store) == ()


def test_keyspace_that_nobody_asked_for_goes_on_to_the_node_after_the_next(folder: Path) -> None:
    with NodeProcess(folder / "n.sock") as old:
        with old.client() as store:
            assert all(put(store, range(BLOCKS)))
        with successor(folder), successor(folder) as third, third.client() as store:
            eventually(lambda: tiers(store) == (Tier.DRAM,) * BLOCKS)
            assert holds(store, range(BLOCKS)) == [True] * BLOCKS


# -- deaths ------------------------------------------------------------------------------------


def full_node(folder: Path) -> NodeProcess:
    """A node with more blocks than it can name without being listened to."""
    node = NodeProcess(folder / "n.sock", slots=MANY)
    with node.client() as store:
        for start in range(0, MANY, _PART):
            assert all(put(store, range(start, start + _PART)))
    return node


def half_heard(path: Path) -> socket.socket:
    """A connection on which the node has begun to say what it leaves, and waits to go on."""
    link = connect(os.fspath(path), WAIT_S)
    link.sendall(encode(m.Control(m.MAGIC, 1, m.NEWEST_PROTOCOL, handover.BEQUEATH)))
    waiting = array.array("i", [0])

    def much_waits() -> bool:
        fcntl.ioctl(link, termios.FIONREAD, waiting)
        return waiting[0] > 64 << 10

    eventually(much_waits, START_S)
    return link


def test_node_that_is_killed_while_it_hands_over_leaves_nothing(folder: Path) -> None:
    with full_node(folder) as old:
        with half_heard(old.path) as link:
            old.kill()
            assert handover.receive(link, deadline_s=WAIT_S) == []
        old.start_again()
        with old.client() as store:
            assert tiers(store) == ()


def test_node_ends_in_order_when_the_next_one_dies(folder: Path) -> None:
    with full_node(folder) as old:
        half_heard(old.path).close()
        assert old.process.wait(START_S) == 0
        assert "does not take over" in old.log_text()
        NodeLock(Place(old.path), wait_s=START_S).release()


class Line:
    """Nodes that follow each other on one socket."""

    def __init__(self, path: Path) -> None:
        self.path, self.runs = path, list[subprocess.Popen[bytes]]()

    def begin(self) -> subprocess.Popen[bytes]:
        """Starts the next one, which replaces the one before it, if that runs."""
        options = ["store.dram.capacity=256KiB", "store.ssd.enabled=false"]
        with self.path.with_suffix(".log").open("ab") as log:
            command = [sys.executable, "-m", "kvist.cli.main", "node", "--replace"]
            command += ["--socket", str(self.path), *(f"--set={text}" for text in options)]
            self.runs.append(subprocess.Popen(command, stdout=log, stderr=log, env=clean_env()))
        return self.runs[-1]

    def serves(self, run: subprocess.Popen[bytes]) -> bool:
        """Whether this one answers."""
        assert run.poll() is None, self.log_text()
        try:
            return bool(control.ask(self.path, "status")["pid"] == run.pid)
        except (NodeAwayError, NodeRefusedError):
            return False

    def log_text(self) -> str:
        """What all of them printed."""
        return self.path.with_suffix(".log").read_text()

    def close(self) -> None:
        """Kills whoever lives."""
        for run in self.runs:
            run.kill()
            run.wait(START_S)


def test_node_that_was_told_half_starts_with_nothing(folder: Path) -> None:
    """In place of the old node a socket that says half of what it should, and goes."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(os.fspath(folder / "n.sock"))
    listener.listen(1)
    heard: list[bytes] = []

    def old() -> None:
        link, _ = listener.accept()
        with link, listener:
            link.settimeout(START_S)
            frames = Frames()
            heard.extend(frames.feed(link.recv(1 << 16)))
            link.sendall(encode(m.Report('{"draining": true}')))
            link.sendall(encode(handover.Will(handover.WILL_VERSION, 1)))

    thread = threading.Thread(target=old)
    thread.start()
    line = Line(folder / "n.sock")
    with contextlib.closing(line):
        new = line.begin()
        thread.join(START_S)
        assert len(heard) == 1
        eventually(lambda: line.serves(new), START_S)
        assert "what the former node left is not whole" in line.log_text()
        with NodeStore(line.path, attach(1)) as store:
            assert put(store, range(BLOCKS)) == [True] * BLOCKS
            assert holds(store, range(BLOCKS)) == [True] * BLOCKS


@pytest.mark.parametrize("seed", range(2))
def test_whoever_is_killed_and_whenever_no_block_is_wrong(folder: Path, seed: int) -> None:
    """A node is replaced again and again; at a random moment one side is killed, or none."""
    rng = random.Random(seed)
    line = Line(folder / "n.sock")
    with contextlib.closing(line):
        first = line.begin()
        eventually(lambda: line.serves(first), START_S)
        with NodeStore(line.path, attach(1), answer_s=START_S) as store:
            took_s = 2.0
            for turn, victim in enumerate(rng.choices(("nobody", "old", "new"), k=4)):
                written = range(turn * 10, turn * 10 + 10)
                assert all(put(store, written))
                before, began, old = store.attachments, time.monotonic(), line.runs[-1]
                new = line.begin()
                if victim != "nobody":
                    hit = old if victim == "old" else new
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        hit.wait(rng.uniform(0, took_s))
                    hit.kill()
                if victim == "new":
                    new.wait(START_S)
                    if old.poll() is None and not told_to_end(line.path):
                        line.runs.append(line.runs.pop(-2))  # the old one goes on
                        assert holds(store, written) == [True] * len(written)
                        continue
                    new = line.begin()
                eventually(lambda new=new: line.serves(new), START_S)
                if victim == "nobody":
                    took_s = time.monotonic() - began
                eventually(lambda n=before: store.attachments > n and store.attached, START_S)
                if victim == "nobody":
                    eventually(lambda b=written: all(holds(store, b)), START_S)
                holds(store, range(written.stop))
                assert control.ask(line.path, "check")["broken"] == {}


def told_to_end(path: Path) -> bool:
    """Whether the node has let go of its socket, or is about to."""
    try:
        return not control.ask(path, "status")
    except (NodeAwayError, NodeRefusedError):
        return True
