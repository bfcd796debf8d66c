"""Moves blocks between a worker's pages and the store's arena, off the engine's thread.

One thread takes jobs, loads before saves: a load keeps a request waiting, a save does not. Saves
are cut in parts, so that a load never waits long for one. A job that fails says so and harms
nothing; the thread itself never dies.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from typing import Protocol

from kvist.connectors.fallback import Fallback
from kvist.connectors.vllm.messages import CopyJob

log = logging.getLogger("kvist.vllm")

_PART_BLOCKS = 8
ALL_CPUS = set(range(os.cpu_count() or 1))


class JobKind(IntEnum):
    """Urgency of a job; lower goes first."""

    LOAD = 0
    SAVE = 1
    STOP = 2


@dataclass(frozen=True, slots=True)
class Moved:
    """What a mover did. `checksums` are those of whole blocks that went to the arena, by slot."""

    size_bytes: int
    checksums: Mapping[int, int] = field(default_factory=dict)


class Mover(Protocol):
    """Copies the blocks of one job; synchronous; raises when it cannot."""

    def move(self, kind: JobKind, job: CopyJob, *, wide: bool) -> Moved:
        """Copies. `wide`: every core is free for it."""
        ...


@dataclass(order=True, slots=True)
class _Item:
    kind: JobKind
    order: int
    work: CopyJob = field(compare=False)
    whole: CopyJob = field(compare=False)  # the job that `work` is, or is a part of
    before: Callable[[], None] | None = field(compare=False, default=None)
    wide: bool = field(compare=False, default=False)


@dataclass(slots=True)
class Finished:
    """What became of jobs since the last call."""

    jobs: list[tuple[JobKind, CopyJob]] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)
    checksums: dict[int, int] = field(default_factory=dict)  # slot → of a saved block
    copied_bytes: int = 0
    copy_s: float = 0.0
    loaded_bytes: int = 0  # of `copied_bytes`
    load_s: float = 0.0  # of `copy_s`


class Copier:
    """The copy thread and its queue."""

    def __init__(self, mover: Mover, fallback: Fallback, cpus: set[int] | None = None) -> None:
        self._mover, self._fallback = mover, fallback
        self._queue: queue.PriorityQueue[_Item] = queue.PriorityQueue()
        self._changed = threading.Condition()
        self._pending: dict[int, JobKind] = {}
        self._parts: dict[int, int] = {}  # job → parts not finished
        self._checksums: dict[int, dict[int, int]] = {}  # job → of its finished parts
        self._spoiled: set[int] = set()
        self._done = Finished()
        self._order = 0
        self._thread = threading.Thread(
            target=self._run, args=(cpus,), name="kvist-copy", daemon=True
        )
        self._thread.start()

    def submit(
        self,
        kind: JobKind,
        job: CopyJob,
        before: Callable[[], None] | None = None,
        *,
        wide: bool = False,
    ) -> None:
        """Queues a load or a save; `before` runs on the copy thread first (waits for the device).

        `wide`: no forward pass is running, so the copy may use the engine's cores as well.
        """
        parts = _cut(job) if kind is JobKind.SAVE else [job]
        with self._changed:
            self._pending[job.job_id] = kind
            self._parts[job.job_id] = len(parts)
            for part in parts:
                self._put(_Item(kind, self._order, part, job, before, wide))

    def _put(self, item: _Item) -> None:
        self._order += 1
        item.order = self._order
        self._queue.put(item)

    def pending(self) -> int:
        """Jobs not finished yet."""
        return len(self._pending)

    def wait_for_any(self, timeout_s: float) -> None:
        """Returns when a job is finished, or after `timeout_s`."""
        with self._changed:
            if self._pending and not self._done.jobs:
                self._changed.wait(timeout_s)

    def drain_saves(self, timeout_s: float) -> bool:
        """Waits until no save is pending: their pages are about to be overwritten.

        A save that is not done in time is spoiled: it will be reported as failed, so that what it
        copied is never committed.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while any(k is JobKind.SAVE for k in self._pending.values()):
                left = deadline - time.monotonic()
                if left <= 0:
                    late = [j for j, k in self._pending.items() if k is JobKind.SAVE]
                    self._spoiled.update(late)
                    return False
                self._changed.wait(left)
        return True

    def take(self) -> Finished:
        """What has finished since the last call."""
        with self._changed:
            done, self._done = self._done, Finished()
        return done

    def close(self, timeout_s: float) -> None:
        """Finishes what is queued and stops the thread."""
        nothing = CopyJob(0, "", (), ())
        self._put(_Item(JobKind.STOP, 0, nothing, nothing))
        self._thread.join(timeout_s)

    def _run(self, cpus: set[int] | None) -> None:
        spread: bool | None = None
        while True:
            item = self._queue.get()
            if item.kind is JobKind.STOP:
                return
            if cpus and item.wide is not spread:
                spread = item.wide
                pin = partial(os.sched_setaffinity, 0, ALL_CPUS if spread else cpus)
                self._fallback.guard("pin copy thread", pin, default=None)
            started = time.perf_counter()
            copy = partial(self._one, item)
            moved = self._fallback.guard(f"{item.kind.name} copy", copy, default=None)
            self._finish(item, moved, time.perf_counter() - started)

    def _one(self, item: _Item) -> Moved:
        if item.before is not None:
            item.before()
        return self._mover.move(item.kind, item.work, wide=item.wide)

    def _finish(self, item: _Item, moved: Moved | None, took_s: float) -> None:
        job = item.whole
        with self._changed:
            if moved is None:
                self._spoiled.add(job.job_id)
            else:
                self._done.copied_bytes += moved.size_bytes
                self._done.copy_s += took_s
                if item.kind is JobKind.LOAD:
                    self._done.loaded_bytes += moved.size_bytes
                    self._done.load_s += took_s
                self._checksums.setdefault(job.job_id, {}).update(moved.checksums)
            self._parts[job.job_id] -= 1
            if not self._parts[job.job_id]:
                self._end(item.kind, job)
            self._changed.notify_all()

    def _end(self, kind: JobKind, job: CopyJob) -> None:
        del self._pending[job.job_id], self._parts[job.job_id]
        checksums = self._checksums.pop(job.job_id, {})
        if job.job_id in self._spoiled:
            self._spoiled.discard(job.job_id)
            self._done.failed.add(job.job_id)
        else:
            self._done.checksums.update(checksums)
        self._done.jobs.append((kind, job))


def _cut(job: CopyJob) -> list[CopyJob]:
    """A job in parts of a few blocks; at least one."""
    cuts = range(0, max(1, len(job.slots)), _PART_BLOCKS)
    return [
        replace(
            job,
            slots=job.slots[i : i + _PART_BLOCKS],
            pages=job.pages[i : i + _PART_BLOCKS],
        )
        for i in cuts
    ]


def copy_cpus() -> set[int]:
    """CPUs for the copy thread: not those that the engine's own threads are pinned to, if others.

    vLLM pins a CPU worker to its cores; threads would inherit that and steal from the forward pass.
    """
    mine = os.sched_getaffinity(0)
    return (ALL_CPUS - mine) or mine
