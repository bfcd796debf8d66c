"""A gateway's ears: what engines and nodes say that they hold goes into its router's index.

    engines' events ──┐
    nodes' events   ──┴─► one thread: Listener ──► index ◄── router (on the event loop)
    discovery       ────► another thread: who publishes, and which node a replica reads from

Nothing of it is done on the event loop. The index's lock is given up between two events where a
request waits for it, and what comes too fast is left in the sockets' bounded queues: what falls out
of them is a gap, which heals as any other.

Engines' events come in the clear, as vLLM sends them; nodes' are sealed with their secret.

Engines say of which tokens their blocks are, so these can be named in any keyspace. Nodes name
theirs by keys alone, so prompts have to be named in the keyspace of the nodes, which they tell with
what they are (`record.Holds`): if it is one, it is taken over.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvist.cluster.discovery.protocol import Discovery
from kvist.cluster.follower import Ask
from kvist.cluster.record import NodeRecord
from kvist.cluster.wire import Batch
from kvist.core.errors import KvistError
from kvist.node.events import EventLines, Poll, is_own_host
from kvist.node.threads import Threads
from kvist.router.listener import Listener
from kvist.router.prefixes import IndexedPrefixes

_log = logging.getLogger(__name__)
_STEP_S = 0.1
_LOOK_S = 2.0


@dataclass(frozen=True, slots=True)
class Home:
    """Where a replica is.

    Attributes:
        engine: the name that its engine's events come under.
        host: of its URL.
        node: the node that it reads from; empty: the only one on its host.
    """

    engine: str
    host: str
    node: str = ""


class Everybody:
    """A `Discovery` of engines, which are listed, and of nodes, which are found."""

    def __init__(self, engines: Sequence[NodeRecord], nodes: Discovery | None) -> None:
        self._engines = list(engines)
        self._nodes = nodes
        self._found: list[NodeRecord] = []
        self.failures = 0

    def announce(self, record: NodeRecord, *, ttl_s: float) -> None:
        return

    def withdraw(self, node: str) -> None:
        return

    def members(self) -> list[NodeRecord]:
        """All engines, and the nodes that were found last, now or before discovery failed."""
        if self._nodes is not None:
            try:
                self._found = self._nodes.members()
            except KvistError as error:
                self.failures += 1
                _log.debug("discovery: %s", error)
        return [*self._engines, *self._found]

    def close(self) -> None:
        if self._nodes is not None:
            self._nodes.close()


class SplitLines:
    """Lines to engines in the clear, and to all others under a secret. For one thread."""

    def __init__(self, engines: Iterable[str], secret: str) -> None:
        self._engines = frozenset(engines)
        self._clear, self._sealed = EventLines(), EventLines(secret=secret)

    @property
    def sockets(self) -> list[Any]:
        """See `EventLines`, here and below."""
        return [*self._clear.sockets, *self._sealed.sockets]

    @property
    def unreadable(self) -> int:
        return self._clear.unreadable + self._sealed.unreadable

    def follow(self, records: Iterable[NodeRecord]) -> None:
        listed = list(records)
        self._clear.follow(r for r in listed if r.node in self._engines)
        self._sealed.follow(r for r in listed if r.node not in self._engines)

    def ask(self, ask: Ask) -> None:
        (self._clear if ask.node in self._engines else self._sealed).ask(ask)

    def answered(self) -> list[str]:
        return self._clear.answered() + self._sealed.answered()

    def reconnected(self) -> list[str]:
        return self._clear.reconnected() + self._sealed.reconnected()

    def receive(self) -> Iterator[Batch]:
        yield from self._clear.receive()
        yield from self._sealed.receive()

    def close(self) -> None:
        self._clear.close()
        self._sealed.close()


class Hearing:
    """The threads. `start` and `close` are for one thread, all else for any."""

    def __init__(
        self,
        prefixes: IndexedPrefixes,
        homes: Mapping[str, Home],
        everybody: Everybody,
        secret: str,
        *,
        keyspace: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Hears nobody yet.

        Args:
            homes: by replica.
            secret: of the nodes' events.
            keyspace: the fingerprint of the replicas' keyspace, in hexadecimal; empty: the only
                one that their nodes have.
        """
        self._prefixes, self._homes, self._everybody = prefixes, dict(homes), everybody
        self._engines = {home.engine for home in homes.values()}
        self._lines = SplitLines(self._engines, secret)
        self._listener = Listener(prefixes.index, self._lines, everybody, prefixes.lock)
        self._clock = clock
        self._poll = Poll()
        self._placed: dict[str, str] = {}
        self._keyspace, self._named = keyspace, ""
        self._unclear: set[str] = set()  # of which something was said that is said once
        self._threads = Threads({"kvist-events": self._hear, "kvist-publishers": self._look})

    def start(self) -> None:
        """Begins both threads."""
        self._threads.start()

    def close(self) -> None:
        """Ends both threads, and lets go of the sockets. Idempotent."""
        if not self._threads.end():
            return
        self._lines.close()
        self._everybody.close()

    def look(self) -> None:
        """Finds who publishes, and which node each replica reads from."""
        self._listener.look(self._clock())
        with self._prefixes.lock:
            records = self._listener.view.membership.records()
        nodes = [r for r in records if r.node not in self._engines]
        placed = {r: n for r, home in self._homes.items() if (n := self._node_of(r, home, nodes))}
        if placed != self._placed:
            self._placed = placed
            self._prefixes.place(placed)
        if self._take_over_keyspace([r for r in nodes if r.node in placed.values()]):
            self._listener.look(self._clock())  # all that was heard is asked for again

    def measures(self) -> dict[str, float]:
        """What could not be heard, under the names of `kvist.metrics`."""
        return {
            "kvist_event_unreadable_total": self._lines.unreadable,
            "kvist_discovery_failures_total": self._everybody.failures,
        }

    def state(self, replica: str) -> str:
        """What is known of a replica's own cache: `heard`, `silent`, or `block-size`."""
        index = self._prefixes.index
        engine = self._homes[replica].engine
        with self._prefixes.lock:
            if not index.understands(engine):
                return "block-size"
            at = index.position(engine)
        return "silent" if at is None or at.number < 0 else "heard"

    def _node_of(self, replica: str, home: Home, nodes: Sequence[NodeRecord]) -> str:
        if home.node:
            return home.node
        found = [r.node for r in nodes if _is_on(home.host, r)]
        if len(found) > 1 and replica not in self._unclear:
            self._unclear.add(replica)
            _log.warning("%s may read from %s: say so with ?node=", replica, " or ".join(found))
        return found[0] if len(found) == 1 else ""

    def _take_over_keyspace(self, nodes: Sequence[NodeRecord]) -> bool:
        """Whether prompts are named in another keyspace from now on."""
        width = self._prefixes.index.block_tokens
        held = [(r.node, r.holds) for r in nodes if r.holds is not msgspec.UNSET]
        for node, holds in held:
            if holds.block_tokens != width and node not in self._unclear:
                self._unclear.add(node)
                _log.error(
                    "node %s has blocks of %d tokens, requests are cut into blocks of %d: what it "
                    "holds plays no part; set block_tokens alike",
                    node,
                    holds.block_tokens,
                    width,
                )
        found = {k for _, holds in held if holds.block_tokens == width for k in holds.keyspaces}
        if self._keyspace:
            found &= {self._keyspace}
        if len(found) > 1 and "" not in self._unclear:
            self._unclear.add("")
            _log.error(
                "nodes hold blocks of several keyspaces, which play no part; say which one is "
                "these replicas' with gateway.events.keyspace: %s",
                ", ".join(sorted(found)),
            )
        if len(found) != 1 or found == {self._named}:
            return False
        self._named = found.pop()
        self._prefixes.rename(bytes.fromhex(self._named))
        _log.info("prompts are named in the keyspace %s", self._named)
        return True

    def _hear(self) -> None:
        while not self._threads.ending.is_set():
            self._poll.wait(self._lines.sockets, _STEP_S)
            self._listener.step(self._clock())

    def _look(self) -> None:
        self.look()
        while not self._threads.ending.wait(_LOOK_S):
            self.look()


def _is_on(host: str, record: NodeRecord) -> bool:
    """Whether a node is on a host, as far as addresses say it."""
    place = record.events or f"tcp://{record.blocks}"
    if is_own_host(place):
        return is_own_host(f"tcp://[{host}]" if ":" in host else f"tcp://{host}")
    return urlsplit(place).hostname == host
