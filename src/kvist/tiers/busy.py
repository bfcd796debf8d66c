"""How many bytes a medium has given and in how much time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from kvist.core.outcome import ReadTotals


class BusyMeter:
    """Bytes, and the time in which at least one call was under way. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._under_way = 0
        self._busy_s = 0.0
        self._since_s = 0.0
        self._read_bytes = 0

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While it is held, a call is under way."""
        with self._lock:
            if not self._under_way:
                self._since_s = self._clock()
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1
                if not self._under_way:
                    self._busy_s += self._clock() - self._since_s

    def count(self, size_bytes: int) -> None:
        """Bytes have arrived."""
        with self._lock:
            self._read_bytes += size_bytes

    def totals(self) -> ReadTotals:
        """All so far; a call under way counts as busy up to now."""
        with self._lock:
            under_way_s = self._clock() - self._since_s if self._under_way else 0.0
            return ReadTotals(self._read_bytes, self._busy_s + under_way_s)
