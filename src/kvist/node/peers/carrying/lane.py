"""The reader's side: blocks of a peer that lie in staging before they are in their slots.

A connection begins as a plain one. Where the peer has a carrier of our kind, its blocks are lent
and read; else, and whenever that fails, they are sent over the connection as ever. Only what is
late is a miss, as over TCP.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock

from kvist.core.errors import TierError, TierTimeout
from kvist.core.keys import Key
from kvist.native import Answers, answers_twin, copy_checksum
from kvist.native.answer import DAMAGED, HIT, MISS
from kvist.native.answers_twin import Taken
from kvist.node.peers import messages as m
from kvist.node.peers.carrying.staging import Lot, Staging
from kvist.node.peers.carrying.words import Piece
from kvist.node.peers.wire import Wire
from kvist.node.protocol import join_keys, split_keys
from kvist.tiers.dram import padded

_log = logging.getLogger(__name__)
_ABSENT_S = 1.0  # until a peer without a carrier is asked again
REST_S = 5.0  # after a failure
_MOST_RESTS = 60  # times that, where it keeps failing


@dataclass(slots=True)
class CarriedCounts:
    """Totals of what was carried here. Thread-safe."""

    blocks: int = 0
    size_bytes: int = 0
    failures: int = 0
    _lock: Lock = field(default_factory=Lock)

    def add(self, blocks: int, size_bytes: int) -> None:
        """Blocks have come."""
        with self._lock:
            self.blocks += blocks
            self.size_bytes += size_bytes

    def fail(self) -> None:
        """Some have not."""
        with self._lock:
            self.failures += 1


class Lane:
    """How blocks of one peer and keyspace travel. Thread-safe."""

    def __init__(
        self,
        name: str,
        kind: str,
        staging: Staging,
        counts: CarriedCounts,
        *,
        block_bytes: int,
        rest_s: float = REST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """For the peer `name`, whose blocks have `block_bytes`."""
        self.kind, self.staging, self.counts = kind, staging, counts
        self.block_bytes, self.stride_bytes = block_bytes, padded(block_bytes)
        self.blocks = min(staging.lot_bytes // self.stride_bytes, m.MOST_LEND_KEYS)
        self._name, self._clock = name, clock
        self._lock = threading.Lock()
        self._rest_until, self._rest_s, self._first_rest_s = 0.0, rest_s, rest_s
        self._said = False

    def usable(self) -> bool:
        """Whether blocks may be carried now."""
        ready = self.blocks > 0 and self.staging.carrier.shown is not None
        return ready and self._clock() >= self._rest_until

    def absent(self) -> None:
        """The peer has no carrier of our kind, or none that is ready."""
        with self._lock:
            self._rest_until = self._clock() + _ABSENT_S
            said, self._said = self._said, True
        if not said:
            _log.info("peer %s does not offer %s: its blocks come over TCP", self._name, self.kind)

    def works(self) -> None:
        """Blocks have come."""
        with self._lock:
            self._rest_s = self._first_rest_s

    def fails(self, why: str) -> None:
        """Blocks have not come; for a while, longer each time, they come over TCP."""
        with self._lock:
            if self._clock() >= self._rest_until:
                self._rest_until = self._clock() + self._rest_s
                self._rest_s = min(2 * self._rest_s, _MOST_RESTS * self._first_rest_s)
        self.counts.fail()
        _log.warning("peer %s over %s: %s; its blocks come over TCP", self._name, self.kind, why)


class _Borrowing(answers_twin.Answers):
    """Answers that are not sent. What cannot be lent is asked for in the `plain` way at the end."""

    def __init__(self, keys: Sequence[Key], outs: Sequence[memoryview]) -> None:
        super().__init__(keys, outs)
        self.waiting = list(range(len(keys)))  # not lent yet, nor left to the plain way
        self.plainly: list[int] = []
        self.plain: Answers | None = None

    def key(self, n: int) -> Key:
        """Of block n, which is not answered yet."""
        return self._slots[n][0]

    def out(self, n: int) -> memoryview:
        """Where block n goes."""
        return self._slots[n][1]

    def answered(self, n: int) -> None:
        """Block n is settled."""
        del self._slots[n]


class CarriedWire(Wire):
    """A connection whose blocks go another way where they can."""

    def __init__(self, wire: Wire, lane: Lane, clock: Callable[[], float] = time.monotonic) -> None:
        """Takes the place of `wire`, on which the handshake is over."""
        super().__init__(wire.connection, clock)
        self.protocol = wire.protocol
        self._lane = lane
        self._contact = b""
        self._lot: Lot | None = None

    def ask(self, request: m.Request, until: float) -> None:
        """As of `Wire`."""
        if isinstance(request, m.Read) and self._borrows(until):
            self._lend(split_keys(request.keys), until)
        else:
            super().ask(request, until)

    def answers(self, keys: Sequence[Key], outs: Sequence[memoryview]) -> Answers:
        """As of `Wire`."""
        return super().answers(keys, outs) if self._lot is None else _Borrowing(keys, outs)

    def take(self, answers: Answers, until: float, each_s: float, tell_s: float) -> list[Taken]:
        """As of `Wire`: what is lent comes together."""
        if not isinstance(answers, _Borrowing):
            return super().take(answers, until, each_s, tell_s)
        taken: list[Taken] = []
        while answers.left and not taken:
            if answers.plain is None:
                taken = self._carried(answers, until, min(until, self._clock() + each_s))
                continue
            order = answers.plainly
            for at, found, position in super().take(answers.plain, until, each_s, tell_s):
                answers.answered(order[at])
                taken.append((order[at], found, position))
        return taken

    def close(self) -> None:
        """As of `Wire`."""
        super().close()
        self._give_lot()

    # -- the parts of a read ----------------------------------------------------------------

    def _borrows(self, until: float) -> bool:
        """Whether blocks can be borrowed now: there is a carrier on both sides, and a lot."""
        if not self._lane.usable():
            return False
        if not self._contact:
            self.tell(m.Carry(self._lane.kind), until)
            raw = self.hear(m.MOST_CARRIED_BYTES, until)
            self._contact = m.decode(m.CARRIED, raw[m.HEAD.size :]).contact
            if not self._contact:
                self._lane.absent()
                return False
        self._lot = self._lane.staging.take()
        return self._lot is not None

    def _lend(self, keys: Sequence[Key], until: float) -> None:
        left_s = min(max(0.0, until - self._clock()), m.MOST_READ_S)
        self.tell(m.Lend(join_keys(keys[: self._lane.blocks]), left_s), until)

    def _carried(self, answers: _Borrowing, until: float, limit: float) -> list[Taken]:
        """One answer to `Lend`, and what was lent.

        Raises:
            TierTimeout: it is not there by `limit`.
            ProtocolError: the answer is none to what was asked.
            OSError: the connection is broken.
        """
        asked = answers.waiting[: self._lane.blocks]
        raw = self.hear(m.MOST_LENT_BYTES, limit)
        lent = m.decode(m.LENT, raw[m.HEAD.size :])
        loans = m.unpack_loans(lent.loans, [answers.key(n) for n in asked])
        if not lent.current:
            self._contact = b""
        del answers.waiting[: len(loans)]
        taken: list[Taken] = []
        there: list[tuple[int, int, int]] = []  # block, address, checksum
        for n, (loan, first, second) in zip(asked, loans, strict=False):
            if loan is m.Loan.LENT:
                there.append((n, first, second))
            elif loan is m.Loan.ASK:
                answers.plainly.append(n)
            else:
                at = (first, second) if loan is m.Loan.SURELY_NOT else None
                taken.append((n, MISS, at))
        if there and not self._fetched([address for _, address, _ in there], limit):
            answers.plainly += [n for n, _, _ in there]
            there = []
        if not self._contact:
            answers.plainly += answers.waiting
            answers.waiting = []
        self._go_on(answers, until)
        taken += self._prove(answers, there)
        for n, _, _ in taken:
            answers.answered(n)
        if not answers.waiting:
            self._give_lot()
        return taken

    def _fetched(self, addresses: Sequence[int], limit: float) -> bool:
        """Brings blocks to the lot; false if that failed.

        Raises:
            TierTimeout: they are not there by `limit`.
        """
        lane, lot = self._lane, self._lot
        assert lot is not None
        pieces = [
            Piece(address, lot.offset + i * lane.stride_bytes, lane.block_bytes)
            for i, address in enumerate(addresses)
        ]
        try:
            fetch = lane.staging.carrier.fetch(self._contact, pieces)
        except TierError as error:
            self._fail(error)
            return False
        try:
            fetch.result(max(0.0, limit - self._clock()))
        except TierError as error:
            if error.errno == errno.EIO:  # the carrier lives, so something may still come
                self._lot = None
                lane.staging.spoil(lot)
            self._fail(error)
            return False
        except TimeoutError as error:
            self._lot = None
            lane.staging.set_aside(lot, fetch)
            lane.fails("blocks did not come in time")
            raise TierTimeout(errno.ETIMEDOUT, "the other node is too slow") from error
        return True

    def _fail(self, error: TierError) -> None:
        """No more is borrowed on this connection before the owner has said anew how."""
        self._lane.staging.carrier.forget(self._contact)
        self._contact = b""
        self._lane.fails(error.strerror or str(error))

    def _go_on(self, answers: _Borrowing, until: float) -> None:
        """Asks for the next blocks, or says that what was lent is free again."""
        if answers.waiting:
            self._lend([answers.key(n) for n in answers.waiting], until)
        elif answers.plainly:
            keys = [answers.key(n) for n in answers.plainly]
            answers.plain = super().answers(keys, [answers.out(n) for n in answers.plainly])
            left_s = min(max(0.0, until - self._clock()), m.MOST_READ_S)
            self.tell(m.Read(join_keys(keys), left_s), until)
        else:
            self.tell(m.Returned(), until)

    def _prove(self, answers: _Borrowing, there: Sequence[tuple[int, int, int]]) -> list[Taken]:
        """Copies blocks out of the lot; what does not have its checksum is damaged."""
        if not there:
            return []
        assert self._lot is not None
        stride, size = self._lane.stride_bytes, self._lane.block_bytes
        taken: list[Taken] = []
        for i, (n, _, expected) in enumerate(there):
            source = self._lot.view[i * stride : i * stride + size]
            right = copy_checksum(answers.out(n), source) == expected
            taken.append((n, HIT if right else DAMAGED, None))
        hits = sum(found == HIT for _, found, _ in taken)
        self._lane.counts.add(hits, hits * size)
        self._lane.works()
        return taken

    def _give_lot(self) -> None:
        lot, self._lot = self._lot, None
        if lot is not None:
            self._lane.staging.give(lot)
