"""The two kinds of lease over a tiered store (contract: `core/lease.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from kvist.core.errors import LeaseError
from kvist.core.outcome import Outcome
from kvist.native import checksum
from kvist.store.desk import WAKE_S, Desk
from kvist.store.entry import Entry, State

_OUTCOMES = {
    State.LOADING: Outcome.PENDING,
    State.DIRTY: Outcome.HIT,
    State.CLEAN: Outcome.HIT,
    State.FAILED: Outcome.MISS,
    State.WRITING: Outcome.MISS,
}


class TieredReadLease:
    """Blocks held for reading. After its release every outcome is `MISS`: it holds nothing.

    Outcomes are read without the lock: the state of an entry that is held only moves from LOADING
    to CLEAN or FAILED and from DIRTY to CLEAN, and Python reads an attribute atomically.
    """

    def __init__(self, desk: Desk, items: Sequence[Entry | None], *, deadline: float) -> None:
        """`items[i]` carries one reference for this lease; `None` is a miss."""
        self._desk = desk
        self._items = list(items)
        self._deadline = deadline
        self._decided = 0  # nothing before this index is pending any more
        self._run = 0
        self._released = False

    def __len__(self) -> int:
        return len(self._items)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.release()

    def outcome(self, i: int) -> Outcome:
        """State of block i now."""
        out = self._peek(i)
        if out is Outcome.PENDING and self._expired():
            return self._peek(i)
        return out

    def ready(self) -> bool:
        """Whether no block is pending."""
        items = self._items
        while self._decided < len(items):
            if self._peek(self._decided) is Outcome.PENDING:
                return self._expired()
            self._decided += 1
        return True

    def wait(self, i: int, *, timeout_s: float | None = None) -> Outcome:
        """Blocks until block i is decided, the deadline has passed or `timeout_s` is over."""
        desk = self._desk
        until = self._deadline if timeout_s is None else desk.clock() + timeout_s
        with desk.changed:
            while self._peek(i) is Outcome.PENDING and not self._expired():
                left = min(self._deadline, until) - desk.clock()
                if left <= 0:
                    break
                desk.changed.wait(min(left, WAKE_S))
            return self._peek(i)

    def hits(self) -> int:
        """Length of the run of hits from the start, now."""
        if self._released:
            return 0
        while self._run < len(self._items) and self._peek(self._run) is Outcome.HIT:
            self._run += 1
        return self._run

    def slot(self, i: int) -> int:
        """Byte offset of block i in the arena.

        Raises:
            LeaseError: block i is not a hit, or the lease was released.
        """
        return self._desk.table.arena.offset(self._hit(i).slot)

    def buffer(self, i: int) -> memoryview:
        """The bytes of block i, read-only; must not be used after the release.

        Raises:
            LeaseError: block i is not a hit, or the lease was released.
        """
        return self._desk.table.view(self._hit(i)).toreadonly()

    def checksum(self, i: int) -> int:
        """Of the bytes of block i (XXH3-64): its writer's, or taken now and kept.

        Raises:
            LeaseError: block i is not a hit, or the lease was released.
            ClosedError: the store was closed.
        """
        entry = self._hit(i)
        if entry.checksum is None:
            entry.checksum = checksum(self._desk.table.view(entry))
        return entry.checksum

    def release(self) -> None:
        """Lets every block go; loads that nobody else waits for are cancelled. Idempotent."""
        desk = self._desk
        with desk.lock:
            if self._released:
                return
            self._released = True
            desk.leases.discard(self)
            for i in reversed(range(len(self._items))):  # the head of a prefix ends as the hottest
                entry = self._items[i]
                self._items[i] = None
                if entry is None:
                    continue
                if entry.resident:
                    desk.use(entry)
                desk.let_go(entry)

    def held(self) -> list[Entry]:
        """Entries that this lease counts a reference for."""
        return [entry for entry in self._items if entry is not None]

    def _peek(self, i: int) -> Outcome:
        entry = self._items[i]
        return Outcome.MISS if entry is None else _OUTCOMES[entry.state]

    def _expired(self) -> bool:
        """Past the deadline, turns what is pending into misses of this lease."""
        desk = self._desk
        if desk.clock() < self._deadline:
            return False
        with desk.lock:
            for i, entry in enumerate(self._items):
                if entry is not None and entry.state is State.LOADING:
                    self._items[i] = None
                    desk.let_go(entry)
                    desk.table.counters.late += 1
        return True

    def _hit(self, i: int) -> Entry:
        entry = self._items[i]
        if entry is None or not entry.resident:
            cause = "the lease was released" if self._released else self._peek(i).value
            raise LeaseError(f"no bytes for block {i}: {cause}")
        return entry


class TieredWriteLease:
    """Slots held for writing. A committed block stays valid here until release, now immutable."""

    def __init__(self, desk: Desk, items: Sequence[Entry | None], *, commit_as: State) -> None:
        """`items[i]` is a WRITING entry of this lease; `None` where the block was present."""
        self._desk = desk
        self._items = list(items)
        self._present = [entry is None for entry in items]
        self._commit_as = commit_as
        self._released = False

    def __len__(self) -> int:
        return len(self._items)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.release()

    def present(self, i: int) -> bool:
        """Whether block i needed no slot, because someone has or is writing it."""
        return self._present[i]

    def slot(self, i: int) -> int:
        """Byte offset of block i in the arena.

        Raises:
            LeaseError: block i has no slot here, or the lease was released.
        """
        return self._desk.table.arena.offset(self._entry(i).slot)

    def buffer(self, i: int) -> memoryview:
        """The bytes of block i; writable until its commit, which makes them immutable.

        Raises:
            LeaseError: block i has no slot here, or the lease was released.
        """
        entry = self._entry(i)
        view = self._desk.table.view(entry)
        return view if entry.state is State.WRITING else view.toreadonly()

    def commit(self, i: int, *, checksum: int | None = None) -> bool:
        """Makes block i visible. False if another writer was first: then this one is dropped.

        `checksum` goes down with the block; without it, it is taken when the block goes down.

        Raises:
            LeaseError: block i has no slot in this lease or was committed before.
        """
        desk = self._desk
        with desk.lock:
            entry = self._entry(i)
            if entry.state is not State.WRITING:
                raise LeaseError(f"block {i} was committed before")
            if entry.detached and not desk.table.reattach(entry):
                self._items[i] = None
                desk.table.fail(entry)
                desk.table.counters.write_lost += 1
                return False
            entry.checksum = checksum
            desk.table.admit(entry, desk.filtered(entry, self._commit_as))
            desk.table.counters.committed += 1
            desk.write_work.notify()
        desk.outbox.drain()
        return True

    def release(self) -> None:
        """Frees what was not committed. Idempotent."""
        desk = self._desk
        with desk.lock:
            if self._released:
                return
            self._released = True
            desk.leases.discard(self)
            for i in reversed(range(len(self._items))):  # the head of a prefix ends as the hottest
                entry = self._items[i]
                self._items[i] = None
                if entry is None:
                    continue
                if entry.state is State.WRITING:
                    desk.table.fail(entry)
                    desk.table.counters.abandoned += 1
                    continue
                desk.use(entry)
                desk.let_go(entry)

    def held(self) -> list[Entry]:
        """Entries that this lease counts a reference for."""
        return [entry for entry in self._items if entry is not None]

    def _entry(self, i: int) -> Entry:
        entry = self._items[i]
        if entry is None:
            cause = "the lease was released" if self._released else "it was present or lost"
            raise LeaseError(f"no slot for block {i}: {cause}")
        return entry
