"""Least recently used *leaf* first: a block goes after all its descendants.

A block whose parent is gone cannot be matched any more, so a parent evicted before its children
turns them into dead weight. Present children are counted per parent; keys with none are leaves and
stand in a heap by the time (a counter) of their last use.

Heap entries are lazy. A touch only changes the node's time; an entry that is found stale when it
comes up is pushed again with the new time. A node has at most one entry, and entries of removed
nodes are swept when they outnumber the live ones, so the heap is O(present keys) and each operation
O(log n) amortised.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from kvist.core.keys import Key

_SWEEP_SLACK = 64


class _Node:
    __slots__ = ("key", "parent", "present", "queued", "time")

    def __init__(self, key: Key, parent: Key | None, time: int) -> None:
        self.key = key
        self.parent = parent
        self.time = time
        self.present = True
        self.queued = False


_Heap = list[tuple[int, int, _Node]]  # time, tie-breaker, node


class LeafLru:
    """Evicts the least recently used block that has no present child."""

    def __init__(self) -> None:
        self._nodes: dict[Key, _Node] = {}
        self._children: dict[Key, int] = {}  # present children, also of absent parents
        self._heap: _Heap = []
        self._now = 0

    def insert(self, key: Key, parent: Key | None) -> None:
        """Adds `key` below `parent`, which need not be present; touches a key that is present."""
        if key in self._nodes:
            self.touch(key)
            return
        self._now += 1
        node = self._nodes[key] = _Node(key, None if parent == key else parent, self._now)
        if node.parent is not None:
            self._children[node.parent] = self._children.get(node.parent, 0) + 1
        if key not in self._children:
            self._push(node)

    def touch(self, key: Key) -> None:
        """Makes `key` the most recent."""
        node = self._nodes.get(key)
        if node is not None:
            self._now += 1
            node.time = self._now

    def remove(self, key: Key) -> None:
        """Forgets `key`; its parent may become a leaf."""
        node = self._nodes.pop(key, None)
        if node is None:
            return
        node.present = False
        if node.parent is None:
            return
        left = self._children[node.parent] - 1
        if left:
            self._children[node.parent] = left
            return
        del self._children[node.parent]
        parent = self._nodes.get(node.parent)
        if parent is not None:
            self._push(parent)

    def victims(self) -> Iterator[Key]:
        """Leaves from the coldest; a parent follows the last of its children.

        A parent of skipped children comes after every block that is free to go.
        """
        taken: list[_Node] = []  # out of the heap; those still present go back in the end
        offered: dict[Key, int] = {}  # parent → present children that the caller has skipped
        blocked: _Heap = []
        try:
            while True:
                node = self._pop_leaf()
                if node is None:
                    if not blocked:
                        return
                    node = heapq.heappop(blocked)[2]
                taken.append(node)
                yield node.key
                if node.parent is None:
                    continue
                if node.present:
                    offered[node.parent] = offered.get(node.parent, 0) + 1
                parent = self._nodes.get(node.parent)
                if parent is not None and self._all_offered(parent.key, offered):
                    heapq.heappush(blocked, (parent.time, id(parent), parent))
        finally:
            for node in taken:
                if node.present and node.key not in self._children:
                    self._push(node)

    def _all_offered(self, key: Key, offered: dict[Key, int]) -> bool:
        count = offered.get(key, 0)
        return count > 0 and count == self._children.get(key, 0)

    def _push(self, node: _Node) -> None:
        if node.queued:
            return
        node.queued = True
        heapq.heappush(self._heap, (node.time, id(node), node))
        if len(self._heap) > 2 * len(self._nodes) + _SWEEP_SLACK:
            self._heap = [entry for entry in self._heap if entry[2].present]
            heapq.heapify(self._heap)

    def _pop_leaf(self) -> _Node | None:
        while self._heap:
            time, _, node = heapq.heappop(self._heap)
            node.queued = False
            if not node.present or node.key in self._children:
                continue  # removed, or gained a child (queued again when it loses the last)
            if node.time != time:
                self._push(node)
                continue
            return node
        return None

    def __len__(self) -> int:
        return len(self._nodes)
