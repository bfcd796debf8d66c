"""Staging: where a carrier puts blocks before they are proven.

It is cut into lots. A lot is one reader's at a time. Where a transfer was waited for too long, its
lot is set aside until the carrier says that it has ended; where one failed half-way, which says
nothing about what is still on the wire, until the carrier itself has ended. If that takes long, and
nobody else needs the carrier or no lot is left, the carrier is ended.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from kvist.node.peers.carrying.carrier import Carrier
from kvist.tiers.mapping import map_shared

LOTS = 8
LOT_BYTES = 16 << 20
_PATIENCE_S = 10.0  # with what is set aside


@dataclass(frozen=True, slots=True)
class Lot:
    """A part of staging, from `offset` of the carrier's memory on."""

    offset: int
    view: memoryview


class Staging:
    """Lots of a memory, and the carrier that fills them. Thread-safe."""

    def __init__(
        self,
        kind: str,
        *,
        lots: int = LOTS,
        lot_bytes: int = LOT_BYTES,
        patience_s: float = _PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts the carrier. Pages of the memory are given out on first use.

        Raises:
            OSError: the memory cannot be had.
        """
        self.lot_bytes = lot_bytes
        self._patience_s, self._clock = patience_s, clock
        self._lock = threading.Lock()
        fd = os.memfd_create("kvist-staging", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, lots * lot_bytes)
            memory, _ = map_shared(fd, lots * lot_bytes)
            starts = range(0, lots * lot_bytes, lot_bytes)
            self._free = [Lot(at, memory[at : at + lot_bytes]) for at in starts]
            self._late: dict[int, float] = {}  # since when, by offset
            self._most = lots
            self.carrier = Carrier(kind, fd, lots * lot_bytes, what="the carrier that reads")
        finally:
            os.close(fd)

    @property
    def late_lots(self) -> int:
        """How many are set aside."""
        return len(self._late)

    @property
    def free_lots(self) -> int:
        """How many can be had."""
        return len(self._free)

    def take(self) -> Lot | None:
        """A lot for the caller to own; `None` when there is none."""
        with self._lock:
            lot = self._free.pop() if self._free else None
            idle = len(self._free) + len(self._late) + (lot is not None) == self._most
            over_s = self._clock() - self._patience_s
            hopeless = any(since_s < over_s for since_s in self._late.values())
            fence = hopeless and (lot is None or idle)
            if fence and lot is not None:
                self._free.append(lot)
        if fence:
            self.carrier.fence()
            return None
        return lot

    def give(self, lot: Lot) -> None:
        """Gives a lot back into which nothing comes any more."""
        with self._lock:
            self._free.append(lot)

    def set_aside(self, lot: Lot, fetch: Future[None]) -> None:
        """Gives a lot back into which something may come until `fetch` has ended."""
        with self._lock:
            self._late[lot.offset] = self._clock()

        def over(_: Future[None]) -> None:
            with self._lock:
                del self._late[lot.offset]
                self._free.append(lot)

        fetch.add_done_callback(over)

    def spoil(self, lot: Lot) -> None:
        """Gives a lot back into which something may come as long as the carrier lives."""
        self.set_aside(lot, self.carrier.end())

    def close(self) -> None:
        """Ends the carrier. Idempotent."""
        self.carrier.close()
