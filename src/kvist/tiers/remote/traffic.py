"""What became of a remote tier's blocks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

from kvist.tiers.remote.frames import MissCause


class Traffic:
    """Counters of one remote tier. Thread-safe; its lock is held for arithmetic only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._misses: Counter[MissCause] = Counter()
        self.hits = 0
        self.stored = 0
        self.present = 0

    def hit(self) -> None:
        """A block has arrived whole."""
        with self._lock:
            self.hits += 1

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
