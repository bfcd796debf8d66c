"""Least recently used first: a ring of nodes, O(1) an operation."""

from __future__ import annotations

from collections.abc import Iterator

from kvist.core.keys import Key


class _Node:
    """A link of the ring; the root's `after` is the coldest key, its `before` the hottest."""

    __slots__ = ("after", "before", "key")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.before: _Node = self
        self.after: _Node = self

    def unlink(self) -> None:
        self.before.after = self.after
        self.after.before = self.before

    def link_before(self, other: _Node) -> None:
        self.before, self.after = other.before, other
        other.before.after = self
        other.before = self


class Lru:
    """Evicts what was used longest ago, blind to parents."""

    def __init__(self) -> None:
        self._root = _Node(b"")
        self._nodes: dict[Key, _Node] = {}

    def insert(self, key: Key, parent: Key | None) -> None:
        """Adds `key` as the most recent; a key that is present is touched."""
        if key in self._nodes:
            self.touch(key)
            return
        node = self._nodes[key] = _Node(key)
        node.link_before(self._root)

    def touch(self, key: Key) -> None:
        """Makes `key` the most recent."""
        node = self._nodes.get(key)
        if node is not None:
            node.unlink()
            node.link_before(self._root)

    def remove(self, key: Key) -> None:
        """Forgets `key`."""
        node = self._nodes.pop(key, None)
        if node is not None:
            node.unlink()

    def victims(self) -> Iterator[Key]:
        """Keys from the coldest to the hottest."""
        node = self._root.after
        while node is not self._root:
            after = node.after  # read first: the caller may remove the key it is given
            yield node.key
            node = after

    def __len__(self) -> int:
        return len(self._nodes)
