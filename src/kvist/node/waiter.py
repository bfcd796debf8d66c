"""Tells the loop when blocks that are read from below have arrived: one thread a store.

It sleeps in the lease of the oldest block that is pending: blocks arrive about in the order in
which they were asked for. Whenever that one is decided, and every 20 ms, the loop looks at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvist.core.lease import ReadLease
from kvist.core.outcome import Outcome

_LOOK_S = 0.02
_IDLE_S = 0.5


class Waiter:
    """Waits for read leases with pending blocks."""

    def __init__(self, poke: Callable[[], None]) -> None:
        """`poke` makes the loop look soon."""
        self._poke = poke
        self._changed = threading.Condition()
        self._leases: dict[ReadLease, int] = {}  # with the first block that may be pending
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvist-node-wait", daemon=True)
        self._thread.start()

    def add(self, lease: ReadLease) -> None:
        """Waits for `lease`, too."""
        with self._changed:
            self._leases[lease] = 0
            self._changed.notify()

    def drop(self, lease: ReadLease) -> None:
        """Nobody waits for `lease` any more."""
        with self._changed:
            self._leases.pop(lease, None)

    def stop(self, timeout_s: float) -> None:
        """Ends the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (lease := self._oldest()) is not None:
            first = self._leases.get(lease, 0)
            outcome = lease.wait(first, timeout_s=_LOOK_S)
            if outcome is not Outcome.PENDING:
                self._move_on(lease, first)
            self._poke()

    def _oldest(self) -> ReadLease | None:
        with self._changed:
            while not self._leases and not self._stopping:
                self._changed.wait(_IDLE_S)
            return None if self._stopping else next(iter(self._leases))

    def _move_on(self, lease: ReadLease, first: int) -> None:
        while first < len(lease) and lease.outcome(first) is not Outcome.PENDING:
            first += 1
        with self._changed:
            if lease not in self._leases:
                return
            if first < len(lease):
                self._leases[lease] = first
            else:
                del self._leases[lease]
