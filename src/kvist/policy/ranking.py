"""The leaves of the value policy, ranked by worth without looking at most of them.

Leaves lie in groups of one class and one weight. Within a group the worth depends on the age only,
and rises and falls with it, so the least is taken to be at the oldest or the newest leaf. Both ends
of each group stand in one heap by worth. Their worth changes only when an end does, when it grows
into the next bucket of ages, or when all values do; so the ends of a group are looked at again
only then, and a choice costs O(log groups).

Entries of heaps are lazy. A leaf's entry is stale when the node's `order` has moved on (it was
used, got a child, or went); a group's, when its `version` has.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from kvist.core.keys import Key
from kvist.policy.duel import Turn
from kvist.policy.hazard import BUCKET_ENDS_S, Cohort, age_bucket

_SWEEP_SLACK = 64

Values = list[list[float]]  # uses per block-second, by class and bucket of ages


class Use:
    """What blocks used by one request share, if they were used equally often before."""

    __slots__ = ("cls", "cohort", "last_s", "turn", "uses")

    def __init__(self, cls: int, uses: int, last_s: float, cohort: Cohort, turn: Turn) -> None:
        self.cls = cls
        self.uses = uses  # before this one; counted up to a bound
        self.last_s = last_s
        self.cohort = cohort
        self.turn = turn


class Node:
    """A block that is present, or a ghost; it has no `use` until its first one."""

    __slots__ = (
        "children",
        "end",
        "forgotten",
        "key",
        "order",
        "parent",
        "present",
        "queued",
        "use",
        "weight",
    )

    def __init__(self, key: Key) -> None:
        self.key = key
        self.parent: Node | None = None
        self.children = 0  # present ones
        self.present = False
        self.forgotten = False  # a ghost that is not remembered any more
        self.use: Use | None = None
        self.weight = 0  # the bucket of weights
        self.queued = 0  # times in the queue of ghosts
        self.order = 0  # of its entry; 0 while it is not ranked
        self.end: Leaves | None = None  # the group of which it may be an end


_Entry = tuple[int, int, Node]  # turn of last use, order (both negated among the newest), node
_Offer = tuple[float, int, int, "Leaves", Node]  # worth, turn of last use, version, group, leaf


class Leaves:
    """The leaves of one group from both ends."""

    __slots__ = ("changed", "cls", "newest", "number", "oldest", "version", "weight")

    def __init__(self, number: int, cls: int, weight: float) -> None:
        self.number = number
        self.cls = cls
        self.weight = weight
        self.oldest: list[_Entry] = []
        self.newest: list[_Entry] = []
        self.changed = False
        self.version = 0

    def sweep(self) -> None:
        """Drops the stale entries."""
        for heap in (self.oldest, self.newest):
            heap[:] = [entry for entry in heap if entry[2].order == abs(entry[1])]
            heapq.heapify(heap)


class Ranking:
    """All leaves that may go. Times and values are the caller's; times never go back."""

    def __init__(self, weight_of: Callable[[int], float]) -> None:
        """`weight_of` gives the weight of a bucket of weights."""
        self._weight_of = weight_of
        self._groups: dict[int, Leaves] = {}
        self._changed: list[Leaves] = []
        self._offers: list[_Offer] = []
        self._expiries: list[tuple[float, int, Leaves]] = []
        self._order = 0
        self._version = 0

    def add(self, node: Node, use: Use, present_blocks: int) -> None:
        """Ranks a leaf, anew if it is ranked."""
        if node.end is not None:
            self._touch(node)
        number = (node.weight << 16) | use.cls
        leaves = self._groups.get(number)
        if leaves is None:
            weight = self._weight_of(node.weight)
            leaves = self._groups[number] = Leaves(number, use.cls, weight)
        self._order = node.order = order = self._order + 1
        turn = use.turn.number
        heapq.heappush(leaves.oldest, (turn, order, node))
        heapq.heappush(leaves.newest, (-turn, -order, node))
        if not leaves.changed:
            leaves.changed = True
            self._changed.append(leaves)
        if len(leaves.oldest) > 2 * present_blocks + _SWEEP_SLACK:
            leaves.sweep()
        if len(leaves.newest) > 2 * present_blocks + _SWEEP_SLACK:
            leaves.sweep()

    def drop(self, node: Node) -> None:
        """Takes out a node that is no leaf any more, or must not be found for now."""
        node.order = 0
        if node.end is not None:
            self._touch(node)

    def revalue(self) -> None:
        """Says that the values changed."""
        self._changed = list(self._groups.values())
        for leaves in self._changed:
            leaves.changed = True

    def best(self, now_s: float, values: Values) -> _Offer | None:
        """The leaf of least worth, of equals the one used longest ago."""
        expiries = self._expiries
        while expiries and expiries[0][0] <= now_s:
            _, version, leaves = heapq.heappop(expiries)
            if version == leaves.version and not leaves.changed:
                leaves.changed = True
                self._changed.append(leaves)
        if self._changed:
            changed, self._changed = self._changed, []
            for leaves in changed:
                self._look(leaves, now_s, values)
        offers = self._offers
        while offers:
            offer = offers[0]
            if offer[2] | 1 == offer[3].version:
                return offer
            heapq.heappop(offers)
        return None

    def _touch(self, node: Node) -> None:
        leaves = node.end
        node.end = None
        if leaves is not None and not leaves.changed:
            leaves.changed = True
            self._changed.append(leaves)

    def _look(self, leaves: Leaves, now_s: float, values: Values) -> None:
        """Offers both ends of a group; forgets it if it has none."""
        leaves.changed = False
        self._version += 2
        version = self._version
        leaves.version = version + 1  # odd; the offer of the oldest has the even number below
        oldest, newest = leaves.oldest, leaves.newest
        while oldest and oldest[0][2].order != oldest[0][1]:
            heapq.heappop(oldest)
        if not oldest:
            self._groups.pop(leaves.number, None)
            return
        while newest[0][2].order != -newest[0][1]:
            heapq.heappop(newest)
        turn, _, node = oldest[0]
        worths, weight = values[leaves.cls], leaves.weight
        last_s = node.use.last_s if node.use is not None else now_s
        bucket = age_bucket(now_s - last_s)
        until_s = last_s + BUCKET_ENDS_S[bucket]
        heapq.heappush(self._offers, (worths[bucket] * weight, turn, version, leaves, node))
        node.end = leaves
        other = newest[0][2]
        if other is not node:
            last_s = other.use.last_s if other.use is not None else now_s
            bucket = age_bucket(now_s - last_s)
            until_s = min(until_s, last_s + BUCKET_ENDS_S[bucket])
            offer = (worths[bucket] * weight, -newest[0][0], version + 1, leaves, other)
            heapq.heappush(self._offers, offer)
            other.end = leaves
        heapq.heappush(self._expiries, (until_s, leaves.version, leaves))
        if len(self._offers) > 4 * len(self._groups) + _SWEEP_SLACK:
            self._offers = [offer for offer in self._offers if offer[2] | 1 == offer[3].version]
            heapq.heapify(self._offers)
            alive = [entry for entry in self._expiries if entry[1] == entry[2].version]
            self._expiries = alive
            heapq.heapify(self._expiries)
