"""Prefetch: blocks that somebody wishes to have in DRAM soon, brought up when no read waits.

A wish waits in a queue of its own and takes no slot there; when an io thread has nothing better to
do, it becomes a load like any other (single flight: a read of the key joins it). Wishes that wait,
loads under way and blocks that have come but were not read yet are together at most a fraction of
DRAM; a block stops counting there when it is read, evicted, or past the deadline of its wish. The
store's lock guards all of it.

What is restored after a start (`restore.py`) waits behind the wishes, has no deadline and takes
free slots only.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvist.core.keys import Key
from kvist.core.outcome import BlockRef
from kvist.store.ages import Ages
from kvist.store.entry import NO_SLOT, Entry, State
from kvist.store.link import LowerLink
from kvist.store.table import BlockTable

CAPACITY_DIVISOR = 8  # wishes take at most this part of DRAM


@dataclass(frozen=True, slots=True)
class Wish:
    """A block to be brought up, unless `deadline` (of the store's clock) comes first."""

    parent: Key | None
    deadline: float
    tenant: str
    restored: bool = False


def in_order(keys: Sequence[Key], tenant: str) -> list[BlockRef]:
    """Blocks of `tenant`, each taken as the child of the one before it."""
    return [BlockRef(key, keys[i - 1] if i else None, tenant) for i, key in enumerate(keys)]


class Prefetcher:
    """The wishes of one store."""

    def __init__(self, table: BlockTable, link: LowerLink, clock: Callable[[], float]) -> None:
        self._table = table
        self._link = link
        self._clock = clock
        self._most = max(1, table.arena.capacity_slots // CAPACITY_DIVISOR)
        self.waiting: OrderedDict[Key, Wish] = OrderedDict()
        self.under_way: dict[Entry, Wish] = {}
        self._restores: OrderedDict[Key, Wish] = OrderedDict()
        self._arrived: OrderedDict[Entry, float] = OrderedDict()  # not read yet → deadline

    def ask(self, blocks: Sequence[BlockRef], *, deadline: float) -> int:
        """Takes wishes for those of `blocks` that are below only; returns how many it took."""
        taken = 0
        room = self._room()
        counters, entries, ages = self._table.counters, self._table.entries, self._table.ages
        for block in blocks:
            key = block.key
            if key in self.waiting or key in entries or not self._is_below(key, ages):
                continue
            counters.prefetch_asked += 1
            if taken >= room:
                counters.prefetch_dropped += 1
                continue
            self.waiting[key] = Wish(block.parent, deadline, block.tenant)
            taken += 1
        return taken

    def restore(self, blocks: Sequence[tuple[Key, Key | None]]) -> None:
        """Takes blocks, with their parents, to be brought back as long as slots are free."""
        for key, parent in blocks:
            self._restores[key] = Wish(parent, math.inf, "", restored=True)

    def restoring(self) -> bool:
        """Whether blocks wait to be restored or are on their way."""
        return bool(self._restores) or any(wish.restored for wish in self.under_way.values())

    def pending(self) -> int:
        """Wishes that wait or are on their way, without what is restored."""
        return len(self.waiting) + sum(not wish.restored for wish in self.under_way.values())

    def begin(self, most: int) -> list[Entry]:
        """Up to `most` wishes as LOADING entries that are busy; drops those that cannot be."""
        begun: list[Entry] = []
        table, now = self._table, self._clock()
        while self.waiting:
            key, wish = next(iter(self.waiting.items()))
            late = wish.deadline <= now
            if len(begun) >= most and not late:
                break
            del self.waiting[key]
            entry = None if late else self._load(key, wish)
            if entry is None:
                table.counters.prefetch_dropped += 1
                continue
            self.under_way[entry] = wish
            begun.append(entry)
        while self._restores and len(begun) < most:
            key, wish = self._restores.popitem(last=False)
            entry = self._load(key, wish)
            if entry is not None:
                self.under_way[entry] = wish
                begun.append(entry)
        return begun

    def _load(self, key: Key, wish: Wish) -> Entry | None:
        table = self._table
        if key in table.entries or not self._is_below(key, table.ages):
            return None
        if wish.restored:
            slot = table.arena.alloc() if table.arena.free_slots else None
        else:
            slot = table.reserve_spare(wish.tenant, keep=wish.parent)
        if slot is None:
            return None
        entry = table.add(key, wish.parent, slot, State.LOADING, wish.tenant)
        entry.refs = 0
        entry.busy, entry.prefetched = True, not wish.restored
        return entry

    def overtake(self, key: Key) -> None:
        """A read loads `key` itself."""
        if self.waiting.pop(key, None) is not None:
            self._table.counters.prefetch_dropped += 1

    def use(self, entry: Entry) -> None:
        """A read takes a prefetched block, or joins its load."""
        entry.prefetched = False
        self._arrived.pop(entry, None)
        self._table.counters.prefetch_used += 1

    def end(self, entry: Entry) -> None:
        """A load has ended; ignored if no wish began it."""
        wish = self.under_way.pop(entry, None)
        if wish is None:
            return
        if wish.restored:
            self._table.counters.restored += entry.resident
            return
        if not entry.resident:
            self._table.counters.prefetch_dropped += 1
            return
        self._table.counters.prefetch_loaded += 1
        if entry.prefetched and entry.slot != NO_SLOT:
            self._arrived[entry] = wish.deadline

    def clear(self) -> None:
        """Drops every wish that waits."""
        self._table.counters.prefetch_dropped += len(self.waiting)
        self.waiting.clear()
        self._restores.clear()

    def _room(self) -> int:
        now = self._clock()
        while self._arrived:
            entry, deadline = next(iter(self._arrived.items()))
            if entry.slot != NO_SLOT and deadline > now:
                break
            del self._arrived[entry]
        return self._most - self.pending() - len(self._arrived)

    def _is_below(self, key: Key, ages: Ages | None) -> bool:
        return self._link.tier.contains(key) and (ages is None or ages.live(key))
