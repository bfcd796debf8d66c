"""The DRAM side of the store: entries, their slots, their order and who may be evicted.

Every method is called under the store's lock. `settle` must follow each change of an entry's
`refs`, `busy`, `pinned`, `detached` or `state`: it keeps the counts of evictable entries, so that
`room` is O(1), and frees what nobody holds any more.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

from kvist.core.errors import NoSpaceError
from kvist.core.events import Removed, Stored
from kvist.core.keys import Key
from kvist.core.outcome import Tier
from kvist.policy.protocol import EvictionPolicy
from kvist.store.ages import Ages
from kvist.store.entry import NO_SLOT, Entry, Idle, State
from kvist.store.outbox import Outbox
from kvist.store.owners import Owners
from kvist.store.quota import Tenants
from kvist.store.stats import Counters
from kvist.tiers.dram import Arena


class BlockTable:
    """Key → entry, and the arena's slots behind the entries."""

    def __init__(
        self,
        arena: Arena,
        policy: EvictionPolicy,
        *,
        raw_bytes: int,
        outbox: Outbox,
        may_drop_dirty: Callable[[], bool],
        ages: Ages | None = None,
        tenants: Tenants | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`may_drop_dirty` says whether a block that is nowhere else may be evicted now.

        Without `ages` no block expires; without `tenants` every tenant may hold everything.
        """
        self.arena = arena
        self.policy = policy
        self.raw_bytes = raw_bytes
        self.outbox = outbox
        self.counters = Counters()
        self.entries: dict[Key, Entry] = {}
        self.resident: dict[Key, Tier] = {}  # where each resident entry is: DRAM, for `match`
        self.detached: set[Entry] = set()
        self.dirty: OrderedDict[Entry, None] = OrderedDict()  # in commit order: parents first
        self.children: Counter[Key] = Counter()  # resident children, also of absent parents
        self.clears = 0  # how often everything was forgotten
        self.idle = dict.fromkeys(Idle, 0)  # the count of NO is kept but means nothing
        self.ages = ages
        self.tenants = tenants
        self.owners = Owners(0)  # until there is a tier below
        self._clock = clock
        self._may_drop_dirty = may_drop_dirty

    def view(self, entry: Entry) -> memoryview:
        """The block's bytes in its slot, without the slot's padding."""
        return self.arena.view(entry.slot)[: self.raw_bytes]

    def room(self, tenant: str = "") -> int:
        """Slots that `reserve` could give `tenant` now."""
        droppable = self._droppable()
        room = self._room(droppable)
        if self.tenants is None:
            return room
        return max(0, min(room, self.tenants.room(tenant, droppable)))

    def _droppable(self) -> tuple[Idle, ...]:
        # A dirty block exists nowhere else: with a healthy tier below it waits for its write.
        return (Idle.CLEAN, Idle.DIRTY) if self._may_drop_dirty() else (Idle.CLEAN,)

    def _room(self, droppable: tuple[Idle, ...]) -> int:
        return self.arena.free_slots + sum(self.idle[kind] for kind in droppable)

    def owner(self, key: Key) -> str | None:
        """Whose block it is, wherever it is; `None` if nobody is known, or it is nowhere."""
        entry = self.entries.get(key)
        return self.owners.of(key) if entry is None else entry.tenant

    def reserve(self, count: int, tenants: Iterable[str] = ()) -> list[int]:
        """`count` slots, evicting idle entries for them; all or nothing.

        `tenants` says for whom each slot is. One that would exceed its share gives up blocks of
        its own first.

        Raises:
            NoSpaceError: there is not that much room; nothing was evicted.
        """
        droppable = self._droppable()  # asked once: the breaker's answer changes with time
        room = self._room(droppable)
        if count > room:
            self.counters.no_space += 1
            raise NoSpaceError(f"{count} slots asked for, {room} can be had now")
        if self.tenants is not None:
            self._make_fit(self.tenants, Counter(tenants), droppable)
        missing = count - self.arena.free_slots
        if missing > 0:
            self._evict(missing, droppable)
        slots = [slot for slot in (self.arena.alloc() for _ in range(count)) if slot is not None]
        assert len(slots) == count, "room promised more than there was"
        return slots

    def _make_fit(
        self, tenants: Tenants, wanted: Counter[str], droppable: tuple[Idle, ...]
    ) -> None:
        excess = {tenant: tenants.excess(tenant, count) for tenant, count in wanted.items()}
        for tenant, count in excess.items():
            missing = count - tenants.spare(tenant, droppable)
            if missing > 0:
                self.counters.no_space += 1
                self.counters.over_quota += 1
                raise NoSpaceError(
                    f"{wanted[tenant]} slots asked for by tenant {tenant!r}, which holds "
                    f"{tenants.held[tenant]}: {missing} too many for its share"
                )
        for tenant, count in excess.items():
            if count > 0:
                self.counters.evicted_quota += self._evict(count, droppable, of=tenant)

    def reserve_spare(self, tenant: str, *, keep: Key | None) -> int | None:
        """A slot for what nobody waits for; `None` if only `keep` or what is not below could go.

        Nothing of others is evicted while the tenant holds its share.
        """
        of = None
        if self.tenants is not None and self.tenants.excess(tenant, 1) > 0:
            of = tenant
            if not self.tenants.spare(tenant, (Idle.CLEAN,)):
                return None  # known without a look at every block
        if self.arena.free_slots and of is None:
            return self.arena.alloc()
        if not self.idle[Idle.CLEAN] or not self._evict(1, (Idle.CLEAN,), of=of, keep=keep):
            return None
        return self.arena.alloc()

    def add(self, key: Key, parent: Key | None, slot: int, state: State, tenant: str = "") -> Entry:
        """A new entry, held once by the lease that asks for it."""
        entry = self.entries[key] = Entry(key, parent, slot, state, refs=1, tenant=tenant)
        if self.tenants is not None:
            self.tenants.take(entry)
        return entry

    def take_over(self, key: Key, parent: Key | None, slot: int, tenant: str) -> Entry:
        """An entry for a slot that a former process filled; nobody sees it before `reattach`."""
        entry = Entry(key, parent, slot, State.WRITING, refs=1, detached=True, tenant=tenant)
        self.detached.add(entry)
        if self.tenants is not None:
            self.tenants.take(entry)
        return entry

    def admit(self, entry: Entry, state: State) -> None:
        """The bytes of `entry` are there: DIRTY after a commit, CLEAN after a load."""
        entry.state = state
        entry.since_s = self._clock()
        if not entry.detached:
            if state is State.DIRTY:
                self.dirty[entry] = None
            self._adopt(entry)
            self.policy.insert(entry.key, entry.parent)
            self.resident[entry.key] = Tier.DRAM
            if self.ages is not None:
                self.ages.use(entry.key)
            self.outbox.put(Stored((entry.key,), entry.parent, Tier.DRAM))
        self.settle(entry)

    def _adopt(self, entry: Entry) -> None:
        """Counts `entry` as its parent's child, unless that would close a ring.

        A read in another order than the prompt's names a false parent; blocks in a ring of parents
        have no leaf and could never be evicted.
        """
        if self.children[entry.key] and self._descends(entry.parent, entry.key):
            entry.parent = None
        if entry.parent is not None:
            self.children[entry.parent] += 1

    def _descends(self, key: Key | None, ancestor: Key) -> bool:
        while key is not None and key != ancestor:
            entry = self.entries.get(key)
            key = entry.parent if entry is not None and entry.resident else None
        return key is not None

    def _leave(self, entry: Entry) -> None:
        """Undoes `_adopt`."""
        if entry.parent is not None:
            self.children[entry.parent] -= 1
            if not self.children[entry.parent]:
                del self.children[entry.parent]

    def dirtied(self, entry: Entry) -> None:
        """A CLEAN entry is to be written below after all."""
        entry.state = State.DIRTY
        self.dirty[entry] = None
        self.settle(entry)

    def cleaned(self, entry: Entry) -> None:
        """The bytes of a DIRTY entry are durable below."""
        entry.state = State.CLEAN
        self.dirty.pop(entry, None)
        self.settle(entry)

    def ref(self, entry: Entry) -> None:
        entry.refs += 1
        self.settle(entry)

    def unref(self, entry: Entry) -> None:
        entry.refs -= 1
        self.settle(entry)

    def settle(self, entry: Entry) -> None:
        """Recounts `entry` after a change; frees a detached block that nobody holds.

        What is not resident (a queued load, a write) is freed by `fail`, and only there.
        """
        held = entry.refs > 0 or entry.busy
        idle = Idle.NO
        if not (held or entry.pinned or entry.detached):
            if entry.state is State.CLEAN or (entry.state is State.DIRTY and entry.lent):
                idle = Idle.CLEAN
            elif entry.state is State.DIRTY:
                idle = Idle.DIRTY
        if idle is not entry.idle:
            self._change_idle(entry, idle)
        if entry.detached and entry.resident and not held and entry in self.detached:
            self.detached.discard(entry)
            self._free(entry)

    def fail(self, entry: Entry) -> None:
        """A load or write that comes to nothing: the slot is free, the key absent."""
        entry.state = State.FAILED
        if entry.detached:
            self.detached.discard(entry)
        else:
            del self.entries[entry.key]
        self._free(entry)

    def drop(self, entry: Entry) -> None:
        """Evicts an idle resident entry."""
        del self.entries[entry.key]
        del self.resident[entry.key]
        self.policy.remove(entry.key)
        self.owners.note(entry.key, entry.tenant)
        self._leave(entry)
        self.dirty.pop(entry, None)
        self._change_idle(entry, Idle.NO)
        self._free(entry)

    def detach_all(self) -> list[Key]:
        """Empties the table; what is held keeps its slot until it is let go.

        Returns: the keys that were resident.
        """
        keys = []
        self.clears += 1
        entries = list(self.entries.values())
        self.entries.clear()
        self.resident.clear()
        self.children.clear()
        self.dirty.clear()
        self.owners.clear()
        if self.ages is not None:
            self.ages.clear()
        for entry in entries:
            if entry.resident:
                keys.append(entry.key)
                self.policy.remove(entry.key)
            entry.detached = True
            entry.pinned = False
            self.detached.add(entry)
            self.settle(entry)
        return keys

    def reattach(self, entry: Entry) -> bool:
        """Puts a detached entry back; `False` if its key has another entry by now."""
        if entry.key in self.entries:
            return False
        self.detached.discard(entry)
        entry.detached = False
        self.entries[entry.key] = entry
        return True

    def _evict(
        self,
        count: int,
        droppable: tuple[Idle, ...],
        *,
        of: str | None = None,
        keep: Key | None = None,
    ) -> int:
        """Evicts up to `count` idle entries but `keep`, only those of tenant `of` if one is given.

        Returns: how many went.
        """
        evicted: list[Key] = []
        for key in self.policy.victims():
            entry = self.entries[key]
            if entry.idle not in droppable or key == keep:
                continue
            if of is not None and entry.tenant != of:
                continue
            if entry.idle is Idle.DIRTY:
                self.counters.evicted_unflushed += 1
            self.drop(entry)
            evicted.append(key)
            if len(evicted) == count:
                break
        self.counters.evicted += len(evicted)
        if evicted:
            self.outbox.put(Removed(tuple(evicted), Tier.DRAM))
        return len(evicted)

    def _change_idle(self, entry: Entry, idle: Idle) -> None:
        self.idle[entry.idle] -= 1
        self.idle[idle] += 1
        if self.tenants is not None:
            self.tenants.change(entry, idle)
        entry.idle = idle

    def _free(self, entry: Entry) -> None:
        self.arena.free(entry.slot)
        if self.tenants is not None:
            self.tenants.give(entry)
        entry.slot = NO_SLOT
