"""Gives memory its pages a stretch ahead of their first use, off the path of any request.

The first touch of a page costs a fault and a zeroing: for a long prompt that is as much time as
the copy itself, and small pages make every later copy slow. The warmer keeps a bounded stretch
beyond what was used present and in huge pages, so an arena still grows only with its use.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

from kvist.core.errors import ClosedError
from kvist.tiers.dram import ArenaMap
from kvist.tiers.mapping import collapse, populate

AHEAD_BYTES = 512 << 20
STEP_BYTES = 8 << 20  # small, since the kernel lets nobody map memory meanwhile
_POLL_S = 0.05
_NICENESS = 10


def step_aside(cpus: set[int] | None) -> None:
    """Lets engines go first: lowers the calling thread's priority, keeps it to `cpus` if given.

    A thread inherits the CPUs of the one that started it, which may be those of a forward pass.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    if cpus:
        with contextlib.suppress(OSError):  # a container may have fewer
            os.sched_setaffinity(0, cpus)


class Warmer:
    """A daemon thread that ends when the arena is closed or all of it is warm."""

    def __init__(
        self,
        arena: ArenaMap,
        used_bytes: Callable[[], int],
        *,
        ahead_bytes: int = AHEAD_BYTES,
        cpus: set[int] | None = None,
    ) -> None:
        """`used_bytes` says how far the arena has been used; it is asked often."""
        self._cpus = cpus
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
        try:
            address = self._arena.address + self.warm_bytes
        except ClosedError:
            return False
        present = populate(address, size_bytes)
        collapse(address, size_bytes)
        self.warm_bytes += size_bytes
        return present
