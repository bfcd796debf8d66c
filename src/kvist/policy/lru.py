"""Least recently used first: a dict in order of last use, O(1) an operation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvist.core.keys import Key
from kvist.policy.order import Queue, oldest_first


class Lru:
    """Evicts what was used longest ago, blind to parents."""

    def __init__(self) -> None:
        self._order: Queue = OrderedDict()  # the coldest stands first

    def insert(self, key: Key, parent: Key | None) -> None:
        """Adds `key` as the most recent; a key that is present is touched."""
        if key in self._order:
            self._order.move_to_end(key)
        else:
            self._order[key] = None

    def touch(self, key: Key) -> None:
        """Makes `key` the most recent."""
        if key in self._order:
            self._order.move_to_end(key)

    def remove(self, key: Key) -> None:
        """Forgets `key`."""
        self._order.pop(key, None)

    def victims(self) -> Iterator[Key]:
        """Keys from the coldest to the hottest."""
        return oldest_first(self._order)

    def __len__(self) -> int:
        return len(self._order)
