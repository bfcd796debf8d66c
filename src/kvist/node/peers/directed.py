"""What a reader believes that the other nodes of its cluster have: what the directory says.

Nobody is asked: nodes tell what they hold (`cluster/directory.py`). They come and go; a node that
is suspect is read from last. One that failed is tried again by an empty question, which no read
waits for. What a node surely has not is told to the directory; what it could not bring for another
reason is not asked of it for a while.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kvist.cluster.directory import Position
from kvist.core.errors import ClosedError, KvistError
from kvist.core.keys import Key
from kvist.node.peers.member import Lacks, Member

_log = logging.getLogger(__name__)
_SPARED_S = 2.0
_MOST_SPARED = 4096


class Whereabouts(Protocol):
    """Who holds which block. Thread-safe."""

    def holders(self, key: Key) -> Sequence[str]:
        """Nodes that are believed to have a block where it can be fetched. Waits for nobody."""
        ...

    def missed(self, node: str, key: Key, at: Position) -> None:
        """A node said at `at` that it has no such block."""
        ...


@dataclass(frozen=True, slots=True)
class Host:
    """Where a node serves its blocks (HOST:PORT), and whether it is silent for too long."""

    place: str
    suspect: bool


class Directed:
    """`Beliefs` about the nodes of a cluster, for one keyspace."""

    def __init__(
        self,
        whereabouts: Whereabouts,
        connect: Callable[[str, Lacks], Member],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Knows no node yet.

        Args:
            whereabouts: the directory.
            connect: makes the peer at a place; it connects when it is first read from.
            clock: seconds that only grow.
        """
        self._whereabouts, self._connect, self._clock = whereabouts, connect, clock
        self._lock = threading.Lock()  # of whoever changes the nodes
        self._members: dict[str, Member] = {}  # replaced, never changed: readers take no lock
        self._suspects: frozenset[str] = frozenset()
        self._places: dict[str, str] = {}
        self._spared: dict[tuple[str, Key], float] = {}
        self._closed = False

    def follow(self, hosts: Mapping[str, Host]) -> None:
        """These are the nodes now, by name; tries those again that failed."""
        with self._lock:
            if self._closed:
                return
            before = self._members
            places = {name: host.place for name, host in hosts.items()}
            kept = {n: m for n, m in before.items() if places.get(n) == self._places[n]}
            for name in places.keys() - kept.keys():
                kept[name] = self._connect(places[name], partial(self._lacks, name))
            gone = [member for name, member in before.items() if kept.get(name) is not member]
            self._places = places
            self._suspects = frozenset(name for name, host in hosts.items() if host.suspect)
            self._members = kept
        for member in gone:
            member.close()
        for member in kept.values():
            if member.resting() and member.askable() and not member.asker.busy:
                with contextlib.suppress(ClosedError):  # the store closes at this moment
                    member.asker.submit(partial(_try_again, member))

    def member(self, node: str) -> Member | None:
        """The peer of that name, if it is there now."""
        return self._members.get(node)

    def owners(self, key: Key, *, ask: bool = False) -> Sequence[Member]:
        """See `Beliefs`; nobody is ever asked."""
        members, suspects = self._members, self._suspects
        found: list[Member] = []
        suspected: list[Member] = []
        for name in self._whereabouts.holders(key):
            member = members.get(name)
            if member is None or not member.readable() or self._is_spared(name, key):
                continue
            (suspected if name in suspects else found).append(member)
        return found or suspected

    def run(self, keys: Sequence[Key], *, ask: bool = False) -> int:
        """See `Beliefs`; nobody is ever asked."""
        if self._spared:
            return next((i for i, key in enumerate(keys) if not self.owners(key)), len(keys))
        nobody = {name for name, m in self._members.items() if m.readable()}.isdisjoint
        holders = self._whereabouts.holders
        return next((i for i, key in enumerate(keys) if nobody(holders(key))), len(keys))

    def forget(self, keys: Iterable[Key] | None) -> None:
        """See `Beliefs`. Nodes tell of what is theirs: there is nothing to find out."""

    def samples(self) -> Mapping[str, float]:
        """See `Beliefs`."""
        return {n: v for member in self._members.values() for n, v in member.samples().items()}

    def close(self) -> None:
        """See `Beliefs`."""
        with self._lock:
            self._closed = True
            members, self._members, self._places = self._members, {}, {}
        for member in members.values():
            member.close()

    def _lacks(self, node: str, key: Key, at: Position | None) -> None:
        if at is not None:
            self._whereabouts.missed(node, key, at)
            return
        now_s = self._clock()
        with self._lock:
            self._spared[node, key] = now_s + _SPARED_S
            while len(self._spared) > _MOST_SPARED:
                del self._spared[next(iter(self._spared))]

    def _is_spared(self, node: str, key: Key) -> bool:
        if not self._spared:
            return False
        over_s = self._spared.get((node, key))
        if over_s is None or self._clock() < over_s:
            return over_s is not None
        with self._lock:
            self._spared.pop((node, key), None)
        return False


def _try_again(member: Member) -> None:
    """Asks nothing of a peer that failed: an answer closes its breaker."""
    try:
        member.probe(())
    except (KvistError, OSError) as error:  # the member has told its breaker, and the log
        _log.debug("peer %s: %s", member.name, error)
