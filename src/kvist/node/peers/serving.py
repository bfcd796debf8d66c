"""One reader at the owner's side, after the handshake: what it asks for, and the leases for that.

Blocks are leased a few at a time, the next few while those before are sent, so that what is on SSD
is read meanwhile and a reader never holds more of DRAM than that. Bytes go to the socket straight
from their slots. Whatever ends the connection, a deadline too, gives back every lease.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol

from kvist.cluster.directory import Position
from kvist.core.errors import ClosedError, LeaseError, NoSpaceError
from kvist.core.keys import Key
from kvist.core.outcome import Outcome
from kvist.native.answer import BLOCK, HIT, MISS, POSITION
from kvist.node.peers import messages as m
from kvist.node.peers.carrying.carrier import Carrier
from kvist.node.peers.carrying.lending import Lending
from kvist.node.peers.wire import Buffer, Wire
from kvist.node.protocol import split_keys
from kvist.store.leases import TieredReadLease
from kvist.store.own import OwnBlocks

_log = logging.getLogger(__name__)
IDLE_S = 600.0  # a reader that asks for nothing so long is let go
_BODY_S = 5.0  # a request that has begun must be whole by then
_STALL_S = 5.0  # a reader that takes no block for so long is let go
_PART_BYTES = 16 << 20
_PART_BLOCKS = 16
_PARTS = 2  # leased at once


@dataclass(slots=True)
class ServeCounts:
    """Totals of one owner. Thread-safe. `busy_blocks`: DRAM had no room to bring them up."""

    sent_blocks: int = 0
    sent_bytes: int = 0
    absent_blocks: int = 0
    busy_blocks: int = 0
    _lock: Lock = field(default_factory=Lock)

    def sent(self, blocks: int, size_bytes: int) -> None:
        """Blocks are on their way, or lent."""
        with self._lock:
            self.sent_blocks += blocks
            self.sent_bytes += size_bytes

    def missed(self, *, busy: bool) -> None:
        """A block could not be sent."""
        with self._lock:
            self.busy_blocks += busy
            self.absent_blocks += not busy


class ClusterSide(Protocol):
    """What a node does for others because it is in a cluster. Called on any thread."""

    def position(self) -> Position | None:
        """As of where in the event stream a block that is not here now is not here."""
        ...

    def take(self, fingerprint: bytes, offer: m.Offer) -> int:
        """Blocks of a keyspace are offered; of how many copies will be fetched."""
        ...


class Serving:
    """Answers the requests of one connection."""

    def __init__(
        self,
        wire: Wire,
        fingerprint: bytes,
        blocks: Callable[[], OwnBlocks | None],
        counts: ServeCounts,
        *,
        cluster: ClusterSide | None = None,
        carrier: Callable[[str], Carrier | None] = lambda kind: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serves the keyspace `fingerprint`; `blocks` finds its store, if it is open now.

        `carrier` finds what shows that store's arena, for a kind of carriers.
        """
        self._wire, self._fingerprint, self._blocks = wire, fingerprint, blocks
        self._counts, self._cluster, self._clock = counts, cluster, clock
        self._lending = Lending(wire, carrier, self._surely_not, clock=clock)

    def run(self) -> None:
        """Serves until the connection ends.

        Raises:
            ProtocolError: the reader broke a rule.
            OSError: it hung up, stalled or was idle for too long.
        """
        try:
            while True:
                until = self._lending.over_s(self._clock() + IDLE_S)
                raw = self._wire.hear(m.MOST_REQUEST_BYTES, until, body_s=_BODY_S)
                self._lending.give_back()
                self._answer(m.decode(m.REQUEST, raw[m.HEAD.size :]))
        finally:
            self._lending.give_back()

    def _answer(self, request: m.Request) -> None:
        if isinstance(request, m.Have):
            self._have(split_keys(request.keys))
        elif isinstance(request, m.Read):
            self._read(split_keys(request.keys), self._clock() + request.deadline_s)
        elif isinstance(request, m.Lend):
            self._lend(split_keys(request.keys), self._clock() + request.deadline_s)
        elif isinstance(request, m.Carry):
            self._lending.carry(request)
        elif isinstance(request, m.Offer):
            taken = self._cluster.take(self._fingerprint, request) if self._cluster else 0
            self._wire.tell(m.Taken(taken), self._clock() + _STALL_S)

    def _have(self, keys: Sequence[Key]) -> None:
        own = self._blocks()
        held = [False] * len(keys)
        if own is not None:
            with contextlib.suppress(ClosedError):  # it may close between two looks
                held = own.held(keys)
        self._wire.tell(m.Held(m.pack_bits(held)), self._clock() + _STALL_S)

    def _lend(self, keys: Sequence[Key], until: float) -> None:
        own = self._blocks()
        part = range(min(len(keys), _part_blocks(own)))
        lease = self._lease(own, keys, part, until)
        loans = self._lending.lend(lease, keys[: len(part)], until)
        lent = loans.count(m.Loan.LENT)
        if own is not None:
            self._counts.sent(lent, lent * own.block_bytes)
        for _ in range(len(loans) - lent - loans.count(m.Loan.ASK)):
            self._counts.missed(busy=False)

    def _read(self, keys: Sequence[Key], until: float) -> None:
        own = self._blocks()
        leased: deque[tuple[TieredReadLease | None, range]] = deque()
        try:
            size = _part_blocks(own)
            for start in range(0, len(keys), size):
                part = range(start, min(start + size, len(keys)))
                leased.append((self._lease(own, keys, part, until), part))
                if len(leased) == _PARTS:
                    self._send_first(leased, own, keys, until)
            while leased:
                self._send_first(leased, own, keys, until)
        finally:
            for lease, _ in leased:
                if lease is not None:
                    lease.release()

    def _send_first(
        self,
        leased: deque[tuple[TieredReadLease | None, range]],
        own: OwnBlocks | None,
        keys: Sequence[Key],
        until: float,
    ) -> None:
        lease, part = leased[0]
        if lease is not None:
            self._send(lease, keys, part, until)
            lease.release()
        else:
            self._send_singly(own, keys, part, until)
        leased.popleft()

    def _lease(
        self, own: OwnBlocks | None, keys: Sequence[Key], part: range, until: float
    ) -> TieredReadLease | None:
        """A lease on a part; `None` where there is no store or no room for all of it at once."""
        if own is None:
            return None
        try:
            left_s = max(0.0, until - self._clock())
            return own.read([keys[i] for i in part], deadline_s=left_s)
        except (NoSpaceError, ClosedError):
            return None

    def _send_singly(
        self, own: OwnBlocks | None, keys: Sequence[Key], part: range, until: float
    ) -> None:
        """One block after the other: those in DRAM need no room."""
        for i in part:
            lease = self._lease(own, keys, range(i, i + 1), until)
            if lease is None:
                self._counts.missed(busy=own is not None)
                self._wire.send([self._miss(i, keys[i])], self._clock() + _STALL_S)
                continue
            with lease:
                self._send(lease, keys, range(i, i + 1), until)

    def _send(self, lease: TieredReadLease, keys: Sequence[Key], part: range, until: float) -> None:
        """Sends a leased part: in one call what is there already, and then what comes."""
        pending = [i for i in part if lease.outcome(i - part.start) is Outcome.PENDING]
        there = [i for i in part if i not in pending]
        for together in (there, *([i] for i in pending)):
            framed: list[Buffer] = []
            for i in together:
                framed += self._framed(lease, i - part.start, i, keys[i])
            stall = self._clock() + _STALL_S
            self._wire.send(framed, min(until, stall) if len(framed) > len(together) else stall)

    def _framed(self, lease: TieredReadLease, offset: int, i: int, key: Key) -> list[Buffer]:
        """Header and bytes of a block, or the header of a miss."""
        try:
            if lease.wait(offset) is Outcome.HIT:
                block, checksum = lease.buffer(offset), lease.checksum(offset)
                self._counts.sent(1, block.nbytes)
                return [BLOCK.pack(i, HIT, block.nbytes, checksum, key), block]
        except (ClosedError, LeaseError) as error:
            _log.debug("a block is not sent: %s", error)  # the store closes
        self._counts.missed(busy=False)
        return [self._miss(i, key)]

    def _miss(self, i: int, key: Key) -> bytes:
        """The header of a miss, and the position as of which there is surely no such block."""
        at = self._surely_not(key)
        if at is None:
            return BLOCK.pack(i, MISS, 0, 0, key)
        header = BLOCK.pack(i, MISS, POSITION.size, 0, key)
        return header + POSITION.pack(at.incarnation, at.number)

    def _surely_not(self, key: Key) -> Position | None:
        """As of which position there is surely no such block; `None` if that is not sure.

        The position comes first: what is published after it may be of a block that has come since.
        """
        at = self._cluster.position() if self._cluster is not None else None
        own = self._blocks()
        try:
            sure = at is not None and (own is None or own.lacks(key))
        except ClosedError:
            sure = False
        return at if sure else None


def _part_blocks(own: OwnBlocks | None) -> int:
    """How many blocks are leased together."""
    return (
        _PART_BLOCKS if own is None else max(1, min(_PART_BLOCKS, _PART_BYTES // own.block_bytes))
    )
