"""First in, first out: use changes nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvist.core.keys import Key
from kvist.policy.order import Queue, oldest_first


class Fifo:
    """Evicts what came first, however often it is used."""

    def __init__(self) -> None:
        self._order: Queue = OrderedDict()

    def insert(self, key: Key, parent: Key | None) -> None:
        """Adds `key` at the end; a key that is present keeps its place."""
        self._order.setdefault(key)

    def touch(self, key: Key) -> None:
        """Does nothing."""

    def remove(self, key: Key) -> None:
        """Forgets `key`."""
        self._order.pop(key, None)

    def victims(self) -> Iterator[Key]:
        """Keys from the first that came to the last."""
        return oldest_first(self._order)

    def __len__(self) -> int:
        return len(self._order)
