"""SIEVE: a queue and a hand that spares what was used since the hand last passed.

The hand goes from the oldest key to the newest and starts over at the end. A key that was used
loses its mark and stays where it is; the first key without a mark is the victim.

Source: Zhang et al., SIEVE is Simpler than LRU, NSDI'24, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvist.core.keys import Key


class _Node:
    """A link of the ring; the root's `newer` is the oldest key, its `older` the newest."""

    __slots__ = ("key", "newer", "older", "used")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.used = False
        self.newer: _Node = self
        self.older: _Node = self


class Sieve:
    """Evicts the first unused key that the hand meets."""

    def __init__(self) -> None:
        self._root = _Node(b"")
        self._hand = self._root
        self._nodes: dict[Key, _Node] = {}

    def insert(self, key: Key, parent: Key | None) -> None:
        """Adds `key` as the newest, unused; a key that is present is touched."""
        if key in self._nodes:
            self.touch(key)
            return
        node = self._nodes[key] = _Node(key)
        node.older, node.newer = self._root.older, self._root
        node.older.newer = node
        self._root.older = node

    def touch(self, key: Key) -> None:
        """Marks `key` as used; it does not move."""
        node = self._nodes.get(key)
        if node is not None:
            node.used = True

    def remove(self, key: Key) -> None:
        """Forgets `key`; a hand that points at it goes on to the next newer."""
        node = self._nodes.pop(key, None)
        if node is None:
            return
        if self._hand is node:
            self._hand = node.newer
        node.older.newer, node.newer.older = node.newer, node.older

    def victims(self) -> Iterator[Key]:
        """What the hand finds while each is removed; after a skip unused keys, then used ones."""
        while self._nodes:
            best = self._choose()
            yield best
            if best in self._nodes:
                yield from self._rest(best)
                return

    def _choose(self) -> Key:
        node = self._hand
        while node is self._root or node.used:
            node.used = False
            node = node.newer
        self._hand = node
        return node.key

    def _rest(self, offered: Key) -> Iterator[Key]:
        for used in (False, True):
            node = self._root.newer
            while node is not self._root:
                newer = node.newer  # read first: the caller may remove the key it is given
                if node.used is used and node.key != offered:
                    yield node.key
                node = newer

    def __len__(self) -> int:
        return len(self._nodes)
