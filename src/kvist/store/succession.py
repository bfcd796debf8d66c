"""DRAM goes from one process to the next: what a store leaves, and how the next one takes it over.

A store that has closed leaves its arena's memory and an `Estate`: which block is in which slot,
with the checksum of its bytes. The next store opens the same memory. Every slot that the estate
names is taken at once, by an entry that nobody sees; a thread then proves one block after the other
and makes it visible, coldest first, so that the order of eviction is again that of their use. Until
then a block counts as absent: who needs it computes or loads it, and the copy that is proven later
gives way. A block whose bytes are not those that the checksum was taken of is dropped.

    slot named ──► taken ──bytes proven──► DIRTY or CLEAN
                     │└── damaged, cleared, or there by now ──► free
    slot fenced ──► taken ──nobody can touch it any more──► as above; free, if it has no block

A fenced slot is one that a process which the former owner served may still read or write: a late
copy could change it, and whoever reads it must not see another block. `Fences` knows when that is
over. No byte of it is looked at before.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Thread
from typing import Protocol

from kvist.core.errors import ClosedError
from kvist.core.keys import Key
from kvist.native import checksum
from kvist.store.desk import WAKE_S, Desk, Holder
from kvist.store.entry import NO_SLOT, Entry, State
from kvist.store.link import LowerLink
from kvist.tiers.dram import ArenaMap

_log = logging.getLogger(__name__)
_JOIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Bequest:
    """A block in a slot.

    `checksum`: XXH3-64 of its bytes. `dirty`: it is nowhere below, though it may go there. For
    `refused`, `lent` and `pinned` see `entry.py`.
    """

    key: Key
    parent: Key | None
    slot: int
    checksum: int
    tenant: str = ""
    dirty: bool = False
    refused: bool = False
    lent: bool = False
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Estate:
    """What is where in an arena: `blocks`, coldest first, and the slots that others may touch.

    `touched_slots`: how many slots, from the first on, were ever in use.
    """

    touched_slots: int
    blocks: Sequence[Bequest]
    fenced: frozenset[int] = frozenset()


class Fences(Protocol):
    """Knows which processes may still touch slots."""

    def wait(self, timeout_s: float) -> Collection[int]:
        """Slots that nobody can touch any more, since the last call; waits for the first."""
        ...

    def pipes(self) -> Mapping[int, frozenset[int]]:
        """Descriptors whose end says that nobody can touch some slots, which are not over."""
        ...

    def close(self) -> None:
        """Nobody asks any more. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Legacy:
    """An arena that is left: its memory, which whoever takes this owns, and its estate."""

    fd: int
    size_bytes: int
    slot_bytes: int
    estate: Estate
    fences: Fences


class Succession:
    """What one store takes over from the one before it, and leaves to the next."""

    def __init__(self, desk: Desk, link: LowerLink | None) -> None:
        self._desk, self._link = desk, link
        self._ready: deque[tuple[Entry, Bequest]] = deque()  # to be proven
        self._fenced: dict[int, tuple[Entry, Bequest | None]] = {}  # by slot
        self._fences: Fences | None = None
        self._clears = 0
        self._stopping = False
        self._thread: Thread | None = None

    @property
    def fences(self) -> Mapping[int, frozenset[int]]:
        """Descriptors whose end is waited for, and the slots behind each."""
        return {} if self._fences is None else self._fences.pipes()

    def held(self) -> list[Entry]:
        """Entries of slots that are taken and whose blocks nobody sees yet."""
        waiting = [entry for entry, _ in self._ready]
        return waiting + [entry for entry, _ in self._fenced.values()]

    def inherit(self, estate: Estate, fences: Fences) -> None:
        """Takes over what is in the arena, on a thread of its own; before anything else is stored.

        Raises:
            StoreError: the estate names slots that are not there, or one twice.
        """
        desk, table = self._desk, self._desk.table
        with desk.lock:
            self._clears = table.clears
            named = {block.slot: block for block in estate.blocks}
            slots = named.keys() | estate.fenced
            table.arena.claim(
                [*(block.slot for block in estate.blocks), *(estate.fenced - named.keys())],
                touched=estate.touched_slots,
            )
            if not slots:
                fences.close()
                return
            desk.leases.add(self)
            for block in estate.blocks:
                entry = table.take_over(block.key, block.parent, block.slot, block.tenant)
                if block.slot in estate.fenced:
                    self._fenced[block.slot] = (entry, block)
                else:
                    self._ready.append((entry, block))
            for slot in estate.fenced - named.keys():
                self._fenced[slot] = (table.take_over(b"", None, slot, ""), None)
            self._fences = fences
        self._thread = Thread(target=self._run, name="kvist-adopt", daemon=True)
        self._thread.start()

    def halt(self) -> None:
        """Nothing is taken over any more: the store is about to close, and to `leave`."""
        self._stopping = True

    def leave(self, leases: Collection[Holder], arena: ArenaMap, *, until: float) -> Estate | None:
        """What the store leaves, which has closed after `halt`.

        `None` if this process, or one that nobody knows of, may still touch a slot.

        Args:
            leases: those that processes hold whose end is known: their slots are fenced.
            arena: a mapping of the arena, for the store's own is gone.
            until: of the store's clock; a block without a checksum by then is not left.
        """
        desk = self._desk
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                return None
        with desk.lock:
            table = desk.table
            entries = (*table.entries.values(), *table.detached)
            if any(entry.busy for entry in entries) or desk.leases - {*leases, self}:
                return None
            fenced = {e.slot for lease in leases for e in lease.held() if e.slot != NO_SLOT}
            fenced |= self._fenced.keys()
            blocks = [block for _, block in self._waiting() if block is not None]
            for key in table.policy.victims():
                entry = table.entries[key]
                if table.ages is None or table.ages.live(key):
                    blocks.append(self._left(entry))
        return Estate(
            table.arena.touched_slots, self._summed(blocks, arena, until), frozenset(fenced)
        )

    def _waiting(self) -> list[tuple[Entry, Bequest | None]]:
        """What this store has not come to take over itself."""
        if self._clears != self._desk.table.clears:
            return []
        return [*self._ready, *self._fenced.values()]

    def _left(self, entry: Entry) -> Bequest:
        return Bequest(
            entry.key,
            entry.parent,
            entry.slot,
            -1 if entry.checksum is None else entry.checksum,
            tenant=entry.tenant,
            dirty=entry.state is State.DIRTY or self._link is None,
            refused=entry.refused,
            lent=entry.lent,
            pinned=entry.pinned,
        )

    def _summed(self, blocks: list[Bequest], arena: ArenaMap, until: float) -> list[Bequest]:
        """With the checksums that nobody has taken yet, the hottest blocks first."""
        raw_bytes, clock = self._desk.table.raw_bytes, self._desk.clock
        found: list[Bequest] = []
        for block in reversed(blocks):
            if block.checksum < 0:
                if clock() >= until:
                    continue
                taken = checksum(arena.view(block.slot)[:raw_bytes])
                block = replace(block, checksum=taken)
            found.append(block)
        found.reverse()
        return found

    # -- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        fences = self._fences
        assert fences is not None
        proven = 0
        while not self._over():
            if not self._ready:
                self._unfence(fences.wait(WAKE_S))
                continue
            try:
                proven += self._prove(*self._ready[0])
            except ClosedError:
                break
            if not self._ready:
                _log.info("%d blocks were taken over", proven)
        if self._stopping:
            return  # what is left goes to the next one
        fences.close()

    def _over(self) -> bool:
        """Whether nothing is left to be done, or the store has closed."""
        desk = self._desk
        with desk.lock:
            if not self._ready and not self._fenced:
                desk.leases.discard(self)
                return True
            return self._stopping or desk.table.arena.fd < 0

    def _prove(self, entry: Entry, block: Bequest) -> bool:
        """Makes a block visible whose bytes are as they were left; whether it did.

        Raises:
            ClosedError: the store was closed.
        """
        desk, table = self._desk, self._desk.table
        sound = checksum(table.view(entry)) == block.checksum
        with desk.lock:
            self._ready.popleft()
            adopted = sound and self._clears == table.clears and table.reattach(entry)
            if adopted:
                entry.checksum, entry.pinned = block.checksum, block.pinned
                table.admit(entry, self._state_of(entry, block))
                table.unref(entry)
                table.counters.adopted += 1
                if entry.state is State.DIRTY:
                    desk.write_work.notify()
            else:
                table.fail(entry)
                table.counters.adopt_failed += 1
        desk.outbox.drain()
        if not sound:
            _log.warning("the bytes in slot %d are not those of its block", block.slot)
        return adopted

    def _state_of(self, entry: Entry, block: Bequest) -> State:
        link = self._link
        if link is not None and block.refused:
            entry.refused = True
        elif link is not None and block.dirty and not link.keeps(block.key):
            entry.lent = block.lent
            return self._desk.filtered(entry, State.DIRTY)
        return State.CLEAN

    def _unfence(self, slots: Collection[int]) -> None:
        """Nobody can touch these slots any more."""
        with self._desk.lock:
            for slot in slots:
                entry, block = self._fenced.pop(slot, (None, None))
                if entry is None:
                    continue
                if block is None:
                    self._desk.table.fail(entry)
                else:
                    self._ready.append((entry, block))
