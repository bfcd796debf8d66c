"""The loop that gives a `Member` its sockets, its clock and its discovery.

One thread polls, hears, ticks and sends; discovery, which may block, has another. The store's
threads call `record`. Offers go to a callback: fetching blocks is the transfer's business.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from kvist.cluster.discovery.protocol import Discovery
from kvist.cluster.member import Member, Space
from kvist.cluster.record import NodeRecord
from kvist.cluster.replication import Offer
from kvist.cluster.wire import topic_of
from kvist.core.errors import KvistError
from kvist.core.events import KvEvent
from kvist.node.events import EventLines, EventPorts

_log = logging.getLogger(__name__)
_POLL_S = 0.1
_JOIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Rhythm:
    """Seconds between ticks, and between looks at discovery; how long a record there lasts."""

    tick_s: float = 0.25
    discovery_s: float = 2.0
    ttl_s: float = 10.0


class ClusterLoop:
    """A node in its cluster. `step` is for one thread; `record` for any."""

    def __init__(
        self,
        member: Member,
        ports: EventPorts,
        discovery: Discovery,
        *,
        space: Callable[[], Space],
        on_offers: Callable[[Sequence[Offer]], None],
        lines: EventLines,
        rhythm: Rhythm | None = None,
    ) -> None:
        self.member = member
        self.lock = threading.Lock()  # of the member
        self._ports = ports
        self._lines = lines
        self._discovery = discovery
        self._space = space
        self._on_offers = on_offers
        self._rhythm = rhythm or Rhythm()
        self._poller = zmq.Poller()
        self._polled: set[object] = set()
        self._tick_s = 0.0
        self._found: list[NodeRecord] | None = None
        self._listed: list[NodeRecord] = []  # what discovery last found
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.discovery_failures = 0

    def record(self, event: KvEvent, scope: bytes = b"") -> None:
        """An event of the own store."""
        with self.lock:
            self.member.record(event, scope)

    def start(self) -> None:
        """Begins both threads."""
        for work, name in ((self._run, "kvist-cluster"), (self._look, "kvist-discovery")):
            thread = threading.Thread(target=work, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """Says goodbye, ends both threads and lets go of the sockets. May be called twice."""
        if self._stop.is_set():
            return
        self._stop.set()
        for thread in self._threads:
            thread.join(_JOIN_S)
        with self.lock:
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
        """Announces this node and finds the others; a failure is counted, and tried again."""
        with self.lock:
            own = self.member.own
        try:
            self._discovery.announce(own, ttl_s=self._rhythm.ttl_s)
            self._found = self._discovery.members()
        except KvistError as error:
            self.discovery_failures += 1
            _log.debug("discovery: %s", error)

    def step(self, wait_s: float = _POLL_S) -> None:
        """Waits for messages, `wait_s` at most, and does what is due."""
        self._poll(wait_s)
        now_s, wall_s = time.monotonic(), time.time()
        heard = list(self._lines.receive())
        found, self._found = self._found, None
        with self.lock:
            for batch in heard:
                self.member.hear(batch, now_s)
            for node in self._lines.answered():
                self.member.view.answered(node, now_s)
            if found is not None:
                self._listed = found
                self.member.discovered(found, now_s)
            own = self.member.own
            topic = topic_of(own.node, own.incarnation)
            self._ports.answer(topic, lambda number: self.member.log.since(number, wall_s))
        if now_s >= self._tick_s:
            self._tick_s = now_s + self._rhythm.tick_s
            self._tick(now_s, wall_s, topic)

    def _tick(self, now_s: float, wall_s: float, topic: bytes) -> None:
        space = self._space()
        with self.lock:
            out = self.member.tick(now_s, wall_s, space)
            own = self.member.own.node
            # Who is listed is listened to though it is gone: it may come back.
            known = {r.node: r for r in (*self._listed, *self.member.view.membership.records())}
        self._ports.publish(topic, out.batches)
        self._lines.follow(record for name, record in known.items() if name != own)
        for ask in out.asks:
            self._lines.ask(ask)
        if out.offers:
            self._on_offers(out.offers)

    def _poll(self, wait_s: float) -> None:
        wanted = {*self._ports.sockets, *self._lines.sockets}
        for socket in self._polled - wanted:
            self._poller.unregister(socket)
        for socket in wanted - self._polled:
            self._poller.register(socket, zmq.POLLIN)
        self._polled = wanted
        self._poller.poll(round(wait_s * 1000))

    def _run(self) -> None:
        while not self._stop.is_set():
            self.step()

    def _look(self) -> None:
        while not self._stop.is_set():
            self.look()
            self._stop.wait(self._rhythm.discovery_s)
