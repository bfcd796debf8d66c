"""Belady's optimum for whole requests: evict what is used again last; for offline use only.

It knows the future: each block's next use. Of equals (such as the blocks of one request) the deeper
goes first, so prefixes stay whole; a new block may be its own victim. No order does better.

Source: Belady, A study of replacement algorithms for a virtual-storage computer, 1966.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

from kvist.core.hints import Hints
from kvist.core.keys import Key

_NEVER = 1 << 60
_SWEEP_SLACK = 64
_Entry = tuple[int, int, int, Key]  # next use and depth, both negated; tie-breaker; key


class Belady:
    """Evicts the block whose next use is farthest away. `begin` says that the next request came."""

    def __init__(self, requests: Iterable[Sequence[Key]]) -> None:
        """`requests`: the keys of every request to come, in order, each from its root."""
        self._coming: dict[Key, list[int]] = {}  # requests that use a key, the last one first
        self._depth: dict[Key, int] = {}
        for number, keys in enumerate(requests):
            for depth, key in enumerate(keys):
                self._coming.setdefault(key, []).append(number)
                self._depth.setdefault(key, depth)
        for numbers in self._coming.values():
            numbers.reverse()
        self._request = -1
        self._entries: dict[Key, _Entry] = {}
        self._heap: list[_Entry] = []  # lazy: entries that are not in `_entries` are stale
        self._order = 0

    def begin(self, hints: Hints) -> None:
        """The next request begins."""
        self._request += 1

    def insert(self, key: Key, parent: Key | None) -> None:
        """Adds `key` with its next use; a key that is present is touched."""
        coming = self._coming.get(key, [])
        while coming and coming[-1] <= self._request:
            coming.pop()
        next_use = coming[-1] if coming else _NEVER
        self._order += 1
        entry = (-next_use, -self._depth.get(key, 0), self._order, key)
        self._entries[key] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + _SWEEP_SLACK:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def touch(self, key: Key) -> None:
        """Looks up when `key` is used next."""
        if key in self._entries:
            self.insert(key, None)

    def remove(self, key: Key) -> None:
        """Forgets `key`."""
        self._entries.pop(key, None)

    def victims(self) -> Iterator[Key]:
        """Keys from the one whose next use is farthest away."""
        skipped: list[_Entry] = []
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                key = entry[3]
                if self._entries.get(key) is not entry:
                    continue
                skipped.append(entry)
                yield key
                if key not in self._entries:
                    skipped.pop()
        finally:
            for entry in skipped:
                heapq.heappush(self._heap, entry)

    def __len__(self) -> int:
        return len(self._entries)
