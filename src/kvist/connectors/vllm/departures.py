"""Blocks that left a tier of the store, noted on its threads for the scheduler's to look at."""

from __future__ import annotations

from collections import deque

from kvist.core.events import Cleared, KvEvent, Removed
from kvist.core.keys import Key

_MOST = 1 << 16  # keys; what is dropped beyond it is found to be gone when it is asked for


class Departures:
    """Keys since the last look. A deque's ends are safe for one thread each."""

    def __init__(self) -> None:
        self._keys: deque[Key] = deque(maxlen=_MOST)
        self._cleared = False

    def store_event(self, event: KvEvent) -> None:
        """From the store, on any of its threads."""
        if isinstance(event, Removed):
            self._keys.extend(event.keys)
        elif isinstance(event, Cleared):
            self._cleared = True

    def take_cleared(self) -> bool:
        """Whether the store was emptied since the last look."""
        cleared, self._cleared = self._cleared, False
        return cleared

    def take(self, most: int) -> list[Key]:
        """At most so many keys that left some tier; they may be in another."""
        return [self._keys.popleft() for _ in range(min(most, len(self._keys)))]
