"""One engine and one node in processes of their own, beside memcpy on the same blocks.

Every round asks memcpy and the node in turn, in an order drawn anew; a ratio is of two values of
one round. The first round is not kept. Control operations are timed as an engine sees them, one
after the other, and by the processor time that they cost the node.
"""

from __future__ import annotations

import ctypes
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kvist.bench.store.contender import Blocks, ContenderError, in_huge_pages, round_keys, share_out
from kvist.bench.store.memory import Memcpy
from kvist.core.errors import NodeAwayError
from kvist.core.keys import Key
from kvist.core.lease import commit_each
from kvist.core.outcome import BlockRef, Outcome
from kvist.node import control
from kvist.node.client import NodeStore
from kvist.node.keyspaces import Attach

_START_S = 60.0
_LOOK_S = 0.05
_DEADLINE_S = 30.0
_MATCHED = 64  # keys of a match
_LEASED = 8  # blocks of a lease
_SIXTH = 6  # messages of one turn: match, read, release, write, commit, release


class Settings(msgspec.Struct, frozen=True):
    """What is asked of a run. `lease_blocks`: blocks that one lease moves."""

    rounds: int = 7
    blocks: int = 128
    block_bytes: int = 2 << 20
    lease_blocks: int = 32
    threads: int = 2
    turns: int = 2000


class Round(msgspec.Struct, frozen=True):
    """Bytes a second."""

    memcpy_put: float
    memcpy_get: float
    node_put: float
    node_get: float


class Outcomes(msgspec.Struct):
    """What was measured. Operations are messages; `node_cpu_s` is what they cost the node."""

    settings: Settings
    rounds: list[Round] = []
    operations: int = 0
    operations_s: float = 0.0
    node_cpu_s: float = 0.0

    @property
    def put_ratio(self) -> float:
        """Median of the node's put over memcpy's."""
        return statistics.median(r.node_put / r.memcpy_put for r in self.rounds)

    @property
    def get_ratio(self) -> float:
        """Median of the node's get over memcpy's."""
        return statistics.median(r.node_get / r.memcpy_get for r in self.rounds)

    @property
    def operations_rps(self) -> float:
        """Operations a second of one engine that waits for each."""
        return self.operations / self.operations_s

    @property
    def operations_rps_of_core(self) -> float:
        """Operations a second that a core of the node's could serve."""
        return self.operations / self.node_cpu_s


class NodeMemory:
    """Blocks to a node and back, as an engine moves them: its own threads copy, by leases."""

    def __init__(self, store: NodeStore, blocks: Blocks, settings: Settings) -> None:
        self._store, self._blocks, self._settings = store, blocks, settings
        locator = store.locator()
        if locator is None:
            raise ContenderError("the node is gone")
        at = store.arena()
        self._base = at.address - locator.base
        in_huge_pages(at.address, at.size_bytes)  # as `Warmer` does

    def write(self, round_number: int) -> float:
        """Puts all blocks; seconds."""
        keys = round_keys(round_number, self._blocks.count)
        source, size = self._blocks.source.ctypes.data, self._blocks.block_bytes
        self._store.clear()
        began = time.perf_counter()
        for first, part in self._parts(keys):
            parents = [keys[first - 1] if first else None, *part[:-1]]
            refs = [BlockRef(k, p) for k, p in zip(part, parents, strict=True)]
            with self._store.write(refs) as lease:
                slots = [lease.slot(i) + self._base for i in range(len(part))]
                self._copy(slots, [source + (first + i) * size for i in range(len(part))])
                if not all(commit_each(lease, range(len(part)), [None] * len(part))):
                    raise ContenderError("the node did not take every block")
        return time.perf_counter() - began

    def read(self, round_number: int) -> float:
        """Gets them back; seconds."""
        keys = round_keys(round_number, self._blocks.count)
        target, size = self._blocks.target.ctypes.data, self._blocks.block_bytes
        self._blocks.forget()
        began = time.perf_counter()
        for first, part in self._parts(keys):
            with self._store.read(part, deadline_s=_DEADLINE_S) as lease:
                if any(lease.wait(i) is not Outcome.HIT for i in range(len(part))):
                    raise ContenderError("the node had not every block")
                slots = [lease.slot(i) + self._base for i in range(len(part))]
                self._copy([target + (first + i) * size for i in range(len(part))], slots)
        took_s = time.perf_counter() - began
        self._blocks.prove("the node")
        return took_s

    def _parts(self, keys: list[Key]) -> Iterator[tuple[int, list[Key]]]:
        step = self._settings.lease_blocks
        for first in range(0, len(keys), step):
            yield first, keys[first : first + step]

    def _copy(self, targets: list[int], sources: list[int]) -> None:
        size = self._blocks.block_bytes

        def copy(i: int) -> None:
            ctypes.memmove(targets[i], sources[i], size)

        share_out(self._settings.threads, len(targets), copy)


def measure(settings: Settings, tell: Callable[[str], None], *, seed: int = 1) -> Outcomes:
    """Runs all; `tell` gets a line now and then.

    Raises:
        ContenderError: the node could not be started, or gave back other bytes.
    """
    found = Outcomes(settings)
    chance = random.Random(seed)
    size = settings.blocks * settings.block_bytes
    with (
        tempfile.TemporaryDirectory() as folder,
        Blocks(count=settings.blocks, block_bytes=settings.block_bytes, seed=seed) as blocks,
        node_process(Path(folder), size) as (pid, path),
        NodeStore(path, Attach(bytes(32), "", settings.block_bytes)) as store,
    ):
        memcpy = Memcpy(blocks, threads=settings.threads)
        node = NodeMemory(store, blocks, settings)
        for number in range(settings.rounds + 1):
            times: dict[str, tuple[float, float]] = {}
            contenders: list[tuple[str, Memcpy | NodeMemory]] = [("memcpy", memcpy), ("node", node)]
            chance.shuffle(contenders)
            for name, contender in contenders:
                times[name] = contender.write(number), contender.read(number)
            if number:
                speeds = [size / s for name in ("memcpy", "node") for s in times[name]]
                found.rounds.append(Round(*speeds))
                tell(f"round {number} of {settings.rounds}")
        memcpy.close()
        _operations(store, pid, found)
    return found


def _operations(store: NodeStore, pid: int, found: Outcomes) -> None:
    """Many turns of what an engine asks for a request, one message after the other."""
    store.clear()
    keys = round_keys(1 << 20, min(_MATCHED, found.settings.blocks // 2))
    with store.write([BlockRef(key, None) for key in keys]) as lease:
        commit_each(lease, range(len(keys)), [None] * len(keys))
    for kept in (False, True):  # the first time is not kept
        turns = found.settings.turns if kept else found.settings.turns // 10
        before_s, began = _cpu_s(pid), time.perf_counter()
        for turn in range(turns):
            store.match(keys)
            store.read(keys[:_LEASED], deadline_s=_DEADLINE_S).release()
            new = round_keys((1 << 21) + turn + (turns if kept else 0), _LEASED)
            with store.write([BlockRef(key, None) for key in new]) as lease:
                commit_each(lease, range(len(new)), [None] * len(new))
        store.room_blocks()  # everything before it was done
        found.operations = turns * _SIXTH
        found.operations_s = time.perf_counter() - began
        found.node_cpu_s = _cpu_s(pid) - before_s


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def node_process(folder: Path, dram_bytes: int, *more: str) -> Iterator[tuple[int, Path]]:
    """A node of its own, with `more` settings: process and socket.

    Raises:
        ContenderError: it did not start.
    """
    path = folder / "node.sock"
    sets = (f"store.dram.capacity={dram_bytes}", "store.ssd.enabled=false", *more)
    command = [sys.executable, "-m", "kvist.cli.main", "node", "--socket", str(path)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *(f"--set={text}" for text in sets)], stdout=log, stderr=log
        )
    try:
        until = time.monotonic() + _START_S
        while not _answers(path, process.pid):
            try:
                process.wait(_LOOK_S)
            except subprocess.TimeoutExpired:
                if time.monotonic() < until:
                    continue
            raise ContenderError((folder / "log").read_text())
        yield process.pid, path
    finally:
        process.terminate()
        process.wait(_START_S)


def _answers(path: Path, pid: int) -> bool:
    try:
        return bool(control.ask(path, "status")["pid"] == pid)
    except NodeAwayError:
        return False
