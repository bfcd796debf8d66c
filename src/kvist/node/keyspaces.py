"""The stores of a node: one for each keyspace, opened when its first engine attaches.

Engines of different models share a node, never a slot. How many stores may be open at once is the
node's budget; a store that no engine uses gives way to a newcomer (what it has on SSD stays there).
Opening and closing touch disks and happen off the loop's thread; engines that come meanwhile wait.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvist.core.errors import KvistError
from kvist.core.events import Cleared, KvEvent, Removed, Stored
from kvist.node import messages as m
from kvist.node.estates import Attach as Attach
from kvist.node.estates import Estates, Left, LifeFences
from kvist.node.protocol import join_keys
from kvist.node.sessions import Session
from kvist.node.waiter import Waiter
from kvist.node.work import SlowWork
from kvist.store.entry import NO_SLOT
from kvist.store.succession import Legacy
from kvist.store.tiered import TieredStore
from kvist.tiers.dram import ArenaMap

_log = logging.getLogger(__name__)
_MOST_EVENTS = 100_000
_MOST_EVENT_KEYS = 1024  # in one message
_CLOSE_S = 5.0
_JOIN_S = 2.0
_SUM_S = 10.0  # for checksums that nobody has taken yet
_SHORT = 6


# Opens the store of a keyspace; raises KvistError or OSError. Its events go to the second argument.
OpenStore = Callable[[Attach, Callable[[KvEvent], None]], TieredStore]


class Announcer(Protocol):
    """Who tells other hosts what the stores hold. Called on any thread; must be quick."""

    def opened(self, fingerprint: bytes, store: TieredStore) -> None:
        """A keyspace has a store, which may hold blocks already."""
        ...

    def heard(self, fingerprint: bytes, event: KvEvent) -> None:
        """An event of the store of a keyspace."""
        ...

    def closed(self, fingerprint: bytes) -> None:
        """A keyspace has no store any more: nobody can read its blocks."""
        ...


@dataclass(slots=True, eq=False)
class Keyspace:
    """An open store and the sessions on it, those that only linger included."""

    attach: Attach
    store: TieredStore
    waiter: Waiter
    events: deque[KvEvent]
    listeners: set[Session]
    sessions: set[Session] = field(default_factory=set)

    def session(
        self,
        send: Callable[[m.Reply], None],
        work: SlowWork,
        clock: Callable[[], float],
        *,
        wants_events: bool,
    ) -> Session:
        """A new session."""
        session = Session(self.store, self.waiter, work, send, clock)
        self.sessions.add(session)
        if wants_events:
            self.listeners.add(session)
        return session

    def end(self, session: Session) -> None:
        """Nobody can touch the session's slots any more: gives back its leases."""
        self.mute(session)
        self.sessions.discard(session)
        session.close()

    def mute(self, session: Session) -> None:
        """Nobody listens to the session any more."""
        self.listeners.discard(session)

    def settle(self) -> None:
        """Tells every session what has happened meanwhile."""
        for session in list(self.sessions):
            if session.waits():
                session.settle()
        events = [self.events.popleft() for _ in range(len(self.events))]
        for event in _merged(events) if self.listeners else ():
            for message in _event_messages(event):
                for session in list(self.listeners):
                    session.send(message)

    def waits(self) -> bool:
        """Whether `settle` must be called from time to time."""
        return any(session.waits() for session in self.sessions)


Then = Callable[[Keyspace | str], None]


class Keyspaces:
    """All stores of a node. Called on the loop's thread."""

    def __init__(
        self,
        open_store: OpenStore,
        work: SlowWork,
        poke: Callable[[], None],
        *,
        most: int,
        announcer: Announcer | None = None,
        estates: Estates | None = None,
    ) -> None:
        """`most` stores may be open at once; `announcer` is told of them.

        `estates`: what the node before this one left, of which `open_store` takes what it needs.
        """
        self._open_store, self._work, self._poke, self._most = open_store, work, poke, most
        self._announcer = announcer
        self._estates = estates or Estates()
        self._open: dict[bytes, Keyspace] = {}
        self._opening: dict[bytes, tuple[Attach, list[Then]]] = {}

    def __iter__(self) -> Iterator[Keyspace]:
        return iter(list(self._open.values()))

    def find(self, attach: Attach, then: Then) -> None:
        """Calls `then` with the keyspace, now or later, or with the reason why there is none."""
        known = self._open.get(attach.fingerprint)
        waiting = self._opening.get(attach.fingerprint)
        held = known.attach if known else waiting[0] if waiting else attach
        if held != attach:
            then(_disagreement(held, attach))
        elif known:
            then(known)
        elif waiting:
            waiting[1].append(then)
        else:
            self._begin(attach, then)

    def in_use(self, fingerprint: bytes) -> Keyspace | None:
        """The keyspace, if it is open now; on any thread. Its store may close at any moment."""
        return self._open.get(fingerprint)

    def settle(self) -> None:
        """Tells every session what has happened meanwhile."""
        for keyspace in self:
            keyspace.settle()

    def waits(self) -> bool:
        """Whether `settle` must be called from time to time."""
        return any(keyspace.waits() for keyspace in self)

    def close(self, deadline_s: float) -> None:
        """Closes every store: what is dirty goes to SSD. Leases keep what they hold.

        What is not written when `deadline_s` is over is lost.
        """
        until = time.monotonic() + deadline_s
        for keyspace in self:
            keyspace.waiter.stop(_JOIN_S)
            try:
                keyspace.store.close(max(0.0, until - time.monotonic()))
            except (KvistError, OSError) as error:
                _log.warning("keyspace %s: %s", _short(keyspace.attach), error)
        self._open.clear()
        self._estates.close()

    def bequeath(
        self, sessions: Callable[[Keyspace], Mapping[int, Session]], deadline_s: float
    ) -> list[Left]:
        """Closes every store as `close` does; what was in DRAM goes to the next node.

        `sessions`: those whose processes may still touch slots, by the pipes whose end says that
        they cannot. They are the caller's, and must be open when what is left is used.
        """
        shares = [(keyspace, _share(keyspace.store)) for keyspace in self]
        kept = list(self._estates)  # nobody has asked for them yet
        self._estates = Estates()
        self.close(deadline_s)
        until = time.monotonic() + _SUM_S
        found = []
        for keyspace, arena in shares:
            if arena is None:
                continue
            left = _left(keyspace, sessions(keyspace), arena, until)
            if left is None:
                _log.warning("keyspace %s stays: its memory is in use", _short(keyspace.attach))
            else:
                found.append(left)
        return [*found, *kept]

    def _begin(self, attach: Attach, then: Then) -> None:
        idle: Keyspace | None = None
        if len(self._open) + len(self._opening) >= self._most:
            idle = next((k for k in self._open.values() if not k.sessions), None)
            if idle is None:
                then(
                    f"this node serves {self._most} keyspace(s) at once and all are in use; "
                    "set node.keyspaces higher and restart it"
                )
                return
            del self._open[idle.attach.fingerprint]
        self._opening[attach.fingerprint] = (attach, [then])
        others = self._most - len(self._open) - len(self._opening)
        self._estates.keep(others, but=attach.fingerprint)
        events: deque[KvEvent] = deque()

        listeners: set[Session] = set()

        def heard(event: KvEvent) -> None:
            if self._announcer is not None:
                self._announcer.heard(attach.fingerprint, event)
            if not listeners:
                return
            if len(events) >= _MOST_EVENTS:  # who keeps an index must know that it is wrong
                events.clear()
                event = Cleared()
            events.append(event)
            self._poke()

        def work() -> TieredStore:
            if idle is not None:
                _log.info("keyspace %s gives way: no engine uses it", _short(idle.attach))
                idle.waiter.stop(_JOIN_S)
                idle.store.close(_CLOSE_S)
                if self._announcer is not None:
                    self._announcer.closed(idle.attach.fingerprint)
            store = self._open_store(attach, heard)
            if self._announcer is not None:
                self._announcer.opened(attach.fingerprint, store)
            return store

        def opened(result: object) -> None:
            _, waiting = self._opening.pop(attach.fingerprint)
            answer: Keyspace | str
            if isinstance(result, TieredStore):
                _log.info("keyspace %s is open: %s", _short(attach), attach.layout)
                answer = Keyspace(attach, result, Waiter(self._poke), events, listeners)
                self._open[attach.fingerprint] = answer
            else:
                answer = f"the node cannot open a store: {result}"
            for waits in waiting:
                waits(answer)

        try:
            self._work.submit(work, opened)
        except KvistError as error:
            opened(error)


def _share(store: TieredStore) -> ArenaMap | None:
    """Another mapping of a store's memory, which outlives the store; `None`: it cannot be had."""
    store.succession.halt()
    arena = store.arena
    try:
        return ArenaMap(os.dup(arena.fd), arena.size_bytes, slot_bytes=arena.slot_bytes)
    except (OSError, ValueError) as error:
        _log.warning("the memory of a store stays: %s", error)
        return None


def _left(
    keyspace: Keyspace, sessions: Mapping[int, Session], arena: ArenaMap, until: float
) -> Left | None:
    """What the closed store of a keyspace leaves; `None`: somebody unknown may touch its slots."""
    succession = keyspace.store.succession
    leases = [lease for session in sessions.values() for lease in session.held()]
    estate = succession.leave(leases, arena, until=until)
    if estate is None:
        return None
    pipes: dict[int, frozenset[int]] = {}
    try:
        for life, session in sessions.items():
            if slots := _slots(session):
                pipes[os.dup(life)] = slots
        for life, slots in succession.fences.items():
            pipes[os.dup(life)] = slots
    except OSError as error:  # no descriptor is left
        _log.warning("%s", error)
        LifeFences(pipes).close()
        return None
    fences = LifeFences(pipes)
    legacy = Legacy(arena.fd, arena.size_bytes, arena.slot_bytes, estate, fences)
    return Left(keyspace.attach, legacy)


def _slots(session: Session) -> frozenset[int]:
    """The slots of a session's leases."""
    entries = (entry for lease in session.held() for entry in lease.held())
    return frozenset(entry.slot for entry in entries if entry.slot != NO_SLOT)


def _short(attach: Attach) -> str:
    return attach.fingerprint.hex()[: 2 * _SHORT]


def _disagreement(held: Attach, wanted: Attach) -> str:
    return (
        f"keyspace {_short(held)} is open with blocks of {held.block_bytes} bytes ({held.layout}), "
        f"this engine's have {wanted.block_bytes} ({wanted.layout})"
    )


def _merged(events: Sequence[KvEvent]) -> Iterator[KvEvent]:
    """Events of neighbouring blocks as one: a request's blocks come and go one by one."""
    last: KvEvent | None = None
    for event in events:
        joined: KvEvent | None = None
        if last is None or isinstance(last, Cleared) or len(last.keys) >= _MOST_EVENT_KEYS:
            pass
        elif isinstance(last, Stored) and isinstance(event, Stored):
            if (event.tier, event.parent) == (last.tier, last.keys[-1]):
                joined = Stored(last.keys + event.keys, last.parent, last.tier)
        elif isinstance(last, Removed) and isinstance(event, Removed) and event.tier is last.tier:
            joined = Removed(last.keys + event.keys, last.tier)
        if joined is None and last is not None:
            yield last
        last = joined or event
    if last is not None:
        yield last


def _event_messages(event: KvEvent) -> Iterator[m.Events]:
    if isinstance(event, Cleared):
        yield m.Events("cleared", b"", b"", m.TIER_CODE[m.TIERS[0]])
        return
    kind = "stored" if isinstance(event, Stored) else "removed"
    parent = event.parent or b"" if isinstance(event, Stored) else b""
    for start in range(0, len(event.keys), _MOST_EVENT_KEYS):
        part = event.keys[start : start + _MOST_EVENT_KEYS]
        yield m.Events(kind, join_keys(part), parent, m.TIER_CODE[event.tier])
        parent = part[-1] if parent or isinstance(event, Stored) else b""


def event_of(message: m.Events, keys: tuple[bytes, ...]) -> KvEvent:
    """The event that a message tells of."""
    if message.kind == "cleared":
        return Cleared()
    tier = m.TIERS[min(message.tier, len(m.TIERS) - 1)]
    if message.kind == "removed":
        return Removed(keys, tier)
    return Stored(keys, message.parent or None, tier)
