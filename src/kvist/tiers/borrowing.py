"""This host's own tier below DRAM, and what other hosts lend beside it.

Blocks are written to the own tier only. They are read from where this host has them itself, else
from a lender, else from a remote that the own tier may have: what one of them turns out not to
have is asked of the other. A lender that fails is a miss, never an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Protocol

from kvist.core.errors import ClosedError, TierError
from kvist.core.keys import Key
from kvist.core.outcome import Outcome, ReadTotals, Tier
from kvist.tiers.busy import BusyMeter
from kvist.tiers.protocol import (
    BatchReader,
    ListedBlock,
    Lists,
    LowerTier,
    Payload,
    RunFinder,
    Sampled,
    Space,
    Stacked,
    TellsEvictions,
    TellsOwn,
    TellsSpace,
)

_Reads = Iterator[tuple[int, Outcome | TierError]]


class Keeper(LowerTier, RunFinder, BatchReader, TellsEvictions, Protocol):
    """A tier that this host writes to."""

    def clear(self) -> None:
        """Forgets every block of this keyspace.

        Raises:
            TierError: the medium failed.
        """
        ...


class Lender(LowerTier, RunFinder, BatchReader, Sampled, Protocol):
    """What others have. `put` does nothing, `remove` and `clear` forget what was believed."""

    def known_run(self, keys: Sequence[Key]) -> int:
        """As `contains_run`, without ever waiting or asking anybody."""
        ...

    def clear(self) -> None:
        """Forgets what was believed; others keep what is theirs."""
        ...


class BorrowingTier:
    """A `LowerTier` of the two. Thread-safe."""

    def __init__(
        self,
        own: Keeper | None,
        lender: Lender,
        *,
        own_name: Tier = Tier.SSD,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Owns both; `own` is reported as `own_name` where it does not tell its media apart."""
        self._own = own
        self._lender = lender
        self._own_name = own_name
        self._stack = own if isinstance(own, Stacked) else None
        self._teller = own if isinstance(own, TellsOwn) else None
        self._own_meter, self._lent_meter = BusyMeter(clock), BusyMeter(clock)
        self._closed = False

    def contains(self, key: Key) -> bool:
        """Whether `key` is here, or believed to be with a lender. No I/O."""
        return self.keeps(key) or (not self._closed and self._lender.contains(key))

    def contains_run(self, keys: Sequence[Key]) -> int:
        """How many keys from the first on are here or there; one probe of the lenders at most."""
        run = self._known_run(keys)
        if run < len(keys) and not self._closed:
            found = self._lender.contains_run(keys[run:])
            if found:
                run += found + self._known_run(keys[run + found :])
        return run

    def keeps(self, key: Key) -> bool:
        """See `tiers.protocol.TellsOwn`: what a lender has is not kept."""
        return not self._closed and self._own is not None and self._own.contains(key)

    def holds(self, key: Key) -> bool:
        """See `tiers.protocol.TellsOwn`."""
        if self._closed or self._own is None:
            return False
        return self._own.contains(key) if self._teller is None else self._teller.holds(key)

    def lacks(self, key: Key) -> bool:
        """See `tiers.protocol.TellsOwn`."""
        if self._closed or self._own is None:
            return False
        return not self._own.contains(key) if self._teller is None else self._teller.lacks(key)

    def tiers_of(self, keys: Sequence[Key]) -> tuple[Tier, ...]:
        """See `tiers.protocol.Stacked`."""
        return tuple(Tier.PEER if self._is_lent(key) else self._own_tier(key) for key in keys)

    def put(self, payloads: Sequence[Payload]) -> None:
        """Stores blocks in the own tier; without one, nothing is stored.

        Raises:
            TierError: the own tier failed.
            ClosedError: the tier was closed.
        """
        self._demand_open()
        if self._own is not None:
            self._own.put(payloads)

    def read_into(self, key: Key, out: memoryview) -> Outcome:
        """Reads and proves one block.

        Raises:
            TierError: the own tier failed.
            ClosedError: the tier was closed.
        """
        outcome = dict(self.read_many([(key, out)]))[0]
        if isinstance(outcome, TierError):
            raise outcome
        return outcome

    def read_many(self, items: Sequence[tuple[Key, memoryview]]) -> _Reads:
        """Reads from both at once; what one turns out not to have is asked of the other.

        Raises:
            ClosedError: the tier was closed.
        """
        self._demand_open()
        return self._read_many(items)

    def _read_many(self, items: Sequence[tuple[Key, memoryview]]) -> _Reads:
        lent = [i for i, (key, _) in enumerate(items) if self._is_lent(key)]
        mine = sorted(set(range(len(items))).difference(lent))
        to_borrow: list[int] = []
        to_own: list[int] = []
        with closing(self._borrow(items, lent)) as borrowed:
            next(borrowed)
            for i, outcome in self._read_own(items, mine):
                if outcome is Outcome.HIT or not self._lender.known_run((items[i][0],)):
                    yield i, outcome
                else:
                    to_borrow.append(i)
            for i, outcome in borrowed:
                if outcome is Outcome.HIT or not self.keeps(items[i][0]):
                    yield i, outcome
                else:
                    to_own.append(i)
        with closing(self._borrow(items, to_borrow)) as borrowed:
            next(borrowed)
            yield from self._read_own(items, to_own)
            yield from borrowed

    def _read_own(self, items: Sequence[tuple[Key, memoryview]], chosen: Sequence[int]) -> _Reads:
        if not chosen:
            return
        if self._own is None:
            yield from ((i, Outcome.MISS) for i in chosen)
            return
        with self._own_meter.busy():
            for n, outcome in self._own.read_many([items[i] for i in chosen]):
                if outcome is Outcome.HIT:
                    self._own_meter.count(items[chosen[n]][1].nbytes)
                yield chosen[n], outcome

    def _borrow(
        self, items: Sequence[tuple[Key, memoryview]], chosen: Sequence[int]
    ) -> Generator[tuple[int, Outcome | TierError], None, None]:
        """Begins to read, yields once for that, and then what became of each."""
        if not chosen:
            yield -1, Outcome.PENDING
            return
        with self._lent_meter.busy():
            reads = self._lender.read_many([items[i] for i in chosen])
            try:
                yield -1, Outcome.PENDING
                for n, outcome in reads:
                    if outcome is Outcome.HIT:
                        self._lent_meter.count(items[chosen[n]][1].nbytes)
                    yield chosen[n], outcome
            finally:
                if isinstance(reads, Generator):
                    reads.close()

    def remove(self, keys: Iterable[Key]) -> None:
        """Forgets blocks here; lenders keep theirs.

        Raises:
            TierError: the own tier failed.
            ClosedError: the tier was closed.
        """
        self._demand_open()
        gone = list(keys)
        self._lender.remove(gone)
        if self._own is not None:
            self._own.remove(gone)

    def clear(self) -> None:
        """Forgets every block of this keyspace here; lenders keep theirs.

        Raises:
            TierError: the own tier failed.
            ClosedError: the tier was closed.
        """
        self._demand_open()
        self._lender.clear()
        if self._own is not None:
            self._own.clear()

    def tell_evictions(self, tell: Callable[[Sequence[Key]], None]) -> None:
        """See `tiers.protocol.TellsEvictions`; tells of the own tier's."""
        if self._own is not None:
            self._own.tell_evictions(tell)

    def list_blocks(self, *, newest_first: bool = False) -> Iterator[ListedBlock]:
        """See `tiers.protocol.Lists`; names the own tier's blocks."""
        if not isinstance(self._own, Lists):
            return iter(())
        return self._own.list_blocks(newest_first=newest_first)

    def space(self) -> Space | None:
        """See `tiers.protocol.TellsSpace`: the own tier's."""
        return self._own.space() if isinstance(self._own, TellsSpace) else None

    def read_totals(self) -> Mapping[Tier, ReadTotals]:
        """See `tiers.protocol.Stacked`."""
        totals = {Tier.PEER: self._lent_meter.totals()}
        if self._stack is not None:
            return totals | dict(self._stack.read_totals())
        return totals if self._own is None else totals | {self._own_name: self._own_meter.totals()}

    def samples(self) -> Mapping[str, float]:
        """See `tiers.protocol.Sampled`."""
        samples = dict(self._lender.samples())
        if isinstance(self._own, Sampled):
            samples |= self._own.samples()
        return samples

    def close(self) -> None:
        """Closes both. Idempotent.

        Raises:
            TierError: the own tier failed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._own is not None:
                self._own.close()
        finally:
            self._lender.close()

    def _known_run(self, keys: Sequence[Key]) -> int:
        run = 0
        while run < len(keys) and not self._closed:
            here = self._own.contains_run(keys[run:]) if self._own is not None else 0
            there = self._lender.known_run(keys[run + here :])
            if not here + there:
                break
            run += here + there
        return run

    def _is_lent(self, key: Key) -> bool:
        return not self.holds(key) and self._lender.known_run((key,)) == 1

    def _own_tier(self, key: Key) -> Tier:
        return self._own_name if self._stack is None else self._stack.tiers_of((key,))[0]

    def _demand_open(self) -> None:
        if self._closed:
            raise ClosedError("the tier was closed")
