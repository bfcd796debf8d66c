"""Which blocks a node offers to whom, so that each is held in enough failure domains.

A node looks at its own blocks only: those that came lately first, then all of them round by round,
a bounded number a tick. A block is short if its holders, drained and silent ones aside, are in
fewer domains than there should be replicas. Then the one responsible holder (the same in
everybody's eyes) offers it to the next places of its group; who takes an offer fetches the block
and keeps it. Copies that readers fetched and kept count, so hot blocks are not copied once more.

Whom a block was offered to counts as a holder for `fetch_s`. If it then has none, or evicts it, it
is left alone for `again_s`: a full node is not fed what it has just dropped. That somebody lost a
copy shows in the directory, and so in the next round.

Where nobody has room, a full node takes a hot block in exchange for cold ones:

    own blocks, coldest first   ░░░░▒▒▒▒▒▒▒▒▒▒▒▒▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓
                                yields          is offered to full nodes

* It yields its coldest eighth as far as others hold that as well, and nothing if that is less than
  half of it: the last copy of a block is not given up for the second one of another.
* It is offered what is in the hotter half of whoever offers, and everything by a node that drains.
* A block that got a copy so, or came as one, is not offered to full nodes again until it is used
  where it is. Else two nodes whose orders differ would push each other's blocks out for ever; so
  exchanges come to an end.
* It takes a bounded number of bytes in a time (`Allowance`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvist.cluster.directory import Directory
from kvist.cluster.membership import Membership
from kvist.cluster.placement import Placement, first_of
from kvist.cluster.record import NodeState
from kvist.core.events import Cleared, KvEvent, Removed, Stored
from kvist.core.keys import Key
from kvist.core.outcome import Tier

COLD_DIVISOR = 8  # the part of its blocks that a full node may yield
_LEAST_COVERED = 0.5
_HOT = 0.5  # place among the own blocks, from the coldest (0) to the hottest (1)
_BIT_OF = {Tier.DRAM: 1, Tier.SSD: 2}  # what others can fetch
_OPEN = 1 << 30  # more copies than a block ever has


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
    """Bounds of the work: blocks that are looked at and offered in one tick, and waits.

    A full node takes the `exchange_divisor`-th part of its capacity in `exchange_s`.
    """

    looks: int = 2048
    offers: int = 64
    most_fresh: int = 1 << 16
    most_offered: int = 1 << 16
    fetch_s: float = 5.0
    again_s: float = 60.0
    exchange_divisor: int = 64
    exchange_s: float = 60.0


@dataclass(slots=True)
class _Local:
    """A block of this node: its group, its place in the chain (at most the cut) and its tiers.

    `claim` on full nodes: `_OPEN`; the number of its copies when it was offered to one; or 0, none.
    """

    group: Key
    depth: int
    tiers: int
    parent: Key | None
    scope: bytes
    claim: int


@dataclass(slots=True)
class _Seen:
    """Who holds a block: `holders`, as far as they were looked at by whether they stay."""

    holders: list[str]
    staying: list[str]
    leaving: list[str]
    domains: set[str]  # of those that stay


@dataclass(frozen=True, slots=True)
class Scene:
    """What a decision needs to know of the cluster."""

    directory: Directory
    membership: Membership
    placement: Placement


class Allowance:
    """What a full node may take: a part of its capacity in a time, and no more at once."""

    def __init__(self, pace: Pace, now_s: float) -> None:
        self._pace = pace
        self._bytes, self._now_s = 0.0, now_s - pace.exchange_s

    def take(self, blocks: int, block_bytes: int, capacity_bytes: int, now_s: float) -> int:
        """How many of `blocks` may come; at least one of them does, now and then."""
        most = max(capacity_bytes / self._pace.exchange_divisor, block_bytes)
        earned = most * (now_s - self._now_s) / self._pace.exchange_s
        self._bytes, self._now_s = min(most, self._bytes + earned), now_s
        taken = min(blocks, int(self._bytes // block_bytes))
        self._bytes -= taken * block_bytes
        return taken


class Replicator:
    """Watches over the copies of one node's blocks. Not thread-safe: the caller's lock."""

    def __init__(self, node: str, domain: str, *, group_blocks: int, pace: Pace) -> None:
        self._node = node
        self._domain = domain
        self._group_blocks = group_blocks
        self._pace = pace
        self._local: dict[Key, _Local] = {}
        self._fresh: deque[Key] = deque(maxlen=pace.most_fresh)
        self._round: Iterator[tuple[Key, float]] = iter(())
        self._cold = self._covered = 0
        self._offered: dict[tuple[Key, str], float] = {}  # oldest first
        self._expected: dict[Key, None] = {}  # offered to this node and taken, oldest first
        self._short = self._alone = 0
        self._whole = False  # whether the round has begun at the first block
        self.yielding = 0.0
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

    def expect(self, keys: Sequence[Key]) -> None:
        """Blocks that another node offered are about to come: nobody has used them here."""
        self._expected.update((key, None) for key in keys if key not in self._local)
        while len(self._expected) > self._pace.most_offered:
            del self._expected[next(iter(self._expected))]

    def begin_round(self) -> None:
        """Looks at everything anew; `short` and `alone` are unknown until that is done.

        `short`: blocks with fewer copies than there could be. `alone`: blocks that no node holds
        that stays. `yielding`: the part of the coldest blocks that others hold as well, if it is
        large enough to be given up.
        """
        self._begin_round()
        self.short = self.alone = None

    def tick(self, now_s: float, scene: Scene, *, draining: bool) -> list[Offer]:
        """Looks at a bounded number of blocks and says what to offer to whom."""
        self._forget(now_s)
        offers: dict[tuple[str, bytes], list[Key]] = {}
        left = self._pace.offers
        full = frozenset(r.node for r in scene.membership.takers() if r.full)
        for key, place in self._next_keys():
            local = self._local.get(key)
            if local is None:
                continue
            seen = self._seen(key, scene, draining=draining)
            self._count(seen, place, draining=draining)
            copies = len(seen.domains)
            if copies > local.claim:
                local.claim = 0
            hot = draining or (place >= _HOT and local.claim > 0)
            targets = self._targets(key, local, seen, now_s, scene, full, hot=hot)
            for target in targets[:left]:
                offers.setdefault((target, local.scope), []).append(key)
                self._offered[key, target] = now_s
                if target in full and local.claim:
                    local.claim = copies
            left -= len(targets)
            if left <= 0:
                break
        found = [
            Offer(node, self._node, tuple(keys), tuple(self._local[k].parent for k in keys), scope)
            for (node, scope), keys in offers.items()
        ]
        self.offered_blocks += sum(len(offer.keys) for offer in found)
        return found

    def _begin_round(self) -> None:
        size = len(self._local)
        self._round = ((key, i / size) for i, key in enumerate(list(self._local)))
        self._short = self._alone = self._cold = self._covered = 0
        self._whole = True

    def _next_keys(self) -> Iterator[tuple[Key, float]]:
        """Keys to be looked at, and how hot each is."""
        for _ in range(self._pace.looks):
            if self._fresh:
                key = self._fresh.popleft()
                local = self._local.get(key)
                # what came to DRAM was just used; what is on SSD only was found there at the start
                used = local is not None and local.tiers & _BIT_OF[Tier.DRAM]
                yield key, 1.0 if used else 1 / COLD_DIVISOR
                continue
            found = next(self._round, None)
            if found is None:
                if self._whole:
                    self.short, self.alone = self._short, self._alone
                    covered = self._covered / self._cold if self._cold else 0.0
                    self.yielding = covered if covered >= _LEAST_COVERED else 0.0
                self._begin_round()
                return
            yield found

    def _seen(self, key: Key, scene: Scene, *, draining: bool) -> _Seen:
        """Who holds a block, and in which domains."""
        replicas = scene.placement.replicas
        seen = _Seen(
            scene.directory.fetchable(key),
            staying=[] if draining else [self._node],
            leaving=[self._node] if draining else [],
            domains=set() if draining else {self._domain},
        )
        for node in seen.holders:
            if len(seen.domains) >= replicas:
                break
            record = scene.membership.heard(node)
            if record is None or node == self._node:
                continue
            if record.state is NodeState.DRAINING:
                seen.leaving.append(node)
            else:
                seen.staying.append(node)
                seen.domains.add(record.failure_domain)
        return seen

    def _count(self, seen: _Seen, place: float, *, draining: bool) -> None:
        self._alone += draining and not seen.domains
        if place < 1 / COLD_DIVISOR:
            self._cold += 1
            self._covered += bool(seen.domains - {self._domain})

    def _targets(
        self,
        key: Key,
        local: _Local,
        seen: _Seen,
        now_s: float,
        scene: Scene,
        full: frozenset[str],
        *,
        hot: bool,
    ) -> list[str]:
        """Whom to offer a block to now: who has room, and of the full ones, if it is `hot`."""
        domains, placement = seen.domains, scene.placement
        if len(domains) >= placement.replicas:
            return []
        without = {self._node, *seen.holders, *self._barred(key, now_s, domains, scene)}
        targets = placement.further(local.group, domains, without=frozenset(without | full))
        if hot and full:
            taken = domains | {self._domain_of(node, scene) for node in targets}
            targets += placement.further(local.group, taken, without=frozenset(without))
        self._short += bool(targets)
        responsible = first_of(key, seen.staying or seen.leaving)  # groups may differ: `_placed`
        return targets if responsible == self._node else []

    def _domain_of(self, node: str, scene: Scene) -> str:
        record = scene.membership.get(node)
        return node if record is None else record.failure_domain

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
                if bit & ~local.tiers & _BIT_OF[Tier.DRAM]:  # it was read: the hottest again
                    self._local[key] = self._local.pop(key)
                    local.claim = local.claim or _OPEN  # if it is offered, that may be the reader
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
        claim = _OPEN
        if key in self._expected:
            del self._expected[key]
            claim = 0
        above = self._local.get(parent) if parent is not None else None
        if above is None or parent is None:
            depth = 0 if parent is None else self._group_blocks
            return _Local(key, depth, tiers, parent, scope, claim)
        depth = min(above.depth + 1, self._group_blocks)
        crosses = above.depth + 1 == self._group_blocks
        return _Local(parent if crosses else above.group, depth, tiers, parent, scope, claim)
