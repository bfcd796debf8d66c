"""Kvist's own order: evict the leaf that is expected to bring the fewest uses for its time held.

Every block, present or evicted not long ago (a ghost), has the time of its last use and a class:
how often it was used, and how the request that used it last went on (finish reason, length of the
output); a block that is not full has a class of its own. `HazardTable` learns for each class at
which ages blocks are used again, and `Ranking` finds the leaf of least worth. Only leaves (blocks
without a present child) go, so prefixes stay whole. A new block may be its own victim; that is the
insert filter. While `Duel` finds that leaf-first LRU would have had more hits, all worths are equal
and the leaf used longest ago goes, which is leaf-first LRU.

Blocks used by one request and equally often before share one `Use`; what a run of them adds to the
tables is added once, when the run ends (`_flush`).
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator

from kvist.core.hints import Finish, Hints
from kvist.core.keys import Key
from kvist.policy.duel import Duel
from kvist.policy.hazard import AGES, HazardTable, age_bucket
from kvist.policy.ranking import Node, Ranking, Use, Values
from kvist.policy.weights import Weigh, weight_bucket, weight_of

_USE_BOUNDS = (1, 2, 3, 4, 5, 7, 10)  # upper bounds of the classes by number of earlier uses
_OUTPUT_BOUNDS = (128,)
_USE_CLASSES = len(_USE_BOUNDS) + 1
_OUTPUT_CLASSES = len(_OUTPUT_BOUNDS) + 2  # and unknown
_PARTIAL_CLASS = _USE_CLASSES * _OUTPUT_CLASSES * len(Finish)  # the last one
_CLASSES = _PARTIAL_CLASS + 1
FRESH_CLASSES = range(0, _PARTIAL_CLASS, _USE_CLASSES)
_MANY_USES = _USE_BOUNDS[-1]
_CLASS_OF_USES = [bisect_right(_USE_BOUNDS, n) for n in range(_MANY_USES + 1)]
_PARTIAL_USES = _MANY_USES + 1  # where the use of the partial block stands in a request's list

_EARLY_REQUESTS = 400
_EARLY_REFRESH_REQUESTS = 25
_REFRESH_REQUESTS = 50
_REFRESH_ACCESSES = 500
_FEWEST_REQUESTS = 40  # from which anything can be learned
_FEWEST_ACCESSES = 2000
_FADE_REQUESTS = 2000
_FADE = 0.9
_REQUEST_ACCESSES = 256  # counts as a request when nobody says where requests begin
_SAME_MOMENT_S = 0.01  # uses that nobody says begin a request
GHOST_BLOCKS = 1 << 18
_EQUAL: Values = [[0.0] * AGES] * _CLASSES

_Offer = tuple[float, int, int, Node]  # worth, turn of last use, tie-breaker, node


class Value:
    """Evicts the leaf of least expected uses per block-second."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        ghost_blocks: int = GHOST_BLOCKS,
        weigh: Weigh | None = None,
    ) -> None:
        """An empty order.

        Args:
            clock: gives seconds that never go back.
            ghost_blocks: bounds the memory of ghosts.
            weigh: what a use of a block saves, such as its recompute time per byte; asked once a
                key; None for the same of all.
        """
        self._clock = clock
        self._ghost_blocks = ghost_blocks
        self._weigh = weigh
        self._nodes: dict[Key, Node] = {}  # present and ghosts
        self._ghosts: deque[Node] = deque()
        self._below: Node | None = None  # parent of the last new block: often the next to come
        self._present = 0
        self._duel = Duel()
        self._ranking = Ranking(weight_of)
        self._table = HazardTable(_CLASSES, clock(), FRESH_CLASSES)
        self._values = _EQUAL
        self._offered: Node | None = None  # by the walk, which has not gone on since
        self._loose: list[Node] = []  # found or skipped by a walk, and not ranked
        self._walks = 0
        self._request_class = _request_class(Hints())
        self._partial: Key | None = None
        self._requests = 0
        self._accesses = 0
        self._refreshed = 0  # the request of the last refresh
        self._unrefreshed = 0  # accesses since then
        self._learned_from = 0  # accesses until then
        self._evicted = False  # in this turn
        self._hits = 0  # in this turn
        self._now_s = -math.inf
        self._turn = self._duel.begin(0, full=False)
        self._uses: list[Use | None] = [None] * (_PARTIAL_USES + 1)  # of this request
        self._run_from: Use | None = None
        self._run_to: Use | None = None  # None: no run goes on
        self._run_blocks = 0

    def begin(self, hints: Hints) -> None:
        """A request with these `hints` begins."""
        self._request_class = _request_class(hints)
        self._partial = hints.partial
        self._begin_turn(self._clock())
        self._count_request()

    def insert(self, key: Key, parent: Key | None) -> None:
        """Adds `key` below `parent`, which need not be present; touches a key that is present."""
        node = self._below
        if node is None or node.key != key:
            node = self._nodes.get(key) or self._new_node(key)
        if node.present:
            self._hits += 1
        else:
            self._enter(node, None if parent == key else parent)
        self._use(node)

    def touch(self, key: Key) -> None:
        """Notes a use of `key`."""
        node = self._nodes.get(key)
        if node is not None and node.present:
            self._hits += 1
            self._use(node)

    def remove(self, key: Key) -> None:
        """Makes a ghost of `key`; its parent may become a leaf."""
        node = self._offered
        if node is None or node.key != key:
            node = self._nodes.get(key)
        if node is None or not node.present:
            return
        node.present = False
        self._present -= 1
        if node.order:
            self._ranking.drop(node)
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
            self._rank(parent)

    def prefers(self, key: Key) -> bool:
        """Whether `key`, were it used now, would be worth at least what the next victim is."""
        self._settle()
        now_s = self._clock()
        victim = self._ranking.best(now_s, self._values)
        if victim is None:
            return True
        node = self._nodes.get(key)
        uses = 0 if node is None or node.use is None else min(node.use.uses + 1, _MANY_USES)
        worth = self._values[self._request_class + _CLASS_OF_USES[uses]][0]
        if self._weigh is not None:
            worth *= weight_of(weight_bucket(self._weigh(key)))
        return worth >= victim[0]

    def __len__(self) -> int:
        return self._present

    def _enter(self, node: Node, parent_key: Key | None) -> None:
        node.present = True
        self._present += 1
        if parent_key is None:
            node.parent = self._below = None
            return
        parent = node.parent
        if parent is None or parent.forgotten or parent.key != parent_key:
            parent = node.parent = self._nodes.get(parent_key) or self._new_node(parent_key)
        self._below = parent
        parent.children += 1
        if parent.order:
            self._ranking.drop(parent)

    def _new_node(self, key: Key) -> Node:
        node = self._nodes[key] = Node(key)
        if self._weigh is not None:
            node.weight = weight_bucket(self._weigh(key))
        return node

    def _use(self, node: Node) -> None:
        now_s = self._clock()
        if now_s - self._now_s > _SAME_MOMENT_S:
            self._begin_turn(now_s)
        old = node.use
        to = self._run_to
        if to is not None and old is self._run_from:
            self._run_blocks += 1
        else:
            self._flush()
            uses = 0 if old is None else min(old.uses + 1, _MANY_USES)
            self._run_from, self._run_to, self._run_blocks = old, self._use_of(uses), 1
            to = self._run_to
        node.use = to
        if not node.children:
            if node.key == self._partial and self._table.values[self._request_class][0] >= 0:
                self._use_partial(node, old)
            self._rank(node)
        self._accesses += 1
        if self._accesses >= _REQUEST_ACCESSES:
            self._count_request()

    def _use_of(self, uses: int) -> Use:
        """The use by this request of blocks that were used so often before."""
        use = self._uses[uses]
        if use is None:
            cls = self._request_class + _CLASS_OF_USES[uses]
            use = Use(cls, uses, self._now_s, self._table.cohort, self._turn)
            self._uses[uses] = use
        return use

    def _use_partial(self, node: Node, old: Use | None) -> None:
        """Gives `node`, which a run has just counted, the class of blocks that are not full.

        Not so if the blocks before it are not worth writing: it would keep them from going first.
        """
        self._flush()
        use = self._uses[_PARTIAL_USES]
        if use is None:
            uses = 0 if old is None else min(old.uses + 1, _MANY_USES)
            cohort = self._table.cohort
            use = Use(_PARTIAL_CLASS, uses, self._now_s, cohort, self._turn)
            self._uses[_PARTIAL_USES] = use
        if node.use is not None:
            node.use.cohort.root().waiting[node.use.cls] -= 1
        use.cohort.root().waiting[_PARTIAL_CLASS] += 1
        node.use = use

    def _flush(self) -> None:
        """Ends the run: adds its blocks to the tables."""
        old, new, blocks = self._run_from, self._run_to, self._run_blocks
        if new is None:
            return
        self._run_to = None
        new.cohort.root().waiting[new.cls] += blocks
        if old is None:
            self._duel.move(None, new.turn, blocks)
        else:
            self._duel.move(old.turn, new.turn, blocks)
            self._table.ended_wait(old.cohort, old.cls, self._now_s - old.last_s, blocks)

    def _begin_turn(self, now_s: float) -> None:
        self._flush()
        if self._now_s == -math.inf:
            # Only now: a clock may stand at 0 before the first request and at the epoch after.
            self._table = HazardTable(_CLASSES, now_s, FRESH_CLASSES)
        self._now_s = now_s
        self._duel.hit(self._hits)
        self._hits = 0
        self._turn = self._duel.begin(self._present, full=self._evicted)
        self._evicted = False
        self._uses = [None] * (_PARTIAL_USES + 1)
        learned = self._learned_from >= _FEWEST_ACCESSES and self._requests >= _FEWEST_REQUESTS
        trusted = learned and not self._duel.behind
        values = self._table.values if trusted else _EQUAL
        if values is not self._values:
            self._values = values
            self._ranking.revalue()

    def _count_request(self) -> None:
        self._unrefreshed += self._accesses
        self._accesses = 0
        self._requests += 1
        n = self._requests
        if n % _FADE_REQUESTS == 0:
            self._table.fade(_FADE)
        early = n <= _EARLY_REQUESTS
        if n - self._refreshed >= (_EARLY_REFRESH_REQUESTS if early else _REFRESH_REQUESTS) and (
            early or self._unrefreshed >= _REFRESH_ACCESSES
        ):
            self._learned_from += self._unrefreshed
            self._refreshed, self._unrefreshed = n, 0
            self._flush()
            self._table.refresh(self._clock())
            self._ranking.revalue()

    def _rank(self, node: Node) -> None:
        if node.use is not None:
            self._ranking.add(node, node.use, self._present)

    def _remember(self, ghost: Node) -> None:
        self._ghosts.append(ghost)
        ghost.queued += 1
        while len(self._ghosts) > self._ghost_blocks:
            oldest = self._ghosts.popleft()
            oldest.queued -= 1
            # It may be in the queue once more, be present again, or hold up a child.
            if not (oldest.queued or oldest.present or oldest.children):
                self._nodes.pop(oldest.key, None)
                oldest.forgotten = True
                if oldest is self._below:
                    self._below = None

    def _settle(self) -> None:
        """Ends a walk: the leaves that it found or skipped are ranked."""
        self._walks += 1
        offered, self._offered = self._offered, None
        if offered is not None:
            self._loose.append(offered)
            if offered.parent is not None:
                self._loose.append(offered.parent)
        for node in self._loose:
            if node.present and not node.children and not node.order:
                self._rank(node)
        self._loose.clear()

    def victims(self) -> Iterator[Key]:
        """Leaves from the least worth; parents of skipped blocks after all that are free to go.

        A parent that becomes a leaf on the way is ranked only if the walk ends on it, and one with
        the same use and weight as its child is the best victim without a search.
        """
        self._settle()
        number, ranking, loose = self._walks, self._ranking, self._loose
        walk = _Walk(ranking, self._values, self._clock())
        skipped: dict[Node, int] = {}  # parent → present children that the caller has skipped
        self._evicted = True
        try:
            node = walk.next()
            while node is not None:
                self._offered = node
                yield node.key
                self._offered = None
                parent = node.parent
                if node.present:
                    ranking.drop(node)
                    loose.append(node)
                    if parent is not None:
                        skipped[parent] = skipped.get(parent, 0) + 1
                if parent is None or not parent.present:
                    node = walk.next()
                    continue
                if not parent.children:
                    if _alike(parent, node):
                        node = parent
                        continue
                    loose.append(parent)
                    walk.offer(walk.ready, parent)
                elif skipped and skipped.get(parent) == parent.children:
                    walk.offer(walk.blocked, parent)
                node = walk.next()
        finally:
            if self._walks == number:
                self._settle()


class _Walk:
    """The candidates of one walk over the victims that are not ranked."""

    __slots__ = ("_now_s", "_order", "_ranking", "_values", "blocked", "ready")

    def __init__(self, ranking: Ranking, values: Values, now_s: float) -> None:
        self._ranking = ranking
        self._values = values
        self._now_s = now_s
        self._order = 0
        self.ready: list[_Offer] = []  # leaves
        self.blocked: list[_Offer] = []  # parents of skipped blocks

    def offer(self, queue: list[_Offer], node: Node) -> None:
        """Queues `node` by its worth now."""
        if node.use is None:
            return
        self._order += 1
        age_s = self._now_s - node.use.last_s
        worth = self._values[node.use.cls][age_bucket(age_s)] * weight_of(node.weight)
        heapq.heappush(queue, (worth, node.use.turn.number, self._order, node))

    def next(self) -> Node | None:
        """The best candidate that was not given yet."""
        best = self._ranking.best(self._now_s, self._values)
        if best is not None:
            if not self.ready or best[:2] <= self.ready[0][:2]:
                return best[4]
        elif not self.ready:
            return heapq.heappop(self.blocked)[3] if self.blocked else None
        return heapq.heappop(self.ready)[3]


def _alike(parent: Node, child: Node) -> bool:
    """Whether both are of one request, class and weight, and so of one worth."""
    one, other = parent.use, child.use
    if one is None or other is None or parent.weight != child.weight:
        return False
    return one is other or (one.turn is other.turn and one.cls == other.cls)


def _request_class(hints: Hints) -> int:
    output = hints.output_tokens
    size = 0 if output is None else 1 + bisect_right(_OUTPUT_BOUNDS, output)
    return (int(hints.finish) * _OUTPUT_CLASSES + size) * _USE_CLASSES
