"""One engine at the node: what it asked for, and the leases that it holds. No I/O, no sockets.

Everything here runs on the loop's thread. A lease is the session's, not the connection's: when the
connection ends, `close` gives back all of them at once, but only when nobody can touch their slots
any more (`server.py` knows when that is).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

import msgspec

from kvist.core.errors import ClosedError, KvistError, LeaseError, NoSpaceError, TierError
from kvist.core.hints import Finish, Hints
from kvist.core.keys import KEY_BYTES
from kvist.core.outcome import BlockRef, Outcome
from kvist.node import messages as m
from kvist.node.protocol import ProtocolError, pack_slots, split_keys
from kvist.node.waiter import Waiter
from kvist.node.work import SlowWork
from kvist.store.leases import TieredReadLease, TieredWriteLease
from kvist.store.tiered import TieredStore

MOST_LEASES = 4096  # of one session
MOST_ITEMS = 1 << 20  # blocks in all leases of one session
_MOST_TEXT = 2048
_FINISHES = frozenset(f.value for f in Finish)
_ERRORS = (NoSpaceError, ClosedError, LeaseError, TierError)


@dataclass(slots=True, eq=False)
class _Reading:
    """A read lease, and what the engine knows of it."""

    number: int
    lease: TieredReadLease
    pending: list[int]


@dataclass(slots=True)
class _Flushing:
    id: int
    until: float


@dataclass(slots=True, eq=False)
class Session:
    """An engine's leases and its requests. `send` takes what is to be told to the engine."""

    store: TieredStore
    waiter: Waiter
    work: SlowWork
    send: Callable[[m.Reply], None]
    clock: Callable[[], float]
    _reads: dict[int, _Reading] = field(default_factory=dict)
    _writes: dict[int, TieredWriteLease] = field(default_factory=dict)
    _pending: dict[int, _Reading] = field(default_factory=dict)
    _flushes: list[_Flushing] = field(default_factory=list)
    _items: int = 0
    _last_lease: int = 0
    closed: bool = False

    @property
    def leases(self) -> int:
        """How many leases are out."""
        return len(self._reads) + len(self._writes)

    def held(self) -> list[TieredReadLease | TieredWriteLease]:
        """The leases that are out."""
        return [*(reading.lease for reading in self._reads.values()), *self._writes.values()]

    def handle(self, request: m.Request) -> None:
        """Carries out one request.

        Raises:
            ProtocolError: it makes no sense; the connection must end.
        """
        try:
            _HANDLERS[type(request)](self, request)
        except ProtocolError:
            raise
        except KvistError as error:
            number = getattr(request, "id", None)
            if number is not None:
                self._fail(number, error)

    def settle(self) -> None:
        """Tells of blocks that were decided, and of flushes that are over."""
        for reading in list(self._pending.values()):
            lease = reading.lease
            outcomes = [lease.outcome(i) for i in reading.pending]
            if outcomes.count(Outcome.PENDING) == len(outcomes):
                continue
            decided = [
                (i, outcome)
                for i, outcome in zip(reading.pending, outcomes, strict=True)
                if outcome is not Outcome.PENDING
            ]
            reading.pending = [
                i
                for i, outcome in zip(reading.pending, outcomes, strict=True)
                if outcome is Outcome.PENDING
            ]
            if not reading.pending:
                del self._pending[reading.number]
            self.send(
                m.Settled(
                    reading.number,
                    tuple(i for i, _ in decided),
                    bytes(m.CODE_OF[outcome] for _, outcome in decided),
                    pack_slots([self._slot_of(lease, i, outcome) for i, outcome in decided]),
                )
            )
        if self._flushes:
            self._look_at_flushes()

    def waits(self) -> bool:
        """Whether `settle` must be called from time to time."""
        return bool(self._pending or self._flushes)

    def close(self) -> None:
        """Gives back every lease: what was read is let go, what was not committed is freed."""
        self.closed = True
        for reading in self._reads.values():
            self.waiter.drop(reading.lease)
            reading.lease.release()
        for lease in self._writes.values():
            lease.release()
        for held in (self._reads, self._writes, self._pending, self._flushes):
            held.clear()
        self._items = 0

    # -- requests ---------------------------------------------------------------------------

    def _match(self, ask: m.Match) -> None:
        found = self.store.match(split_keys(ask.keys))
        self.send(m.Matched(ask.id, bytes(m.TIER_CODE[tier] for tier in found.tiers)))

    def _read(self, ask: m.Read) -> None:
        keys = split_keys(ask.keys)
        number = self._new_lease(len(keys))
        lease = self.store.read(keys, deadline_s=ask.deadline_s, tenant=ask.tenant)
        outcomes = [lease.outcome(i) for i in range(len(keys))]
        pending = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.PENDING]
        reading = self._reads[number] = _Reading(number, lease, pending)
        self._items += len(keys)
        slots = [self._slot_of(lease, i, outcome) for i, outcome in enumerate(outcomes)]
        codes = bytes(m.CODE_OF[outcome] for outcome in outcomes)
        self.send(m.Leased(ask.id, number, codes, pack_slots(slots)))
        if pending:
            self._pending[number] = reading
            self.waiter.add(lease)

    def _write(self, ask: m.Write) -> None:
        keys, parents = split_keys(ask.keys), split_keys(ask.parents)
        tenants = ask.tenants if len(ask.tenants) != 1 else ask.tenants * len(keys)
        roots = frozenset(ask.roots)
        if not len(keys) == len(parents) == len(tenants):
            raise ProtocolError("a write names other numbers of keys, parents and tenants")
        blocks = [
            BlockRef(key, None if i in roots else parent, tenant)
            for i, (key, parent, tenant) in enumerate(zip(keys, parents, tenants, strict=True))
        ]
        number = self._new_lease(len(blocks))
        lease = self._writes[number] = self.store.write(blocks)
        self._items += len(blocks)
        slots = [
            m.NO_SLOT if lease.present(i) else lease.slot(i) // self.store.arena.slot_bytes
            for i in range(len(blocks))
        ]
        self.send(m.Reserved(ask.id, number, pack_slots(slots)))

    def _commit(self, ask: m.Commit) -> None:
        lease = self._writes.get(ask.lease)
        if lease is None:
            raise LeaseError(f"there is no write lease {ask.lease}")
        if len(ask.blocks) != len(ask.checksums) or len(set(ask.blocks)) != len(ask.blocks):
            raise ProtocolError("a commit names other numbers of blocks and checksums")
        if any(i >= len(lease) for i in ask.blocks):
            raise ProtocolError("a commit names a block that the lease does not have")
        if any(checksum is not None and checksum >> 64 for checksum in ask.checksums):
            raise ProtocolError("a checksum has more than 64 bits")
        done = bytes(
            lease.commit(i, checksum=checksum)
            for i, checksum in zip(ask.blocks, ask.checksums, strict=True)
        )
        self.send(m.Committed(ask.id, done))

    def _release(self, ask: m.Release) -> None:
        reading, lease = self._reads.pop(ask.lease, None), self._writes.pop(ask.lease, None)
        if reading is not None:
            self._pending.pop(ask.lease, None)
            self.waiter.drop(reading.lease)
            self._items -= len(reading.lease)
            reading.lease.release()
        if lease is not None:
            self._items -= len(lease)
            lease.release()

    def _prefetch(self, ask: m.Prefetch) -> None:
        keys = split_keys(ask.keys)
        taken = self.store.prefetch(keys, deadline_s=ask.deadline_s, tenant=ask.tenant)
        self.send(m.Count(ask.id, taken))

    def _ended(self, ask: m.Ended) -> None:
        if ask.finish not in _FINISHES:
            raise ProtocolError(f"there is no way {ask.finish} to finish")
        if ask.partial is not None and len(ask.partial) != KEY_BYTES:
            raise ProtocolError("a key is not as long as keys are")
        hints = Hints(Finish(ask.finish), ask.output_tokens, ask.partial)
        self.store.ended(split_keys(ask.keys), hints)

    def _room(self, ask: m.Room) -> None:
        self.send(m.Count(ask.id, self.store.room_blocks(ask.tenant)))

    def _totals(self, ask: m.Totals) -> None:
        found = self.store.read_totals().items()
        tiers = tuple((m.TIER_CODE[tier], t.size_bytes, t.busy_s) for tier, t in found)
        self.send(m.TierTotals(ask.id, tiers))

    def _evict(self, ask: m.Evict) -> None:
        keys = split_keys(ask.keys)
        self._later(ask.id, lambda: m.Count(ask.id, self.store.evict(keys)))

    def _clear(self, ask: m.Clear) -> None:
        def clear() -> m.Count:
            self.store.clear()
            return m.Count(ask.id, 0)

        self._later(ask.id, clear)

    def _flush(self, ask: m.Flush) -> None:
        if len(self._flushes) >= MOST_LEASES:
            raise NoSpaceError("too many flushes are waited for")
        self._flushes.append(_Flushing(ask.id, self.clock() + ask.deadline_s))
        self._look_at_flushes()

    def _stats(self, ask: m.Stats) -> None:
        def show() -> m.Shown:
            return m.Shown(ask.id, as_json(asdict(self.store.stats())))

        self._later(ask.id, show)

    # -- inside -----------------------------------------------------------------------------

    def _new_lease(self, items: int) -> int:
        if self.leases >= MOST_LEASES or self._items + items > MOST_ITEMS:
            raise NoSpaceError("this engine holds as many leases as one may")
        self._last_lease += 1
        return self._last_lease

    def _slot_of(self, lease: TieredReadLease, i: int, outcome: Outcome) -> int:
        if outcome is not Outcome.HIT:
            return m.NO_SLOT
        return lease.slot(i) // self.store.arena.slot_bytes

    def _look_at_flushes(self) -> None:
        done = self.store.flush(0.0)
        now = self.clock()
        for flush in list(self._flushes):
            if done or now >= flush.until:
                self._flushes.remove(flush)
                self.send(m.Count(flush.id, int(done)))

    def _later(self, number: int, call: Callable[[], m.Reply]) -> None:
        def then(result: object) -> None:
            if self.closed:
                return
            if isinstance(result, Exception):
                self._fail(number, result)
            else:
                self.send(result)  # type: ignore[arg-type]

        self.work.submit(call, then)

    def _fail(self, number: int, error: Exception) -> None:
        kind = next((e.__name__ for e in _ERRORS if isinstance(error, e)), "StoreError")
        self.send(m.Failed(number, kind, str(error)[:_MOST_TEXT]))


def as_json(found: dict[str, Any]) -> str:
    """A mapping of plain values and enums as JSON."""
    plain = {k: v.value if isinstance(v, Enum) else v for k, v in found.items()}
    return msgspec.json.encode(plain).decode()


_HANDLERS: dict[type, Callable[[Session, Any], None]] = {
    m.Match: Session._match,
    m.Read: Session._read,
    m.Write: Session._write,
    m.Commit: Session._commit,
    m.Release: Session._release,
    m.Prefetch: Session._prefetch,
    m.Ended: Session._ended,
    m.Room: Session._room,
    m.Totals: Session._totals,
    m.Evict: Session._evict,
    m.Clear: Session._clear,
    m.Flush: Session._flush,
    m.Stats: Session._stats,
}
