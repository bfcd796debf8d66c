"""Gives memory its pages a stretch ahead of their first use, off the path of any request.

The first touch of a page costs a fault and a zeroing: for a long prompt that is as much time as
the copy itself, and small pages make every later copy slow. The warmer keeps a bounded stretch
beyond what was used present and in huge pages, so an arena still grows only with its use.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable

from kvist.core.errors import ClosedError
from kvist.tiers.dram import ArenaMap
from kvist.tiers.mapping import collapse, populate

AHEAD_BYTES = 512 << 20
STEP_BYTES = 8 << 20  # small, since the kernel lets nobody map memory meanwhile
_POLL_S = 0.05
_LOOK_S = 0.01
_NICENESS = 10


def step_aside(cpus: set[int] | None) -> None:
    """Lets engines go first: lowers the calling thread's priority, keeps it to `cpus` if given.

    A thread inherits the CPUs of the one that started it, which may be those of a forward pass.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    if cpus:
        with contextlib.suppress(OSError):  # a container may have fewer
            os.sched_setaffinity(0, cpus)


class GiveWay:
    """Where work on memory in the background waits while the engine works, though never for long.

    Moving pages into a huge one takes them away for a moment and empties the TLB of every core,
    which a request in between feels; on an engine that is never idle it goes on slowly.
    """

    def __init__(
        self,
        *,
        settle_s: float = 0.1,
        most_s: float = 0.05,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """An engine counts as idle `settle_s` after its last step; no wait is over `most_s`."""
        self._settle_s, self._most_s = settle_s, most_s
        self._clock, self._sleep = clock, sleep
        self._working = False
        self._last_s = -math.inf

    def begin(self) -> None:
        """The engine begins a step."""
        self._working = True

    def end(self) -> None:
        """It has ended."""
        self._last_s = self._clock()
        self._working = False

    def let_through(self) -> None:
        """Returns when the engine is idle, or after the longest wait."""
        give_up_s = self._clock() + self._most_s
        while (now_s := self._clock()) < give_up_s and (
            self._working or now_s < self._last_s + self._settle_s
        ):
            self._sleep(_LOOK_S)


class Warmer:
    """A daemon thread that ends when the arena is closed or all of it is warm."""

    def __init__(
        self,
        arena: ArenaMap,
        used_bytes: Callable[[], int],
        *,
        ahead_bytes: int = AHEAD_BYTES,
        cpus: set[int] | None = None,
        give_way: GiveWay | None = None,
    ) -> None:
        """`used_bytes` says how far the arena has been used; it is asked often."""
        self._cpus, self._give_way = cpus, give_way
        self._arena, self._used_bytes, self._ahead_bytes = arena, used_bytes, ahead_bytes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvist-warm", daemon=True)
        self.warm_bytes = 0

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        step_aside(self._cpus)
        while not self._stop.is_set() and self.warm_bytes < self._arena.size_bytes:
            goal = min(self._arena.size_bytes, self._used_bytes() + self._ahead_bytes)
            if self.warm_bytes >= goal:
                self._stop.wait(_POLL_S)
            elif not self._step(min(STEP_BYTES, goal - self.warm_bytes)):
                return

    def _step(self, size_bytes: int) -> bool:
        if self._give_way is not None:
            self._give_way.let_through()
        try:
            address = self._arena.address + self.warm_bytes
        except ClosedError:
            return False
        present = populate(address, size_bytes)
        collapse(address, size_bytes)
        self.warm_bytes += size_bytes
        return present
