"""The BlockStore over one DRAM arena and, where there is one, a tier below it.

`entry.py` holds the state machine, `table.py` the slots and the order, `leases.py` what callers
hold, `loader.py` and `writeback.py` the threads that move bytes, `link.py` the tier below as seen
through its breakers. Everything is decided under one lock that is never held during I/O.
"""

from __future__ import annotations

import random as _random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Self

from kvist.core.errors import ClosedError
from kvist.core.events import KvEvent, Removed
from kvist.core.hints import Hints
from kvist.core.keys import Key
from kvist.core.outcome import BlockRef, Match, ReadTotals, Tier
from kvist.policy.filters import AdmitAll, InsertFilter
from kvist.policy.protocol import EvictionPolicy, TakesHints
from kvist.store import audit, expiry, forget, survey
from kvist.store.ages import Ages
from kvist.store.breaker import Breaker
from kvist.store.caretaker import Caretaker
from kvist.store.desk import WAKE_S, Desk
from kvist.store.granting import Granter
from kvist.store.leases import TieredReadLease, TieredWriteLease
from kvist.store.link import LowerLink, present_run
from kvist.store.loader import Loader
from kvist.store.outbox import Outbox
from kvist.store.own import OwnBlocks
from kvist.store.owners import Owners
from kvist.store.prefetch import Prefetcher, in_order
from kvist.store.quota import Quota, Tenants
from kvist.store.restore import Restorer
from kvist.store.stats import BlockInfo, StoreStats
from kvist.store.succession import Succession
from kvist.store.table import BlockTable
from kvist.store.writeback import WriteBack
from kvist.tiers.dram import Arena
from kvist.tiers.protocol import LowerTier, Sampled, TellsEvictions


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
        ttl_s: float | None = None,
        quota: Quota | None = None,
        insert_filter: InsertFilter | None = None,
        restore_blocks: int = 0,
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
            ttl_s: a block that is not used for so long is gone; a copy below that is older than
                this store counts as used now.
            quota: shares of DRAM by tenant.
            insert_filter: which blocks `lower` may get; all by default.
            restore_blocks: of the newest blocks of `lower`, how many come back to DRAM at once.

        Raises:
            ValueError: a block does not fit in a slot, or a number is not positive.
        """
        if not 0 < raw_bytes <= arena.slot_bytes:
            raise ValueError(f"a block of {raw_bytes} bytes in a slot of {arena.slot_bytes}")
        for name, number in (("io_threads", io_threads), ("ttl_s", ttl_s)):
            if number is not None and number <= 0:
                raise ValueError(f"{name} must be positive, not {number}")
        self._outbox = Outbox(events)
        self._table = BlockTable(
            arena,
            policy,
            raw_bytes=raw_bytes,
            outbox=self._outbox,
            may_drop_dirty=self._may_drop_dirty,
            ages=None if ttl_s is None else Ages(ttl_s, clock),
            tenants=Tenants(quota, arena.capacity_slots) if quota and quota.limits else None,
            clock=clock,
        )
        admits = insert_filter or AdmitAll()
        self._desk = Desk(self._table, self._outbox, clock, insert_filter=admits)
        self._lock, self._clock, self._closed = self._desk.lock, clock, False
        self._link: LowerLink | None = None
        self._prefetcher: Prefetcher | None = None
        self._restorer: Restorer | None = None
        if lower is not None:
            make = breaker or (lambda: Breaker(clock=clock, random=random))
            self._open_below(lower, lower_tier, make, io_threads, stuck_s, restore_blocks)
        queue = None if lower is None else self._loader.submit
        self._granter = Granter(self._desk, self._link, self._prefetcher, queue)
        self.succession = Succession(self._desk, self._link)
        self.own = OwnBlocks(self._desk, self._link, self._granter, self._demand_open)

    def _open_below(
        self,
        lower: LowerTier,
        name: Tier,
        make: Callable[[], Breaker],
        io_threads: int,
        stuck_s: float,
        restore_blocks: int,
    ) -> None:
        self._table.owners = Owners()
        link = self._link = LowerLink(
            lower,
            name,
            read=make(),
            write=make(),
            io_threads=io_threads,
            stuck_s=stuck_s,
            clock=self._clock,
        )
        self._prefetcher = Prefetcher(self._table, link, self._clock)
        self._loader = Loader(self._desk, link, self._prefetcher, threads=io_threads)
        self._writer = WriteBack(self._desk, link)
        if isinstance(lower, TellsEvictions):
            lower.tell_evictions(self._lower_evicted)
        restorer = partial(Restorer, self._desk, link, self._prefetcher)
        self._restorer = restorer(most_blocks=restore_blocks) if restore_blocks > 0 else None

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
        ages = self._table.ages
        with self._lock:
            if self._closed:
                return Match(())
            if ages is not None:
                expiry.sweep(self._desk, self._link)
            resident = self._table.resident
            tiers = list(map(resident.get, keys)) if resident else [None] * len(keys)
            link = self._link if self._link is not None and self._link.readable() else None
        run = present_run(keys, tiers, link)
        if ages is not None:
            run = run[: expiry.cut(self._desk, self._link, keys[: len(run)])]
            self._outbox.drain()
        return Match(run)

    def read(self, keys: Sequence[Key], *, deadline_s: float, tenant: str = "") -> TieredReadLease:
        """Leases `keys`; starts loading what is below, which then counts as `tenant`'s.

        A block that is loaded is taken as the child of the key before it.

        Raises:
            NoSpaceError: DRAM, or the tenant's share of it, cannot hold them all at once now;
                nothing was reserved.
            ClosedError: the store was closed.
        """
        deadline = self._clock() + deadline_s
        with self._lock:
            self._demand_open()
            lease = self._granter.read(keys, deadline=deadline, tenant=tenant)
        self._outbox.drain()
        return lease

    def write(self, blocks: Sequence[BlockRef]) -> TieredWriteLease:
        """Reserves a slot for every block that is absent from DRAM and below; all or nothing.

        Raises:
            NoSpaceError: too few slots can be freed now, or a tenant (which is named) would hold
                more than its share; nothing was reserved.
            ClosedError: the store was closed.
        """
        with self._lock:
            self._demand_open()
            lease = self._granter.write(blocks)
        self._outbox.drain()
        return lease

    def prefetch(self, keys: Sequence[Key], *, deadline_s: float, tenant: str = "") -> int:
        """Wishes for `keys` to be in DRAM soon; returns how many blocks are to be brought.

        Never blocks and never raises; see `prefetch.py` for what becomes of a wish.
        """
        with self._lock:
            if self._closed or self._prefetcher is None:
                return 0
            deadline = self._clock() + deadline_s
            taken = self._prefetcher.ask(in_order(keys, tenant), deadline=deadline)
            if taken:
                self._desk.load_work.notify(taken)
            return taken

    def ended(self, keys: Sequence[Key], hints: Hints) -> None:
        """Says how the request ended that used the blocks `keys`, in their order.

        An order that takes hints gets them with the use of these blocks, from the last to the
        first; from the first call on it hears of uses from here alone, so that each request counts
        once. Blocks that the engine used without asking us count as used, too.
        """
        table = self._table
        with self._lock:
            if self._closed:
                return
            if table.ages is not None:
                for key in keys:
                    below = self._link is not None and self._link.tier.contains(key)
                    if key in table.resident or (below and table.ages.live(key)):
                        table.ages.use(key)
            if isinstance(table.policy, TakesHints):
                self._desk.uses_come_at_end = True
                table.policy.begin(hints)
                for key in reversed(keys):
                    if key in table.resident:
                        table.policy.touch(key)

    def room_blocks(self, tenant: str = "") -> int:
        """Slots that `read` or `write` could reserve now for `tenant`: free plus evictable."""
        with self._lock:
            return self._table.room(tenant)

    def read_totals(self) -> dict[Tier, ReadTotals]:
        """What was read from the tier below, by whomever it was asked for."""
        with self._lock:
            return dict(self._link.read_totals()) if self._link is not None else {}

    def samples(self) -> Mapping[str, float]:
        """Metrics of the tier below's own, totals and gauges; empty where it has none."""
        tier = self._link.tier if self._link is not None else None
        return tier.samples() if isinstance(tier, Sampled) else {}

    def evict(self, keys: Iterable[Key]) -> int:
        """Forgets blocks in every tier; those leased, pinned or moving are skipped.

        Returns: how many were forgotten.

        Raises:
            TierError: the tier below failed; DRAM has forgotten its copies all the same.
        """
        return forget.evict(self._desk, self._link, keys)

    def clear(self) -> None:
        """Forgets every block in every tier, pinned ones too; leases keep what they hold.

        Raises:
            TierError: the tier below failed; DRAM has forgotten its copies all the same.
        """
        with self._lock:
            if self._prefetcher is not None:
                self._prefetcher.clear()
        forget.clear(self._desk, self._link)

    def pin(self, keys: Iterable[Key]) -> int:
        """Keeps blocks that are in DRAM from eviction until `unpin` or `clear`; says how many."""
        return forget.set_pinned(self._desk, keys, pinned=True)

    def unpin(self, keys: Iterable[Key]) -> int:
        """Undoes `pin`; says for how many."""
        return forget.set_pinned(self._desk, keys, pinned=False)

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

    def list(self, limit: int, tier: Tier | None = None) -> list[BlockInfo]:
        """Up to `limit` blocks of `tier`, or of all tiers from the fastest, oldest entry first.

        A block is listed once for each tier that it is in. Listing below reads from the medium;
        a tier below that cannot list shows nothing.

        Raises:
            TierError: the tier below failed.
        """
        return list(islice(survey.blocks(self._desk, self._link, tier), limit))

    def stat(self, key: Key) -> tuple[BlockInfo, ...]:
        """Where a block is, fastest tier first; empty if nowhere. No use, no I/O."""
        with self._lock:
            if self._closed or not expiry.is_live(self._desk, self._link, key):
                return ()
            return survey.copies(self._desk, self._link, key)

    @property
    def caretaker(self) -> Caretaker:
        """What a person who looks after the store may do with it."""
        return Caretaker(self._desk, self._link, self.read, self.clear)

    def stats(self) -> StoreStats:
        """A consistent snapshot."""
        with self._lock:
            waiting = self._prefetcher.pending() if self._prefetcher else 0
            return survey.snapshot(self._desk, self._link, prefetching_blocks=waiting)

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
            if self._restorer is not None:
                self._restorer.stop()
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
        restorer = (self._restorer.thread,) if self._restorer is not None else ()
        for thread in (*restorer, *self._loader.threads, self._writer.thread):
            thread.join(max(0.0, deadline - self._clock()))
            if thread.is_alive():
                return
        link.close_tier(max(0.0, deadline - self._clock()))

    def _demand_open(self) -> None:
        if self._closed:
            raise ClosedError("the store was closed")

    def _lower_evicted(self, keys: Sequence[Key]) -> None:
        """The tier below has dropped blocks to make room; on one of its threads, in a `put`."""
        with self._lock:
            self._outbox.put(Removed(tuple(keys), self._link.name if self._link else Tier.SSD))
            ages = self._table.ages
            self._table.owners.forget(keys)
            if ages is not None:
                for key in keys:
                    if key not in self._table.entries:
                        ages.forget(key)

    def _may_drop_dirty(self) -> bool:
        return self._link is None or not self._link.writable()
