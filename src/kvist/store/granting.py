"""Makes leases: what is present, what must be loaded, whose slots are taken. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvist.core.errors import NoSpaceError
from kvist.core.keys import Key
from kvist.core.outcome import BlockRef
from kvist.store import expiry
from kvist.store.desk import Desk
from kvist.store.entry import Entry, State
from kvist.store.leases import TieredReadLease, TieredWriteLease
from kvist.store.link import LowerLink
from kvist.store.prefetch import Prefetcher


class Granter:
    """Both kinds of lease of one store. Every method is called under the store's lock."""

    def __init__(
        self,
        desk: Desk,
        link: LowerLink | None,
        prefetcher: Prefetcher | None,
        submit: Callable[[list[Entry]], None] | None,
    ) -> None:
        """`submit` queues LOADING entries; all but `desk` come together or not at all."""
        self._desk = desk
        self._table = desk.table
        self._link = link
        self._prefetcher = prefetcher
        self._submit = submit
        # Where nothing is below, nothing is left to be done after a commit.
        self._commit_as = State.CLEAN if link is None else State.DIRTY

    def read(
        self, keys: Sequence[Key], *, deadline: float, tenant: str, own: bool = False
    ) -> TieredReadLease:
        """A lease on `keys`, whose loads are queued; `own`: only of what this host holds itself.

        Raises:
            NoSpaceError: they cannot all be held; nothing was reserved.
        """
        expiry.sweep(self._desk, self._link)
        items: list[Entry | None] = []
        absent: dict[Key, Key | None] = {}  # key to load → its parent
        below = self._link is not None and self._link.readable()
        counters = self._table.counters
        for i, key in enumerate(keys):
            entry = self._table.entries.get(key)
            if entry is not None and not self._may_read(entry):
                entry = None
            elif entry is not None and own and not (entry.resident or self._held_below(key)):
                entry = None  # it comes from another host, maybe the one that asks
            elif entry is not None:
                self._table.ref(entry)  # held before room is made: it is no victim
                counters.read_joined += entry.state is State.LOADING
                counters.read_dram += entry.resident
            elif below and (self._held_below(key) if own else self._in_lower(key)):
                absent.setdefault(key, keys[i - 1] if i else None)
            items.append(entry)
        try:
            self._start_loads(keys, items, absent, tenant)
        except NoSpaceError:
            for entry in items:
                if entry is not None:
                    self._desk.let_go(entry)
            raise
        for entry in items:
            if entry is not None and (entry.prefetched or entry.refused):
                self._note_read(entry)
        counters.read_absent += items.count(None)
        lease = TieredReadLease(self._desk, items, deadline=deadline)
        self._desk.leases.add(lease)
        return lease

    def write(self, blocks: Sequence[BlockRef]) -> TieredWriteLease:
        """A lease with a slot for every block that is nowhere.

        Raises:
            NoSpaceError: they cannot all be had; nothing was reserved.
        """
        expiry.sweep(self._desk, self._link)
        below = self._link is not None and self._link.readable()
        absent: dict[Key, int] = {}
        for i, block in enumerate(blocks):
            entry = self._table.entries.get(block.key)
            if entry is not None and (entry.state is State.WRITING or self._is_live(block.key)):
                continue
            if not (below and self._kept_below(block.key)):
                absent.setdefault(block.key, i)
        slots = self._table.reserve(len(absent), [blocks[i].tenant for i in absent.values()])
        items: list[Entry | None] = [None] * len(blocks)
        for slot, i in zip(slots, absent.values(), strict=True):
            block = blocks[i]
            items[i] = self._table.add(block.key, block.parent, slot, State.WRITING, block.tenant)
        self._table.counters.write_present += len(blocks) - len(absent)
        lease = TieredWriteLease(self._desk, items, commit_as=self._commit_as)
        self._desk.leases.add(lease)
        return lease

    def wish(self, blocks: Sequence[BlockRef], *, deadline: float) -> int:
        """Takes wishes for blocks that are below (`prefetch.py`); how many are to be brought."""
        return 0 if self._prefetcher is None else self._prefetcher.ask(blocks, deadline=deadline)

    def _start_loads(
        self,
        keys: Sequence[Key],
        items: list[Entry | None],
        absent: dict[Key, Key | None],
        tenant: str,
    ) -> None:
        """Reserves slots for `absent`, fills their places in `items` and queues the loads."""
        slots = self._table.reserve(len(absent), [tenant] * len(absent))
        if self._submit is None or not slots:
            return
        loads: dict[Key, Entry] = {}
        for slot, (key, parent) in zip(slots, absent.items(), strict=True):
            entry = loads[key] = self._table.add(key, parent, slot, State.LOADING, tenant)
            entry.refs = 0
            if self._prefetcher is not None:
                self._prefetcher.overtake(key)
        for i, key in enumerate(keys):
            load = loads.get(key)
            if load is not None:
                self._table.ref(load)
                items[i] = load
        self._table.counters.read_lower += len(loads)
        self._submit(list(loads.values()))

    def _note_read(self, entry: Entry) -> None:
        """A read has taken a block that was prefetched, or kept from the tier below."""
        if entry.prefetched and self._prefetcher is not None:
            self._prefetcher.use(entry)
        if entry.refused and self._desk.insert_filter.admits(entry.key):
            entry.refused = False
            self._table.dirtied(entry)
            self._desk.write_work.notify()

    def _may_read(self, entry: Entry) -> bool:
        """Whether `entry` may be given to a reader; one whose time is over is gone."""
        return entry.state is not State.WRITING and self._is_live(entry.key)

    def _is_live(self, key: Key) -> bool:
        return self._table.ages is None or expiry.is_live(self._desk, self._link, key)

    def _in_lower(self, key: Key) -> bool:
        """Whether `key` is below and has not expired."""
        return self._link is not None and self._link.tier.contains(key) and self._is_live(key)

    def _kept_below(self, key: Key) -> bool:
        """Whether `key` is stored below and has not expired."""
        return self._link is not None and self._link.keeps(key) and self._is_live(key)

    def _held_below(self, key: Key) -> bool:
        """Whether `key` is on this host's own medium and has not expired."""
        return self._link is not None and self._link.holds(key) and self._is_live(key)
