"""How many bytes a remote has given and in how much time, and what became of reads."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

from kvist.core.outcome import ReadTotals
from kvist.tiers.remote.frames import MissCause


class Traffic:
    """Counters of one remote tier. Thread-safe; its lock is held for arithmetic only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._misses: Counter[MissCause] = Counter()
        self._under_way = 0
        self._busy_s = 0.0
        self._busy_since_s = 0.0
        self._read_bytes = 0
        self.hits = 0
        self.stored = 0
        self.present = 0

    def begin(self) -> None:
        """A call for blocks begins."""
        with self._lock:
            if not self._under_way:
                self._busy_since_s = self._clock()
            self._under_way += 1

    def end(self) -> None:
        """It has ended."""
        with self._lock:
            self._under_way -= 1
            if not self._under_way:
                self._busy_s += self._clock() - self._busy_since_s

    def hit(self, size_bytes: int) -> None:
        """A block has arrived whole."""
        with self._lock:
            self.hits += 1
            self._read_bytes += size_bytes

    def miss(self, cause: MissCause) -> None:
        """A block has not."""
        with self._lock:
            self._misses[cause] += 1

    def put(self, *, stored: int, present: int) -> None:
        """Blocks were stored, or were there."""
        with self._lock:
            self.stored += stored
            self.present += present

    def misses(self) -> Mapping[MissCause, int]:
        """Misses by cause."""
        with self._lock:
            return dict(self._misses)

    def totals(self) -> ReadTotals:
        """Bytes read, and seconds in which at least one read was under way."""
        with self._lock:
            under_way_s = self._clock() - self._busy_since_s if self._under_way else 0.0
            return ReadTotals(self._read_bytes, self._busy_s + under_way_s)
