"""A disk that fails on purpose, under the SSD tier's I/O: which call, in what way, by which seed.

`ChaosIo` stands where `PosixIo` stands. What is wrong now is a tuple of `Fault`s, which a test sets
and takes away; chances are drawn from a seed, so the same calls in the same order meet the same
faults. A call that hangs does so until `heal`, and is then carried out, as by a disk that answers
again.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kvist.tiers.ssd import PosixIo, SegmentIo

HANG_LIMIT_S = 60.0  # a test that forgets to heal ends all the same


class Call(Enum):
    """The calls of `SegmentIo`."""

    OPEN = "open"
    WRITE = "pwritev"
    READ = "preadv"
    SYNC = "sync"
    UNLINK = "unlink"


class Effect(Enum):
    """What a fault does to a call."""

    FAIL = "fail"  # raises OSError(code), after the first `limit_bytes` were written
    SHORT = "short"  # moves no more than `limit_bytes` (at least one) of the first buffer
    SLOW = "slow"  # takes `delay_s` longer, or until `heal`
    HANG = "hang"  # does not return before `heal`


@dataclass(frozen=True, slots=True)
class Fault:
    """What becomes of a share `chance_ratio` of the calls of one kind."""

    call: Call
    effect: Effect = Effect.FAIL
    code: int = errno.EIO
    delay_s: float = 0.0
    limit_bytes: int = 0
    chance_ratio: float = 1.0


class UnsyncedIo(PosixIo):
    """Leaves `sync` out: kill -9 loses nothing of the page cache, and tests are quick."""

    def sync(self, fd: int) -> None:
        """Does nothing."""


_Part = Callable[[int], None]
_WHOLE_CALL_EFFECTS = [Effect.FAIL, Effect.SLOW, Effect.HANG]


def _cut(buffers: Sequence[memoryview], limit_bytes: int) -> Sequence[memoryview]:
    return [buffers[0][:limit_bytes]] if limit_bytes else buffers


class ChaosIo:
    """A `SegmentIo` with faults. Thread-safe."""

    def __init__(self, inner: SegmentIo | None = None, *, seed: int = 0) -> None:
        """`inner` does the work; an `UnsyncedIo` by default."""
        self._inner = inner or UnsyncedIo()
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self._faults: tuple[Fault, ...] = ()
        self._healed = threading.Event()
        self.met: Counter[tuple[Call, Effect]] = Counter()
        self.hanging = threading.Semaphore(0)  # released by each call that begins to hang

    def set(self, *faults: Fault) -> None:
        """Replaces what is wrong. Calls that hang or dawdle from before go on."""
        with self._lock:
            self._healed.set()
            self._healed = threading.Event()
            self._faults = faults

    def heal(self) -> None:
        """Nothing is wrong any more."""
        self.set()

    def open(self, path: Path, flags: int) -> int:
        """Opens, if it may."""
        self._meet(Call.OPEN)
        return self._inner.open(path, flags)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Writes, if it may, what it may."""

        def write_part(limit_bytes: int) -> None:
            if limit_bytes:
                self._inner.pwritev(fd, [buffers[0][:limit_bytes]], offset)

        limit_bytes = self._meet(Call.WRITE, write_part)
        return self._inner.pwritev(fd, _cut(buffers, limit_bytes), offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Reads, if it may, what it may."""
        limit_bytes = self._meet(Call.READ)
        return self._inner.preadv(fd, _cut(buffers, limit_bytes), offset)

    def sync(self, fd: int) -> None:
        """Syncs, if it may."""
        self._meet(Call.SYNC)
        self._inner.sync(fd)

    def unlink(self, path: Path) -> None:
        """Deletes, if it may."""
        self._meet(Call.UNLINK)
        self._inner.unlink(path)

    def _meet(self, call: Call, before_failing: _Part = lambda _: None) -> int:
        """Lets the call meet its faults; returns how many bytes it may move, 0 for all.

        Raises:
            OSError: it fails.
        """
        with self._lock:
            met = [
                f for f in self._faults if f.call is call and self._chance.random() < f.chance_ratio
            ]
            self.met.update((f.call, f.effect) for f in met)
            healed = self._healed
        limit_bytes = 0
        for fault in met:
            if fault.effect is Effect.SLOW:
                healed.wait(fault.delay_s)
            elif fault.effect is Effect.HANG:
                self.hanging.release()
                if not healed.wait(HANG_LIMIT_S):
                    raise OSError(errno.ETIMEDOUT, f"{call.value} hung and nobody healed it")
            elif fault.effect is Effect.SHORT:
                limit_bytes = max(1, fault.limit_bytes)
            else:
                before_failing(fault.limit_bytes)
                raise OSError(fault.code, os.strerror(fault.code))
        return limit_bytes


def draw_faults(chance: random.Random, *, delay_s: float) -> tuple[Fault, ...]:
    """One phase of a schedule: up to three faults, of which the seed of `chance` decides all."""
    faults = []
    for call in chance.sample(list(Call), chance.randrange(4)):
        effects = list(Effect) if call in (Call.READ, Call.WRITE) else _WHOLE_CALL_EFFECTS
        faults.append(
            Fault(
                call,
                chance.choice(effects),
                code=chance.choice((errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS)),
                delay_s=delay_s * chance.random(),
                limit_bytes=chance.choice((0, 100, 4096, 5000)),
                chance_ratio=chance.choice((1.0, 0.5, 0.1)),
            )
        )
    return tuple(faults)
