"""The two kinds of lease as a client of a node holds them (contract: `core/lease.py`).

What became of each block is told by the node as it happens, so that looking costs no round trip.
When the connection ends, a lease is dead: every block of it is a miss, nothing can be committed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from kvist.core.errors import LeaseError
from kvist.core.outcome import Outcome
from kvist.node import messages as m
from kvist.node.attachment import Attachment
from kvist.node.protocol import ProtocolError, unpack_slots

_LOOK_S = 0.5  # every wait looks again this often: a lost wake-up cannot hang it


class _NodeLease:
    """What both kinds have in common."""

    def __init__(self, attachment: Attachment, count: int) -> None:
        self._at, self._count = attachment, count
        self._number = -1  # until it is granted
        self._slots: list[int] = [m.NO_SLOT] * count
        self._released = False

    def __len__(self) -> int:
        return self._count

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.release()

    @property
    def dead(self) -> bool:
        """Whether it holds nothing any more."""
        return self._released or not self._at.alive

    def release(self) -> None:
        """Gives everything back. Idempotent."""
        if not self._released:
            self._released = True
            self._at.release(self._number)

    def _take(self, packed: bytes, count: int) -> tuple[int, ...]:
        """Slots that the node names, each of them in the arena."""
        slots = unpack_slots(packed)
        most = self._at.arena.size_bytes // self._at.arena.slot_bytes
        if len(slots) != count or any(most <= s != m.NO_SLOT for s in slots):
            raise ProtocolError("the node names slots that there are not")
        return slots


class NodeReadLease(_NodeLease):
    """Blocks held for reading."""

    def __init__(
        self,
        attachment: Attachment,
        count: int,
        *,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """What is still pending in `deadline_s` is a miss."""
        super().__init__(attachment, count)
        self._clock = clock
        self._deadline = clock() + deadline_s
        self._codes = bytearray(count)
        self._pending = 0
        self._run = 0

    def granted(self, reply: m.Leased | m.Reserved) -> None:
        """The node granted it.

        Raises:
            ProtocolError: it is not what was asked for.
        """
        if not isinstance(reply, m.Leased) or len(reply.outcomes) != self._count:
            raise ProtocolError("the node grants another lease than was asked for")
        self._slots = list(self._take(reply.slots, self._count))
        self._number = reply.lease
        self._codes[:] = reply.outcomes
        self._pending = self._codes.count(m.PENDING)

    def settled(self, news: m.Settled) -> None:
        """Blocks were decided. One that is late already stays a miss.

        Raises:
            ProtocolError: they are none of this lease's.
        """
        slots = self._take(news.slots, len(news.blocks))
        if any(i >= self._count for i in news.blocks) or len(news.outcomes) != len(slots):
            raise ProtocolError("the node tells of blocks that the lease does not have")
        for i, code, slot in zip(news.blocks, news.outcomes, slots, strict=True):
            if self._codes[i] == m.PENDING and code != m.PENDING:
                self._slots[i] = slot
                self._codes[i] = code
                self._pending -= 1

    def outcome(self, i: int) -> Outcome:
        """State of block i now."""
        if not 0 <= i < self._count:
            raise IndexError(i)
        if self.dead:
            return Outcome.MISS
        if self._codes[i] == m.PENDING and self._late():
            return Outcome.MISS
        code = self._codes[i]
        return Outcome.HIT if code == m.HIT and self._slots[i] != m.NO_SLOT else _OTHER[code]

    def ready(self) -> bool:
        """Whether no block is pending."""
        return self._pending == 0 or self.dead or self._late()

    def wait(self, i: int, *, timeout_s: float | None = None) -> Outcome:
        """Blocks until block i is decided, the deadline has passed or `timeout_s` is over."""
        until = self._deadline if timeout_s is None else self._clock() + timeout_s
        with self._at.changed:
            while (found := self.outcome(i)) is Outcome.PENDING:
                left = min(self._deadline, until) - self._clock()
                if left <= 0:
                    break
                self._at.changed.wait(min(left, _LOOK_S))
            return self.outcome(i) if found is Outcome.PENDING else found

    def hits(self) -> int:
        """Length of the run of hits from the start, now."""
        if self.dead:
            return 0
        while self._run < self._count and self.outcome(self._run) is Outcome.HIT:
            self._run += 1
        return self._run

    def slot(self, i: int) -> int:
        """Offset of block i, as the client's arenas are numbered (`client.py`).

        Raises:
            LeaseError: block i is not a hit, or the lease is over.
        """
        return self._at.base + self._at.arena.offset(self._hit(i))

    def buffer(self, i: int) -> memoryview:
        """The bytes of block i, read-only; must not be used after the release.

        Raises:
            LeaseError: block i is not a hit, or the lease is over.
        """
        return self._at.slot_view(self._hit(i)).toreadonly()

    def _hit(self, i: int) -> int:
        if self.outcome(i) is not Outcome.HIT:
            cause = "the lease is over" if self.dead else self.outcome(i).value
            raise LeaseError(f"no bytes for block {i}: {cause}")
        return self._slots[i]

    def _late(self) -> bool:
        """Past the deadline, turns what is pending into misses."""
        if self._clock() < self._deadline:
            return False
        with self._at.changed:
            for i, code in enumerate(self._codes):
                if code == m.PENDING:
                    self._codes[i] = m.MISS
            self._pending = 0
        return True


_OTHER = {m.MISS: Outcome.MISS, m.HIT: Outcome.MISS, m.PENDING: Outcome.PENDING}


class NodeWriteLease(_NodeLease):
    """Slots held for writing. A committed block stays valid here until release, now immutable."""

    def __init__(self, attachment: Attachment, count: int) -> None:
        super().__init__(attachment, count)
        self._present = [True] * count
        self._committed = [False] * count

    def granted(self, reply: m.Leased | m.Reserved) -> None:
        """The node granted it.

        Raises:
            ProtocolError: it is not what was asked for.
        """
        if not isinstance(reply, m.Reserved):
            raise ProtocolError("the node grants another lease than was asked for")
        self._slots = list(self._take(reply.slots, self._count))
        self._number = reply.lease
        self._present = [slot == m.NO_SLOT for slot in self._slots]

    def settled(self, news: m.Settled) -> None:
        """Nothing is ever pending here.

        Raises:
            ProtocolError: always.
        """
        raise ProtocolError("the node tells of blocks that are read in a lease to write")

    def present(self, i: int) -> bool:
        """Whether block i needed no slot, because someone has or is writing it."""
        return self._present[i]

    def slot(self, i: int) -> int:
        """Offset of block i, as the client's arenas are numbered (`client.py`).

        Raises:
            LeaseError: block i has no slot here, or the lease is over.
        """
        return self._at.base + self._at.arena.offset(self._held(i))

    def buffer(self, i: int) -> memoryview:
        """The bytes of block i; writable until its commit.

        Raises:
            LeaseError: block i has no slot here, or the lease is over.
        """
        view = self._at.slot_view(self._held(i))
        return view.toreadonly() if self._committed[i] else view

    def commit(self, i: int, *, checksum: int | None = None) -> bool:
        """Makes block i visible. False if another writer was first, or the node is gone.

        Raises:
            LeaseError: block i has no slot in this lease or was committed before.
        """
        return self.commit_many([i], [checksum])[0]

    def commit_many(self, blocks: Sequence[int], checksums: Sequence[int | None]) -> list[bool]:
        """Commits several blocks at once; for each what `commit` would say.

        Raises:
            LeaseError: one has no slot in this lease or was committed before; none is committed.
        """
        if self._at.alive:
            for i in blocks:
                self._held(i)
        elif self._released:
            raise LeaseError("the lease was released")
        if any(self._committed[i] for i in blocks):
            raise LeaseError(f"one of the blocks {list(blocks)} was committed before")
        for i in blocks:
            self._committed[i] = True
        done = self._ask(tuple(blocks), tuple(checksums))
        for i, fresh in zip(blocks, done, strict=True):
            if not fresh:
                self._slots[i] = m.NO_SLOT
        return done

    def _ask(self, blocks: tuple[int, ...], checksums: tuple[int | None, ...]) -> list[bool]:
        reply = self._at.call(lambda n: m.Commit(n, self._number, blocks, checksums))
        if isinstance(reply, m.Failed):
            raise LeaseError(reply.text)
        if not isinstance(reply, m.Committed) or len(reply.done) != len(blocks):
            return [False] * len(blocks)
        return [bool(fresh) for fresh in reply.done]

    def _held(self, i: int) -> int:
        slot = m.NO_SLOT if self.dead else self._slots[i]
        if slot == m.NO_SLOT:
            cause = "the lease is over" if self.dead else "it was present or lost"
            raise LeaseError(f"no slot for block {i}: {cause}")
        return slot
