"""The loop that gives a `Member` its sockets, its clock and its discovery.

One thread polls, hears, ticks and sends; discovery, which may block, has another. The store's
threads call `record`, which waits for nobody: events lie in a queue until the loop takes them.
Offers go to a callback: fetching blocks is the transfer's business.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvist.cluster.directory import Position
from kvist.cluster.discovery.protocol import Discovery
from kvist.cluster.measures import measures
from kvist.cluster.member import Member, Space
from kvist.cluster.record import NodeRecord
from kvist.cluster.replication import Offer
from kvist.cluster.wire import topic_of
from kvist.core.errors import KvistError
from kvist.core.events import KvEvent
from kvist.core.keys import Key
from kvist.node.events import EventLines, EventPorts, Poll
from kvist.node.threads import Threads

_log = logging.getLogger(__name__)
_POLL_S = 0.1
_MOST_WAITING = 1 << 16  # events in the queue; who records one more waits for the loop


@dataclass(frozen=True, slots=True)
class Rhythm:
    """Seconds between ticks, and between looks at discovery; how long a record there lasts."""

    tick_s: float = 0.25
    discovery_s: float = 2.0
    ttl_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another node that lives, as far as this one knows. `suspect`: it is silent for too long."""

    record: NodeRecord
    suspect: bool


@dataclass(frozen=True, slots=True)
class Duties:
    """What the loop's thread calls, none of which may wait for long.

    Attributes:
        space: what the node's tiers hold, and what it offers to others.
        on_offers: gets what is to be offered to others.
        on_neighbours: gets the other nodes, after each tick.
    """

    space: Callable[[], Space]
    on_offers: Callable[[Sequence[Offer]], None]
    on_neighbours: Callable[[Sequence[Neighbour]], None] = lambda neighbours: None


class ClusterLoop:
    """A node in its cluster. `step` is for one thread; all else for any."""

    def __init__(
        self,
        member: Member,
        ports: EventPorts,
        discovery: Discovery,
        *,
        duties: Duties,
        lines: EventLines,
        rhythm: Rhythm | None = None,
    ) -> None:
        self.member = member
        self.lock = threading.Lock()  # of the member
        self._ports = ports
        self._lines = lines
        self._discovery = discovery
        self._duties = duties
        self._rhythm = rhythm or Rhythm()
        self._poll = Poll()
        self._tick_s = 0.0
        self._recorded: deque[tuple[KvEvent, bytes]] = deque()
        self._found: list[NodeRecord] | None = None
        self._listed: list[NodeRecord] = []  # what discovery last found
        self._has_namesake = False
        self._drain_until_s = 0.0
        self._when_drained: Callable[[], None] | None = None
        self._patient = True
        self._threads = Threads({"kvist-cluster": self._run, "kvist-discovery": self._look})
        self.discovery_failures = 0

    def record(self, event: KvEvent, scope: bytes = b"") -> None:
        """An event of the own store of keyspace `scope`."""
        self._recorded.append((event, scope))
        if len(self._recorded) >= _MOST_WAITING:
            with self.lock:
                self._take_recorded()

    def holders(self, key: Key) -> list[str]:
        """Other nodes that are believed to have a block where it can be fetched. Takes no lock."""
        return self.member.view.directory.fetchable(key)

    def missed(self, node: str, key: Key, at: Position) -> None:
        """A node that was believed to have a block said at `at` that it has not."""
        with self.lock:
            self.member.view.missed(node, key, at)

    def position(self) -> Position | None:
        """Goes with an answer that a block is not here; `None` before anything was published."""
        at = self.member.position
        return at if at.number >= 0 else None

    def reached(self, node: str, at: Position) -> bool:
        """Whether all that a node had published at `at` is known here."""
        with self.lock:
            known = self.member.view.directory.position(node)
        return (
            known is not None and known.incarnation == at.incarnation and known.number >= at.number
        )

    def accepts(self, keys: Sequence[Key], block_bytes: int) -> int:
        """How many of the blocks that another node offers may be taken now, from the first."""
        with self.lock:
            return self.member.accepts(keys, block_bytes, time.monotonic())

    def drain(self, within_s: float, then: Callable[[], None], *, patient: bool = True) -> None:
        """Gives away what only this node holds, and calls `then` when that is done or time is over.

        `then` is called on the loop's thread. A second call can only bring the end nearer.
        `patient`: where no other node takes anything now, one is waited for.
        """
        until_s = time.monotonic() + within_s
        with self.lock:
            self._patient = self._patient and patient
            if self._drain_until_s:
                self._drain_until_s = min(self._drain_until_s, until_s)
                return
            self._drain_until_s = until_s
            self._when_drained = then
            self.member.drain()

    def figures(self) -> Mapping[str, float]:
        """What the member counts, by the names of `kvist.metrics`."""
        with self.lock:
            return measures(self.member)

    def neighbours(self) -> list[Neighbour]:
        """The other nodes, those that are silent too."""
        with self.lock:
            return self._neighbours()

    def start(self) -> None:
        """Begins both threads."""
        self._threads.start()

    def close(self) -> None:
        """Says goodbye, ends both threads and lets go of the sockets. May be called twice."""
        if not self._threads.end():
            return
        with self.lock:
            self._take_recorded()
            goodbye = self.member.leave(time.monotonic(), time.time())
            own = self.member.own
        self._ports.publish(topic_of(own.node, own.incarnation), [goodbye])
        try:
            self._discovery.withdraw(own.node)
        except KvistError as error:
            _log.warning("the record stays in discovery: %s", error)
        self._lines.close()
        self._ports.close()
        self._discovery.close()

    def look(self) -> None:
        """Finds the others and announces this node; a failure is counted, and tried again.

        In this order, so that another node of this name is seen before it is written over.
        """
        with self.lock:
            own = self.member.own
        try:
            self._found = self._discovery.members()
            self._discovery.announce(own, ttl_s=self._rhythm.ttl_s)
        except KvistError as error:
            self.discovery_failures += 1
            _log.debug("discovery: %s", error)

    def step(self, wait_s: float = _POLL_S) -> None:
        """Waits for messages, `wait_s` at most, and does what is due."""
        self._poll.wait((*self._ports.sockets, *self._lines.sockets), wait_s)
        now_s, wall_s = time.monotonic(), time.time()
        back = self._lines.reconnected()
        heard = list(self._lines.receive())
        found, self._found = self._found, None
        with self.lock:
            self._take_recorded()
            for node in back:
                self.member.view.reconnected(node, now_s)
            for batch in heard:
                self.member.hear(batch, now_s)
            for node in self._lines.answered():
                self.member.view.answered(node, now_s)
            if found is not None:
                self._listed = found
                self.member.discovered(found, now_s)
            own = self.member.own
            self._warn_of_namesakes(own)
            topic = topic_of(own.node, own.incarnation)
            self._ports.answer(topic, lambda number: self.member.log.since(number, wall_s))
        if now_s >= self._tick_s:
            self._tick_s = now_s + self._rhythm.tick_s
            self._tick(now_s, wall_s, topic)

    def _tick(self, now_s: float, wall_s: float, topic: bytes) -> None:
        space = self._duties.space()
        with self.lock:
            out = self.member.tick(now_s, wall_s, space)
            neighbours = self._neighbours()
            # Who is listed is listened to though it is gone: it may come back.
            known = {r.node: r for r in (*self._listed, *(n.record for n in neighbours))}
            known.pop(self.member.own.node, None)
        self._ports.publish(topic, out.batches)
        self._lines.follow(known.values())
        for ask in out.asks:
            self._lines.ask(ask)
        self._duties.on_neighbours(neighbours)
        if out.offers:
            self._duties.on_offers(out.offers)
        self._look_whether_drained(now_s)

    def _warn_of_namesakes(self, own: NodeRecord) -> None:
        """Another node of this name, which is to others a newer start of this one."""
        newer = (r for r in self._listed if r.node == own.node and r.incarnation > own.incarnation)
        if not self._has_namesake and any(newer):
            self._has_namesake = True
            _log.error("another node is called %s, too: its blocks and ours are lost", own.node)

    def _neighbours(self) -> list[Neighbour]:
        members, own = self.member.view.membership, self.member.own.node
        return [
            Neighbour(r, members.is_suspect(r.node)) for r in members.records() if r.node != own
        ]

    def _look_whether_drained(self, now_s: float) -> None:
        then = self._when_drained
        if then is None:
            return
        done = self.member.drained
        hopeless = not self._patient and not self.member.view.membership.takers()
        if done or hopeless or now_s >= self._drain_until_s:
            self._when_drained = None
            if not done:
                _log.warning("not all that only this node holds was taken in time")
            then()

    def _take_recorded(self) -> None:
        """Gives the member what was recorded, in order; caller holds the lock."""
        for _ in range(len(self._recorded)):
            event, scope = self._recorded.popleft()
            self.member.record(event, scope)

    def _run(self) -> None:
        while not self._threads.ending.is_set():
            self.step()

    def _look(self) -> None:
        while not self._threads.ending.is_set():
            self.look()
            self._threads.ending.wait(self._rhythm.discovery_s)
