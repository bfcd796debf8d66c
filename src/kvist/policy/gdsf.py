"""GDSF: frequency over size plus a clock that rises with each eviction.

A key's worth is L + uses × cost / size, where L is the worth of the last victim, so what is not
used again falls behind. Blocks are of one size; cost is 1, or what the owner says.

Source: Cherkasova, Improving WWW Proxies Performance with GDSF Caching, HPL-98-69R1, 1998.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from kvist.core.keys import Key

_SWEEP_SLACK = 64
_Entry = tuple[float, int, Key]  # worth, order of the last use, key


class Gdsf:
    """Evicts the key of least worth; of equals the one used longest ago."""

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry] = {}
        self._uses: dict[Key, int] = {}
        self._heap: list[_Entry] = []  # lazy: entries that are not in `_entries` are stale
        self._floor = 0.0  # L
        self._now = 0
        self._offered: Key | None = None

    def insert(self, key: Key, parent: Key | None) -> None:
        """Adds `key` with one use; a key that is present is touched."""
        self._uses.setdefault(key, 0)
        self._use(key)

    def touch(self, key: Key) -> None:
        """Counts a use; the worth is taken anew from the clock."""
        if key in self._uses:
            self._use(key)

    def remove(self, key: Key) -> None:
        """Forgets `key`; the clock goes to the worth of a victim."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        del self._uses[key]
        if key == self._offered:
            self._floor = max(self._floor, entry[0])

    def victims(self) -> Iterator[Key]:
        """Keys from the least worth."""
        skipped: list[_Entry] = []
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                key = entry[2]
                if self._entries.get(key) is not entry:
                    continue
                skipped.append(entry)
                self._offered = key
                yield key
                if key not in self._entries:
                    skipped.pop()
        finally:
            for entry in skipped:
                heapq.heappush(self._heap, entry)

    def _use(self, key: Key) -> None:
        self._now += 1
        self._uses[key] += 1
        entry = self._entries[key] = (self._floor + self._uses[key], self._now, key)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + _SWEEP_SLACK:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._entries)
