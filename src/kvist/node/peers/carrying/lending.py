"""The owner's side of one reader whose blocks are carried: what it has borrowed, and how long."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from kvist.cluster.directory import Position
from kvist.core.errors import ClosedError, LeaseError
from kvist.core.keys import Key
from kvist.core.outcome import Outcome
from kvist.node.peers import messages as m
from kvist.node.peers.carrying.carrier import Carrier, Shown
from kvist.node.peers.wire import Wire
from kvist.store.leases import TieredReadLease

_log = logging.getLogger(__name__)
_STALL_S = 5.0  # an answer that the reader does not take for so long
_GRACE_S = 1.0  # for the word of the reader that it is done


class Lending:
    """At most one loan of one connection. Used by one thread."""

    def __init__(
        self,
        wire: Wire,
        carrier: Callable[[str], Carrier | None],
        surely_not: Callable[[Key], Position | None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Has lent nothing yet.

        Args:
            wire: to the reader.
            carrier: what shows the keyspace's arena as it is now, for a kind of carriers.
            surely_not: as of which position a block is not here, if that is sure.
            clock: seconds that only grow.
        """
        self._wire, self._carrier, self._surely_not = wire, carrier, surely_not
        self._clock = clock
        self._kind = ""
        self._told: Shown | None = None
        self._lease: TieredReadLease | None = None
        self._attending: Carrier | None = None
        self._over_s = 0.0

    def over_s(self, otherwise: float) -> float:
        """When what is lent is taken back; `otherwise` where nothing is lent."""
        return otherwise if self._lease is None else self._over_s

    def carry(self, request: m.Carry) -> None:
        """Tells how this node's memory is read.

        Raises:
            OSError: the reader is gone.
        """
        self._kind = request.kind
        carrier = self._carrier(self._kind)
        self._told = None if carrier is None else carrier.shown
        contact = b"" if self._told is None else self._told.contact
        self._wire.tell(m.Carried(contact), self._clock() + _STALL_S)

    def lend(
        self, lease: TieredReadLease | None, keys: Sequence[Key], until: float
    ) -> list[m.Loan]:
        """Lends what `lease` holds, which is of `keys`, and owns it; what it says of each.

        Raises:
            OSError: the reader is gone.
        """
        self._lease, self._over_s = lease, until + _GRACE_S
        carrier = self._carrier(self._kind) if self._told is not None else None
        shown = None if carrier is None else carrier.shown
        current = shown is not None and shown is self._told
        if carrier is None or shown is None or not current or lease is None:
            loans = [(key, m.Loan.ASK, 0, 0) for key in keys]
        else:
            self._attending = carrier
            carrier.attend(1)
            loans = [self._loan(lease, i, key, shown.address) for i, key in enumerate(keys)]
        packed = b"".join(m.pack_loan(*loan) for loan in loans)
        self._wire.tell(m.Lent(current, packed), self._clock() + _STALL_S)
        return [loan for _, loan, _, _ in loans]

    def give_back(self) -> None:
        """Nothing is lent any more. Idempotent."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        if self._attending is not None:
            self._attending.attend(-1)
            self._attending = None

    def _loan(
        self, lease: TieredReadLease, i: int, key: Key, base: int
    ) -> tuple[Key, m.Loan, int, int]:
        """Waits for block i, and says where it is."""
        try:
            if lease.wait(i) is Outcome.HIT:
                return key, m.Loan.LENT, base + lease.slot(i), lease.checksum(i)
        except (ClosedError, LeaseError) as error:
            _log.debug("a block is not lent: %s", error)  # the store closes
        at = self._surely_not(key)
        if at is None:
            return key, m.Loan.MISS, 0, 0
        return key, m.Loan.SURELY_NOT, at.incarnation, at.number
