"""The BlockStore over one DRAM arena and, where there is one, a tier below it.

`entry.py` holds the state machine, `table.py` the slots and the order, `leases.py` what callers
hold, `loader.py` and `writeback.py` the threads that move bytes, `link.py` the tier below as seen
through its breakers. Everything is decided under one lock that is never held during I/O.
"""

from __future__ import annotations

import random as _random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Self

from kvist.core.errors import ClosedError, NoSpaceError
from kvist.core.events import Cleared, KvEvent, Removed
from kvist.core.keys import Key
from kvist.core.outcome import BlockRef, Match, Tier
from kvist.policy.protocol import EvictionPolicy
from kvist.store import audit
from kvist.store.breaker import Breaker
from kvist.store.desk import WAKE_S, Desk
from kvist.store.entry import Entry, Idle, State
from kvist.store.leases import TieredReadLease, TieredWriteLease
from kvist.store.link import Clearable, LowerLink, present_run
from kvist.store.loader import Loader
from kvist.store.outbox import Outbox
from kvist.store.stats import BlockInfo, StoreStats
from kvist.store.table import BlockTable
from kvist.store.writeback import WriteBack
from kvist.tiers.dram import Arena
from kvist.tiers.protocol import LowerTier


class TieredStore:
    """A BlockStore (contract: `core/lease.py`). Owns the arena and the tier below; thread-safe."""

    def __init__(
        self,
        arena: Arena,
        policy: EvictionPolicy,
        lower: LowerTier | None,
        *,
        raw_bytes: int,
        io_threads: int = 2,
        lower_tier: Tier = Tier.SSD,
        stuck_s: float = 1.0,
        breaker: Callable[[], Breaker] | None = None,
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[], float] = _random.random,
        events: Callable[[KvEvent], None] | None = None,
    ) -> None:
        """Starts the threads.

        Args:
            arena: slots of at least `raw_bytes`.
            policy: eviction order, empty.
            lower: the tier below DRAM, reported as `lower_tier`.
            raw_bytes: exact size of one block.
            io_threads: loads from `lower` that may be under way at once.
            stuck_s: a call to `lower` that takes longer counts as failed, and as hung meanwhile.
            breaker: makes the breaker of one side of `lower`; called twice.
            clock: seconds that only grow.
            random: draws from [0, 1) for the breakers' jitter.
            events: gets every event, in order, on whichever thread; must be quick and not raise.

        Raises:
            ValueError: a block does not fit in a slot, or a number is not positive.
        """
        if not 0 < raw_bytes <= arena.slot_bytes:
            raise ValueError(f"a block of {raw_bytes} bytes in a slot of {arena.slot_bytes}")
        if io_threads < 1:
            raise ValueError(f"io_threads must be at least 1, not {io_threads}")
        self._outbox = Outbox(events)
        self._table = BlockTable(
            arena,
            policy,
            raw_bytes=raw_bytes,
            outbox=self._outbox,
            may_drop_dirty=self._may_drop_dirty,
        )
        self._desk = Desk(self._table, self._outbox, clock)
        self._lock = self._desk.lock
        self._clock = clock
        self._closed = False
        self._link: LowerLink | None = None
        if lower is not None:
            make = breaker or (lambda: Breaker(clock=clock, random=random))
            self._link = LowerLink(
                lower,
                lower_tier,
                read=make(),
                write=make(),
                io_threads=io_threads,
                stuck_s=stuck_s,
                clock=clock,
            )
            self._loader = Loader(self._desk, self._link, threads=io_threads)
            self._writer = WriteBack(self._desk, self._link)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def arena(self) -> Arena:
        """The arena behind `slot` offsets, for those who map or register it."""
        return self._table.arena

    @property
    def raw_bytes(self) -> int:
        """Exact size of one block."""
        return self._table.raw_bytes

    def match(self, keys: Sequence[Key]) -> Match:
        """Longest present run from the start; DRAM is asked first. A closed store has nothing."""
        with self._lock:
            if self._closed:
                return Match(())
            resident = self._table.resident
            tiers = list(map(resident.get, keys)) if resident else [None] * len(keys)
            link = self._link if self._link is not None and self._link.readable() else None
        return Match(present_run(keys, tiers, link))

    def read(self, keys: Sequence[Key], *, deadline_s: float) -> TieredReadLease:
        """Leases `keys`; starts loading what is below.

        A block that is loaded is taken as the child of the key before it.

        Raises:
            NoSpaceError: DRAM cannot hold them all at once now; nothing was reserved.
            ClosedError: the store was closed.
        """
        deadline = self._clock() + deadline_s
        with self._lock:
            self._demand_open()
            items: list[Entry | None] = []
            absent: dict[Key, Key | None] = {}  # key to load → its parent
            below = self._link is not None and self._link.readable()
            counters = self._table.counters
            for i, key in enumerate(keys):
                entry = self._table.entries.get(key)
                if entry is not None and entry.state is State.WRITING:
                    entry = None
                elif entry is not None:
                    self._table.ref(entry)  # held before room is made: it is no victim
                    counters.read_joined += entry.state is State.LOADING
                    counters.read_dram += entry.resident
                elif below and self._in_lower(key):
                    absent.setdefault(key, keys[i - 1] if i else None)
                items.append(entry)
            try:
                self._start_loads(keys, items, absent)
            except NoSpaceError:
                for entry in items:
                    if entry is not None:
                        self._desk.let_go(entry)
                raise
            counters.read_absent += items.count(None)
            lease = TieredReadLease(self._desk, items, deadline=deadline)
            self._desk.leases.add(lease)
        self._outbox.drain()
        return lease

    def _start_loads(
        self, keys: Sequence[Key], items: list[Entry | None], absent: dict[Key, Key | None]
    ) -> None:
        """Reserves slots for `absent`, fills their places in `items` and queues the loads."""
        slots = self._table.reserve(len(absent))
        loads: dict[Key, Entry] = {}
        for slot, (key, parent) in zip(slots, absent.items(), strict=True):
            entry = loads[key] = self._table.add(key, parent, slot, State.LOADING)
            entry.refs = 0
        for i, key in enumerate(keys):
            load = loads.get(key)
            if load is not None:
                self._table.ref(load)
                items[i] = load
        self._table.counters.read_lower += len(loads)
        if loads:
            self._loader.submit(list(loads.values()))

    def write(self, blocks: Sequence[BlockRef]) -> TieredWriteLease:
        """Reserves a slot for every block that is absent from DRAM and below; all or nothing.

        Raises:
            NoSpaceError: too few slots can be freed now; nothing was reserved.
            ClosedError: the store was closed.
        """
        with self._lock:
            self._demand_open()
            below = self._link is not None and self._link.readable()
            absent: dict[Key, int] = {}
            for i, block in enumerate(blocks):
                known = block.key in self._table.entries or (below and self._in_lower(block.key))
                if not known:
                    absent.setdefault(block.key, i)
            slots = self._table.reserve(len(absent))
            items: list[Entry | None] = [None] * len(blocks)
            for slot, (key, i) in zip(slots, absent.items(), strict=True):
                items[i] = self._table.add(key, blocks[i].parent, slot, State.WRITING)
            self._table.counters.write_present += len(blocks) - len(absent)
            # Where nothing is below, nothing is left to be done after a commit.
            commit_as = State.CLEAN if self._link is None else State.DIRTY
            lease = TieredWriteLease(self._desk, items, commit_as=commit_as)
            self._desk.leases.add(lease)
        self._outbox.drain()
        return lease

    def room_blocks(self) -> int:
        """Slots that `read` or `write` could reserve now: free plus evictable."""
        with self._lock:
            return self._table.room()

    def evict(self, keys: Iterable[Key]) -> int:
        """Forgets blocks in every tier; those leased, pinned or moving are skipped.

        Returns: how many were forgotten.

        Raises:
            TierError: the tier below failed; DRAM has forgotten its copies all the same.
        """
        with self._lock:
            dropped: list[Key] = []
            below: list[Key] = []
            for key in dict.fromkeys(keys):
                entry = self._table.entries.get(key)
                if entry is not None:
                    if entry.idle is Idle.NO:
                        continue
                    self._table.drop(entry)
                    dropped.append(key)
                if self._in_lower(key):
                    below.append(key)
            if dropped:
                self._outbox.put(Removed(tuple(dropped), Tier.DRAM))
        if below and self._link is not None:
            self._link.tier.remove(below)
            self._outbox.put(Removed(tuple(below), self._link.name))
        self._outbox.drain()
        return len({*dropped, *below})

    def clear(self) -> None:
        """Forgets every block in every tier, pinned ones too; leases keep what they hold.

        Raises:
            TierError: the tier below failed; DRAM has forgotten its copies all the same.
        """
        with self._lock:
            dropped = self._table.detach_all()
            self._outbox.put(Cleared())
        self._outbox.drain()
        if self._link is None:
            return
        if isinstance(self._link.tier, Clearable):
            self._link.tier.clear()
        else:
            self._link.tier.remove(dropped)

    def pin(self, keys: Iterable[Key]) -> int:
        """Keeps blocks that are in DRAM from eviction until `unpin` or `clear`; says how many."""
        return self._set_pinned(keys, pinned=True)

    def unpin(self, keys: Iterable[Key]) -> int:
        """Undoes `pin`; says for how many."""
        return self._set_pinned(keys, pinned=False)

    def _set_pinned(self, keys: Iterable[Key], *, pinned: bool) -> int:
        changed = 0
        with self._lock:
            for key in keys:
                entry = self._table.entries.get(key)
                if entry is not None and entry.resident and entry.pinned is not pinned:
                    entry.pinned = pinned
                    self._table.settle(entry)
                    changed += 1
        return changed

    def flush(self, deadline_s: float) -> bool:
        """Waits until every committed block is durable below; `False` if the deadline came first.

        With nothing below there is nothing to wait for.
        """
        return self._flush(self._clock() + deadline_s, give_up=False)

    def _flush(self, deadline: float, *, give_up: bool) -> bool:
        with self._desk.changed:
            while self._table.dirty:
                left = deadline - self._clock()
                failing = self._link is None or not self._link.writable()
                if left <= 0 or (give_up and failing):
                    return False
                self._desk.changed.wait(min(left, WAKE_S))
            return True

    def list(self, limit: int) -> list[BlockInfo]:
        """Up to `limit` blocks of the DRAM tier, oldest entry first."""
        with self._lock:
            return [
                BlockInfo(e.key, e.parent, Tier.DRAM, e.state, e.refs, e.pinned)
                for e in islice((e for e in self._table.entries.values() if e.resident), limit)
            ]

    def stats(self) -> StoreStats:
        """A consistent snapshot."""
        with self._lock:
            table, link = self._table, self._link
            entries = table.entries.values()
            states = [e.state for e in entries]
            resident = states.count(State.CLEAN) + states.count(State.DIRTY)
            return StoreStats(
                capacity_blocks=table.arena.capacity_slots,
                free_blocks=table.arena.free_slots,
                dram_blocks=resident,
                dram_bytes=resident * table.raw_bytes,
                dirty_blocks=len(table.dirty),
                loading_blocks=states.count(State.LOADING),
                writing_blocks=states.count(State.WRITING),
                leased_blocks=sum(e.refs > 0 for e in entries) + len(table.detached),
                pinned_blocks=sum(e.pinned for e in entries),
                leases=len(self._desk.leases),
                lower_read=link.read.state if link else None,
                lower_write=link.write.state if link else None,
                lower_stalled=link is not None and link.reads_stalled(),
                breaker_opened=link.read.opened + link.write.opened if link else 0,
                **asdict(table.counters),
            )

    def check_integrity(self) -> None:
        """Proves that no slot, reference or queue entry leaked.

        Raises:
            StoreError: names the rule that is broken.
        """
        with self._lock:
            audit.check(self._desk)

    def close(self, deadline_s: float = 5.0) -> None:
        """Writes dirty blocks below, closes the tier below and the arena. Idempotent.

        Waits no longer than `deadline_s`. A tier that hangs is abandoned unclosed, for its own
        recovery to deal with; one that is failing is not waited for. Leases that are still out
        may be released, but their buffers cannot be had any more.

        Raises:
            TierError: the tier below failed to close; everything else is closed.
        """
        deadline = self._clock() + deadline_s
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            if self._link is not None:
                self._flush(deadline, give_up=True)
                self._close_lower(self._link, deadline)
        finally:
            with self._lock:
                self._table.arena.close()

    def _close_lower(self, link: LowerLink, deadline: float) -> None:
        with self._lock:
            self._loader.stop()
            self._writer.stop()
        for thread in (*self._loader.threads, self._writer.thread):
            thread.join(max(0.0, deadline - self._clock()))
            if thread.is_alive():
                return
        link.close_tier(max(0.0, deadline - self._clock()))

    def _demand_open(self) -> None:
        if self._closed:
            raise ClosedError("the store was closed")

    def _in_lower(self, key: Key) -> bool:
        return self._link is not None and self._link.tier.contains(key)

    def _may_drop_dirty(self) -> bool:
        return self._link is None or not self._link.writable()
