"""One node's part in the cluster: it publishes, follows, places and gives away. No I/O.

    own store's events ──► record ──┐
    others' batches    ──► hear   ──┤            ┌──► batches to publish
    discovery's list   ──► discovered├──  tick  ─┼──► asks to send
    others' asks       ──► answer   │            └──► offers to send
    time               ─────────────┘

A member begins `JOINING`, is `ACTIVE` when it has caught up with those that it found (or after
`join_s`), and takes nothing new once it is `DRAINING`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from kvist.cluster.directory import Limits, Position
from kvist.cluster.follower import Ask
from kvist.cluster.log import EventLog, Sealed
from kvist.cluster.membership import Timings
from kvist.cluster.placement import own_weight
from kvist.cluster.record import Holds, NodeRecord, NodeState, TierSpace
from kvist.cluster.replication import (
    COLD_DIVISOR,
    Allowance,
    Offer,
    Pace,
    Replicator,
    Scene,
)
from kvist.cluster.view import DEFAULT_REPLICAS, ClusterView
from kvist.cluster.wire import Batch
from kvist.core.events import KvEvent
from kvist.core.keys import Key

_MOST_READY = 1024


@dataclass(frozen=True, slots=True)
class Settings:
    """How a member behaves; the same on every node but for `most_batches`."""

    block_tokens: int = 128
    replicas: int = DEFAULT_REPLICAS
    slow_start_s: float = 60.0
    join_s: float = 10.0
    most_batches: int = 10_000
    timings: Timings = field(default_factory=Timings)
    limits: Limits = field(default_factory=Limits)
    pace: Pace = field(default_factory=Pace)


@dataclass(frozen=True, slots=True)
class Space:
    """What the node's tiers hold now.

    `free_bytes`: what is free for others' blocks; `keyspaces`: whose blocks these are, as in
    `record.Holds`; `takes`: whether the node wants any of others.
    """

    free_bytes: int
    tiers: tuple[TierSpace, ...] = ()
    keyspaces: tuple[str, ...] = ()
    takes: bool = True


@dataclass(frozen=True, slots=True)
class Outbox:
    """What is to be sent after a tick."""

    batches: Sequence[Sealed] = ()
    asks: Sequence[Ask] = ()
    offers: Sequence[Offer] = ()


class Member:
    """Decides for one node. Not thread-safe: the caller's lock."""

    def __init__(
        self, record: NodeRecord, settings: Settings, now_s: float, *, view: ClusterView
    ) -> None:
        """A node that has just started.

        Args:
            record: who it is; state, version, weight and space are kept by the member.
            view: of this node, knowing nobody yet.
        """
        self._settings = settings
        self._record = msgspec.structs.replace(record, state=NodeState.JOINING, version=0)
        self._started_s = now_s
        self._allowance = Allowance(settings.pace, now_s)
        self._beat_s = now_s  # when the next record is due
        self._wall_s = 0.0
        self._ready: deque[Sealed] = deque(maxlen=_MOST_READY)  # readers ask for what falls out
        self.view = view
        self.replicator = Replicator(
            record.node,
            record.failure_domain,
            group_blocks=record.group_blocks,
            pace=settings.pace,
        )
        self.log = EventLog(
            block_tokens=settings.block_tokens,
            most_batches=settings.most_batches,
            tell=self.replicator.take,
        )

    @property
    def own(self) -> NodeRecord:
        """What this node last said of itself."""
        return self._record

    @property
    def position(self) -> Position:
        """Goes with every answer that a block is not here."""
        return Position(self._record.incarnation, self.log.number)

    @property
    def drained(self) -> bool:
        """Whether every block is held by a node that stays, as far as this one has heard."""
        if self._record.state is not NodeState.DRAINING:
            return False
        return self.replicator.alone == 0

    def record(self, event: KvEvent, scope: bytes = b"") -> None:
        """An event of the own store of keyspace `scope`."""
        self.log.record(event, scope)
        if self.log.overdue:
            self._ready.append(self.log.seal(self._wall_s))

    def hear(self, batch: Batch, now_s: float) -> None:
        """Another node's message."""
        self.view.hear(batch, now_s)

    def discovered(self, records: Iterable[NodeRecord], now_s: float) -> None:
        """Everything that discovery lists."""
        self.view.discovered(records, now_s)

    def answer(self, ask: Ask, wall_s: float) -> list[Sealed]:
        """Batches for whoever asks; nothing if another start of this node was meant."""
        return self.log.since(ask.number, wall_s) if self.knows(ask) else []

    def knows(self, ask: Ask) -> bool:
        """Whether an ask is for this start of this node; 0 stands for any."""
        return ask.node == self._record.node and ask.incarnation in (0, self._record.incarnation)

    def drain(self) -> None:
        """From the next record on this node takes nothing new and gives its blocks away."""
        self._become(NodeState.DRAINING)
        self.replicator.begin_round()

    def accepts(self, keys: Sequence[Key], block_bytes: int, now_s: float) -> int:
        """How many of the blocks that are offered may be taken, from the first: few, if full."""
        own = self._record
        if own.state is NodeState.DRAINING:
            return 0
        most = len(keys)
        if own.lasting is not None and own.full:
            most = self._allowance.take(most, block_bytes, own.lasting.capacity_bytes, now_s)
        self.replicator.expect(keys[:most])
        return most

    def tick(self, now_s: float, wall_s: float, space: Space) -> Outbox:
        """What is to be sent now. To be called a few times a second."""
        asks = self.view.tick(now_s)
        self._settle_in(now_s)
        batches = self._batches(now_s, wall_s, space)
        scene = Scene(self.view.directory, self.view.membership, self.view.placement)
        draining = self._record.state is NodeState.DRAINING
        offers = (
            []
            if self._record.state is NodeState.JOINING
            else self.replicator.tick(now_s, scene, draining=draining)
        )
        return Outbox(batches, asks, offers)

    def leave(self, now_s: float, wall_s: float) -> Sealed:
        """The last batch: it says that this node is gone."""
        self._become(NodeState.LEFT)
        self._record = self._next_record(now_s, Space(0))
        return self.log.seal(wall_s, self._record)

    def _become(self, state: NodeState) -> None:
        self._record = msgspec.structs.replace(self._record, state=state)
        self._beat_s = 0.0

    def _settle_in(self, now_s: float) -> None:
        if self._record.state is not NodeState.JOINING:
            return
        if self.view.complete or now_s - self._started_s >= self._settings.join_s:
            self._become(NodeState.ACTIVE)

    def _batches(self, now_s: float, wall_s: float, space: Space) -> list[Sealed]:
        self._wall_s = wall_s
        ready = list(self._ready)
        self._ready.clear()
        if now_s >= self._beat_s:
            self._beat_s = now_s + self._settings.timings.beat_s
            self._record = self._next_record(now_s, space)
            self.view.meet(self._record, now_s)
            ready.append(self.log.seal(wall_s, self._record))
        elif self.log.pending:
            ready.append(self.log.seal(wall_s))
        return ready

    def _next_record(self, now_s: float, space: Space) -> NodeRecord:
        own = msgspec.structs.replace(self._record, tiers=space.tiers)
        free_bytes, weight = space.free_bytes if space.takes else 0, 0
        if space.takes and own.full and own.lasting is not None:
            yielding = self.replicator.yielding / COLD_DIVISOR
            free_bytes = int(yielding * own.lasting.capacity_bytes)
        if own.state is NodeState.ACTIVE:
            weight = own_weight(
                free_bytes,
                age_s=now_s - self._started_s,
                slow_start_s=self._settings.slow_start_s,
            )
        holds: Holds | msgspec.UnsetType = msgspec.UNSET
        if space.keyspaces:
            holds = Holds(self._settings.block_tokens, space.keyspaces)
        return msgspec.structs.replace(
            own,
            version=own.version + 1,
            weight=weight,
            free_bytes=free_bytes,
            newest=self.log.number + 1,  # the batch that carries the record
            holds=holds,
        )
