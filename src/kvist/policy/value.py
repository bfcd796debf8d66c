"""Kvist's own order: evict the leaf that is expected to bring the fewest uses for its time held.

Every block, present or evicted not long ago (a ghost), has the time of its last use and a class:
how often it was used, and how the request that used it last went on (finish reason, length of the
output); a block that is not full has a class of its own. `HazardTable` learns for each class at
which ages blocks are used again. Values of a class rise and fall with age, so its least is taken to
be at its oldest or its newest leaf: a choice costs O(classes). Only leaves (blocks without a
present child) go, so prefixes stay whole. A new block may be its own victim; that is the insert
filter.

Each class keeps two lazy heaps of its leaves. An entry is stale when its node is gone, has a child,
or was used since; stale entries are dropped when they come up, and swept when they prevail.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator

from kvist.core.keys import Key
from kvist.policy.hazard import HazardTable, age_bucket
from kvist.policy.protocol import Finish, Hints

_USE_BOUNDS = (1, 2, 3, 4, 5, 7, 10)  # upper bounds of the classes by number of earlier uses
_OUTPUT_BOUNDS = (128,)
_USE_CLASSES = len(_USE_BOUNDS) + 1
_OUTPUT_CLASSES = len(_OUTPUT_BOUNDS) + 2  # and unknown
_PARTIAL_CLASS = _USE_CLASSES * _OUTPUT_CLASSES * len(Finish)  # the last one
_CLASSES = _PARTIAL_CLASS + 1
_MANY_USES = _USE_BOUNDS[-1]
_CLASS_OF_USES = [sum(n >= bound for bound in _USE_BOUNDS) for n in range(_MANY_USES + 1)]

_EARLY_REQUESTS = 400
_EARLY_REFRESH_REQUESTS = 25
_REFRESH_REQUESTS = 50
_FADE_REQUESTS = 2000
_FADE = 0.9
_REQUEST_ACCESSES = 256  # counts as a request when nobody says where requests begin
_GHOST_BLOCKS = 1 << 18
_SWEEP_SLACK = 64


class _Node:
    """A block that is present, or a ghost; `last_s` is negative until its first use."""

    __slots__ = (
        "children",
        "cls",
        "key",
        "last_s",
        "parent",
        "period",
        "present",
        "queued",
        "run",
        "uses",
    )

    def __init__(self, key: Key) -> None:
        self.key = key
        self.parent: _Node | None = None
        self.children = 0  # present ones
        self.present = False
        self.last_s = -1.0
        self.cls = 0
        self.uses = 0
        self.period = 0  # of its last use, in the table
        self.queued = 0  # times in the queue of ghosts
        self.run = 0  # the last walk of victims that offered it


_Entry = tuple[float, int, _Node]  # time of last use (negated in the heap of newest), order, node


class _Leaves:
    """The leaves of one class from both ends."""

    __slots__ = ("cls", "newest", "oldest")

    def __init__(self, cls: int) -> None:
        self.cls = cls
        self.oldest: list[_Entry] = []
        self.newest: list[_Entry] = []

    def push(self, node: _Node, order: int) -> None:
        heapq.heappush(self.oldest, (node.last_s, order, node))
        heapq.heappush(self.newest, (-node.last_s, -order, node))

    def top(self, heap: list[_Entry]) -> _Node | None:
        """The first node of one of the two heaps; drops the stale entries before it."""
        while heap and not self.valid(heap[0]):
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def sweep(self) -> None:
        """Drops the entries that are stale or double."""
        for heap in (self.oldest, self.newest):
            valid = {entry[2]: entry for entry in heap if self.valid(entry)}
            heap[:] = valid.values()
            heapq.heapify(heap)

    def valid(self, entry: _Entry) -> bool:
        node = entry[2]
        return (
            node.present
            and not node.children
            and node.cls == self.cls
            and node.last_s == abs(entry[0])
        )


_Source = tuple[_Leaves, list[_Entry]]
_Offer = tuple[float, float, int, _Node, _Source | None]  # worth, last use, tie-breaker


class Value:
    """Evicts the leaf of least expected uses per block-second."""

    def __init__(self, clock: Callable[[], float], *, ghost_blocks: int = _GHOST_BLOCKS) -> None:
        """`clock` gives seconds that never go back; `ghost_blocks` bounds the memory of ghosts."""
        self._clock = clock
        self._ghost_blocks = ghost_blocks
        self._nodes: dict[Key, _Node] = {}  # present and ghosts
        self._ghosts: deque[_Node] = deque()
        self._present = 0
        self._table = HazardTable(_CLASSES, clock())
        self._leaves: dict[int, _Leaves] = {}
        self._order = 0
        self._run = 0
        self._offered: _Node | None = None  # by the walk, which has not gone on since
        self._loose: list[_Node] = []  # leaves that a walk found and that are in no heap
        self._going: _Walk | None = None
        self._request_class = _request_class(Hints())
        self._partial: Key | None = None
        self._requests = 0
        self._accesses = 0
        self._memo = (-1.0, -1.0, 0)  # now, last use, bucket: a request's blocks share them

    def begin(self, hints: Hints) -> None:
        """A request with these `hints` begins."""
        self._request_class = _request_class(hints)
        self._partial = hints.partial
        self._count_request()

    def insert(self, key: Key, parent: Key | None) -> None:
        """Adds `key` below `parent`, which need not be present; touches a key that is present."""
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = _Node(key)
        if not node.present:
            self._enter(node, None if parent == key else parent)
        self._use(node)

    def touch(self, key: Key) -> None:
        """Notes a use of `key`."""
        node = self._nodes.get(key)
        if node is not None and node.present:
            self._use(node)

    def remove(self, key: Key) -> None:
        """Makes a ghost of `key`; its parent may become a leaf."""
        node = self._nodes.get(key)
        if node is None or not node.present:
            return
        node.present = False
        self._present -= 1
        self._remember(node)
        parent = node.parent
        if parent is None:
            return
        parent.children -= 1
        if parent.children:
            return
        if not parent.present:
            self._remember(parent)  # a ghost that its children held up
        elif node is not self._offered:  # else the walk goes on to the parent
            self._add_leaf(parent)

    def prefers(self, key: Key) -> bool:
        """Whether `key`, were it used now, would be worth at least what the next victim is."""
        victim = next(self._walk(), None)
        if victim is None:
            return True
        node = self._nodes.get(key)
        uses = 0 if node is None or node.last_s < 0 else node.uses + 1
        worth = self._table.values[self._request_class + _use_class(uses)][0]
        return worth >= self._worth(victim, self._clock())

    def victims(self) -> Iterator[Key]:
        """Leaves from the least worth; parents of skipped blocks after all that are free to go."""
        return (node.key for node in self._walk())

    def __len__(self) -> int:
        return self._present

    def _enter(self, node: _Node, parent_key: Key | None) -> None:
        node.present = True
        self._present += 1
        if parent_key is None:
            node.parent = None
            return
        parent = node.parent
        if parent is None or parent.key != parent_key or self._nodes.get(parent_key) is not parent:
            parent = self._nodes.get(parent_key)
            if parent is None:
                parent = self._nodes[parent_key] = _Node(parent_key)
            node.parent = parent
        parent.children += 1

    def _use(self, node: _Node) -> None:
        now = self._clock()
        last = node.last_s
        if last < 0:
            uses = 0
        else:
            known_now, known_last, bucket = self._memo
            if now != known_now or last != known_last:
                bucket = age_bucket(now - last)
                self._memo = (now, last, bucket)
            self._table.ended[node.cls][bucket] += 1
            began = self._table.waiting.get(node.period)
            if began is not None:
                began[node.cls] -= 1
            uses = node.uses + 1
        node.uses = uses
        node.last_s = now
        if node.key == self._partial:
            cls = _PARTIAL_CLASS
        else:
            cls = self._request_class + (
                _CLASS_OF_USES[uses] if uses < _MANY_USES else _USE_CLASSES - 1
            )
        node.cls = cls
        node.period = self._table.period
        self._table.waiting[node.period][cls] += 1
        if not node.children:
            self._add_leaf(node)
        self._accesses += 1
        if self._accesses >= _REQUEST_ACCESSES:
            self._count_request()

    def _add_leaf(self, node: _Node) -> None:
        leaves = self._leaves.get(node.cls)
        if leaves is None:
            leaves = self._leaves[node.cls] = _Leaves(node.cls)
        self._order += 1
        leaves.push(node, self._order)
        if len(leaves.oldest) > 2 * self._present + _SWEEP_SLACK:
            leaves.sweep()

    def _count_request(self) -> None:
        self._accesses = 0
        self._requests += 1
        n = self._requests
        if n % _FADE_REQUESTS == 0:
            self._table.fade(_FADE)
        if n % (_EARLY_REFRESH_REQUESTS if n <= _EARLY_REQUESTS else _REFRESH_REQUESTS) == 0:
            self._table.refresh(self._clock())

    def _remember(self, ghost: _Node) -> None:
        self._ghosts.append(ghost)
        ghost.queued += 1
        while len(self._ghosts) > self._ghost_blocks:
            oldest = self._ghosts.popleft()
            oldest.queued -= 1
            # It may be in the queue once more, be present again, or hold up a child.
            if not (oldest.queued or oldest.present or oldest.children):
                self._nodes.pop(oldest.key, None)

    def _worth(self, node: _Node, now_s: float) -> float:
        return self._table.values[node.cls][age_bucket(now_s - node.last_s)]

    def _settle(self) -> None:
        """Ends a walk: the leaves that it found or took out go to the heaps."""
        if self._going is not None:
            self._going.end()
            self._going = None
        if self._offered is not None and self._offered.parent is not None:
            self._loose.append(self._offered.parent)
        self._offered = None
        for node in self._loose:
            if node.present and not node.children:
                self._add_leaf(node)
        self._loose.clear()

    def _walk(self) -> Iterator[_Node]:
        """Every present node once, best victim first; see `victims`.

        Parents that become leaves on the way do not enter the heaps unless the walk ends on them,
        and one that is as old as its child and of its class is the best victim without a search.
        """
        self._settle()  # a walk that was left half-way and is still alive
        self._run += 1
        walk = self._going = _Walk(self._run, self._clock(), self._table.values)
        walk.start(self._leaves)
        skipped: dict[_Node, int] = {}  # parent → present children that the caller has skipped
        try:
            node = walk.next()
            while node is not None:
                self._offered = node
                yield node
                self._offered = None
                parent = node.parent
                if node.present and parent is not None:
                    skipped[parent] = skipped.get(parent, 0) + 1
                if parent is None or not parent.present:
                    node = walk.next()
                    continue
                if not parent.children:
                    self._loose.append(parent)
                    if parent.last_s == node.last_s and parent.cls == node.cls:
                        parent.run = walk.run
                        node = parent
                        continue
                    walk.offer(walk.ready, parent, None)
                elif skipped.get(parent) == parent.children:
                    walk.offer(walk.blocked, parent, None)
                node = walk.next()
        finally:
            if self._going is walk:
                self._settle()


class _Walk:
    """The candidates of one walk over the victims."""

    __slots__ = ("blocked", "now_s", "order", "popped", "ready", "run", "values")

    def __init__(self, run: int, now_s: float, values: list[list[float]]) -> None:
        self.run = run
        self.now_s = now_s
        self.values = values
        self.order = 0
        self.ready: list[_Offer] = []  # leaves
        self.blocked: list[_Offer] = []  # parents of skipped blocks
        self.popped: list[tuple[_Leaves, list[_Entry], _Entry]] = []

    def start(self, classes: dict[int, _Leaves]) -> None:
        """Offers both ends of every class; forgets classes without a leaf."""
        for leaves in list(classes.values()):
            oldest, newest = leaves.top(leaves.oldest), leaves.top(leaves.newest)
            if oldest is None or newest is None:
                del classes[leaves.cls]
                continue
            self.offer(self.ready, oldest, (leaves, leaves.oldest))
            if newest is not oldest:
                self.offer(self.ready, newest, (leaves, leaves.newest))

    def offer(self, queue: list[_Offer], node: _Node, source: _Source | None) -> None:
        """Queues `node` by its worth now."""
        self.order += 1
        worth = self.values[node.cls][age_bucket(self.now_s - node.last_s)]
        heapq.heappush(queue, (worth, node.last_s, self.order, node, source))

    def next(self) -> _Node | None:
        """The best candidate that was not given yet."""
        while self.ready or self.blocked:
            _, _, _, node, source = heapq.heappop(self.ready or self.blocked)
            if source is not None:
                leaves, heap = source
                if heap and heap[0][2] is node:
                    self.popped.append((leaves, heap, heapq.heappop(heap)))
                following = leaves.top(heap)
                if following is not None:
                    self.offer(self.ready, following, source)
            if node.run != self.run and node.present:
                node.run = self.run
                return node
        return None

    def end(self) -> None:
        """Puts back the entries of leaves that were skipped."""
        for leaves, heap, entry in self.popped:
            if leaves.valid(entry):
                heapq.heappush(heap, entry)
        self.popped.clear()


def _request_class(hints: Hints) -> int:
    output = hints.output_tokens
    size = 0 if output is None else 1 + sum(output >= bound for bound in _OUTPUT_BOUNDS)
    return (int(hints.finish) * _OUTPUT_CLASSES + size) * _USE_CLASSES


def _use_class(uses: int) -> int:
    return _CLASS_OF_USES[min(uses, _USE_BOUNDS[-1])]
