"""Which blocks a node offers to whom, so that each is held in enough failure domains.

A node looks at its own blocks only: those that came lately first, then all of them round by round,
a bounded number a tick. A block is short if its holders, drained and silent ones aside, are in
fewer domains than there should be replicas. Then the one responsible holder (the same in
everybody's eyes) offers it to the next places of its group; who takes an offer fetches the block
and keeps it. Copies that readers fetched and kept count, so hot blocks are not copied once more.

Whom a block was offered to counts as a holder for `fetch_s`. If it then has none, or evicts it, it
is left alone for `again_s`: a full node is not fed what it has just dropped. That somebody lost a
copy shows in the directory, and so in the next round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from kvist.cluster.directory import Directory
from kvist.cluster.membership import Membership
from kvist.cluster.placement import Placement, first_of
from kvist.cluster.record import NodeState
from kvist.core.events import Cleared, KvEvent, Removed, Stored
from kvist.core.keys import Key
from kvist.core.outcome import Tier

_BIT_OF = {Tier.DRAM: 1, Tier.SSD: 2}  # what others can fetch


@dataclass(frozen=True, slots=True)
class Offer:
    """`node` may fetch these blocks of keyspace `scope` from `source` and should keep them.

    Parents come first; `parents[i]` is that of block i, `None` for a first block.
    """

    node: str
    source: str
    keys: tuple[Key, ...]
    parents: tuple[Key | None, ...]
    scope: bytes = b""


@dataclass(frozen=True, slots=True)
class Pace:
    """Bounds of the work: blocks that are looked at and offered in one tick, and waits."""

    looks: int = 2048
    offers: int = 64
    most_fresh: int = 1 << 16
    most_offered: int = 1 << 16
    fetch_s: float = 5.0
    again_s: float = 60.0


@dataclass(slots=True)
class _Local:
    """A block of this node: its group, its place in the chain (at most the cut) and its tiers."""

    group: Key
    depth: int
    tiers: int
    parent: Key | None
    scope: bytes


@dataclass(frozen=True, slots=True)
class Scene:
    """What a decision needs to know of the cluster."""

    directory: Directory
    membership: Membership
    placement: Placement


class Replicator:
    """Watches over the copies of one node's blocks. Not thread-safe: the caller's lock."""

    def __init__(self, node: str, domain: str, *, group_blocks: int, pace: Pace) -> None:
        self._node = node
        self._domain = domain
        self._group_blocks = group_blocks
        self._pace = pace
        self._local: dict[Key, _Local] = {}
        self._fresh: deque[Key] = deque(maxlen=pace.most_fresh)
        self._round: Iterator[Key] = iter(())
        self._offered: dict[tuple[Key, str], float] = {}  # oldest first
        self._short = self._alone = 0
        self._whole = False  # whether the round has begun at the first block
        self.short: int | None = None
        self.alone: int | None = None
        self.offered_blocks = 0

    def __len__(self) -> int:
        return len(self._local)

    def take(self, event: KvEvent, scope: bytes = b"") -> None:
        """An event of this node's own store of keyspace `scope`; a `Cleared` clears all."""
        if isinstance(event, Cleared):
            self._local.clear()
        elif event.tier not in _BIT_OF:
            return
        elif isinstance(event, Removed):
            self._removed(event)
        else:
            self._stored(event, scope)

    def begin_round(self) -> None:
        """Looks at everything anew; `short` and `alone` are unknown until that is done.

        `short`: blocks with fewer copies than there could be. `alone`: blocks that no node holds
        that stays.
        """
        self._round = iter(list(self._local))
        self._short = self._alone = 0
        self.short = self.alone = None
        self._whole = True

    def tick(self, now_s: float, scene: Scene, *, draining: bool) -> list[Offer]:
        """Looks at a bounded number of blocks and says what to offer to whom."""
        self._forget(now_s)
        offers: dict[tuple[str, bytes], list[Key]] = {}
        left = self._pace.offers
        for key in self._next_keys():
            local = self._local.get(key)
            if local is None:
                continue
            targets = self._targets(key, local, now_s, scene, draining=draining)
            for target in targets[:left]:
                offers.setdefault((target, local.scope), []).append(key)
                self._offered[key, target] = now_s
            left -= len(targets)
            if left <= 0:
                break
        found = [
            Offer(node, self._node, tuple(keys), tuple(self._local[k].parent for k in keys), scope)
            for (node, scope), keys in offers.items()
        ]
        self.offered_blocks += sum(len(offer.keys) for offer in found)
        return found

    def _next_keys(self) -> Iterator[Key]:
        for _ in range(self._pace.looks):
            if self._fresh:
                yield self._fresh.popleft()
                continue
            key = next(self._round, None)
            if key is None:
                if self._whole:
                    self.short, self.alone = self._short, self._alone
                self._round = iter(list(self._local))
                self._short = self._alone = 0
                self._whole = True
                return
            yield key

    def _targets(
        self, key: Key, local: _Local, now_s: float, scene: Scene, *, draining: bool
    ) -> list[str]:
        """Whom to offer a block to now."""
        replicas = scene.placement.replicas
        leaving = [self._node] if draining else []
        staying = [] if draining else [self._node]
        domains = set[str]() if draining else {self._domain}
        holders = scene.directory.fetchable(key)
        for node in holders:
            if len(domains) >= replicas:
                return []
            record = scene.membership.heard(node)
            if record is None or node == self._node:
                continue
            if record.state is NodeState.DRAINING:
                leaving.append(node)
            else:
                staying.append(node)
                domains.add(record.failure_domain)
        if len(domains) >= replicas:
            return []
        self._alone += draining and not domains
        barred = self._barred(key, now_s, domains, scene)
        without = frozenset((self._node, *holders, *barred))
        targets = scene.placement.further(local.group, domains, without=without)
        self._short += bool(targets)
        responsible = first_of(key, staying or leaving)  # groups may differ, see `_placed`
        return targets if responsible == self._node else []

    def _barred(self, key: Key, now_s: float, domains: set[str], scene: Scene) -> list[str]:
        """Nodes that were offered the block; domains of those that may be fetching it are added."""
        barred = []
        for record in scene.membership.takers():
            offered_s = self._offered.get((key, record.node))
            if offered_s is None:
                continue
            barred.append(record.node)
            if now_s - offered_s < self._pace.fetch_s:
                domains.add(record.failure_domain)
        return barred

    def _forget(self, now_s: float) -> None:
        """Offers that are long ago, or too many."""
        while self._offered:
            first = next(iter(self._offered))
            young = now_s - self._offered[first] < self._pace.again_s
            if young and len(self._offered) <= self._pace.most_offered:
                break
            del self._offered[first]

    def _stored(self, event: Stored, scope: bytes) -> None:
        parent, bit = event.parent, _BIT_OF[event.tier]
        for key in event.keys:
            local = self._local.get(key)
            if local is None:
                self._local[key] = self._placed(key, parent, bit, scope)
                self._fresh.append(key)
            else:
                local.tiers |= bit
            parent = key

    def _removed(self, event: Removed) -> None:
        bit = _BIT_OF[event.tier]
        for key in event.keys:
            local = self._local.get(key)
            if local is not None:
                local.tiers &= ~bit
                if not local.tiers:
                    del self._local[key]

    def _placed(self, key: Key, parent: Key | None, tiers: int, scope: bytes) -> _Local:
        """The group follows from the parent's; a block whose parent is not here begins its own."""
        above = self._local.get(parent) if parent is not None else None
        if above is None or parent is None:
            depth = 0 if parent is None else self._group_blocks
            return _Local(key, depth, tiers, parent, scope)
        depth = min(above.depth + 1, self._group_blocks)
        crosses = above.depth + 1 == self._group_blocks
        return _Local(parent if crosses else above.group, depth, tiers, parent, scope)
