"""The DRAM side of the store: entries, their slots, their order and who may be evicted.

Every method is called under the store's lock. `settle` must follow each change of an entry's
`refs`, `busy`, `pinned`, `detached` or `state`: it keeps the counts of evictable entries, so that
`room` is O(1), and frees what nobody holds any more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from kvist.core.errors import NoSpaceError
from kvist.core.events import Removed, Stored
from kvist.core.keys import Key
from kvist.core.outcome import Tier
from kvist.policy.protocol import EvictionPolicy
from kvist.store.entry import NO_SLOT, Entry, Idle, State
from kvist.store.outbox import Outbox
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
    ) -> None:
        """`may_drop_dirty` says whether a block that is nowhere else may be evicted now."""
        self.arena = arena
        self.policy = policy
        self.raw_bytes = raw_bytes
        self.outbox = outbox
        self.counters = Counters()
        self.entries: dict[Key, Entry] = {}
        self.resident: dict[Key, Tier] = {}  # where each resident entry is: DRAM, for `match`
        self.detached: set[Entry] = set()
        self.dirty: OrderedDict[Entry, None] = OrderedDict()  # in commit order: parents first
        self.idle = dict.fromkeys(Idle, 0)  # the count of NO is kept but means nothing
        self._may_drop_dirty = may_drop_dirty

    def view(self, entry: Entry) -> memoryview:
        """The block's bytes in its slot, without the slot's padding."""
        return self.arena.view(entry.slot)[: self.raw_bytes]

    def room(self) -> int:
        """Slots that `reserve` could give now."""
        return self._room(self._droppable())

    def _droppable(self) -> tuple[Idle, ...]:
        # A dirty block exists nowhere else: with a healthy tier below it waits for its write.
        return (Idle.CLEAN, Idle.DIRTY) if self._may_drop_dirty() else (Idle.CLEAN,)

    def _room(self, droppable: tuple[Idle, ...]) -> int:
        return self.arena.free_slots + sum(self.idle[kind] for kind in droppable)

    def reserve(self, count: int) -> list[int]:
        """`count` slots, evicting idle entries for them; all or nothing.

        Raises:
            NoSpaceError: there is not that much room; nothing was evicted.
        """
        droppable = self._droppable()  # asked once: the breaker's answer changes with time
        room = self._room(droppable)
        if count > room:
            self.counters.no_space += 1
            raise NoSpaceError(f"{count} slots asked for, {room} can be had now")
        missing = count - self.arena.free_slots
        if missing > 0:
            self._evict(missing, droppable)
        slots = [slot for slot in (self.arena.alloc() for _ in range(count)) if slot is not None]
        assert len(slots) == count, "room promised more than there was"
        return slots

    def add(self, key: Key, parent: Key | None, slot: int, state: State) -> Entry:
        """A new entry, held once by the lease that asks for it."""
        entry = self.entries[key] = Entry(key, parent, slot, state, refs=1)
        return entry

    def admit(self, entry: Entry, state: State) -> None:
        """The bytes of `entry` are there: DIRTY after a commit, CLEAN after a load."""
        entry.state = state
        if not entry.detached:
            if state is State.DIRTY:
                self.dirty[entry] = None
            self.policy.insert(entry.key, entry.parent)
            self.resident[entry.key] = Tier.DRAM
            self.outbox.put(Stored((entry.key,), entry.parent, Tier.DRAM))
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
            if entry.state is State.CLEAN:
                idle = Idle.CLEAN
            elif entry.state is State.DIRTY:
                idle = Idle.DIRTY
        if idle is not entry.idle:
            self.idle[entry.idle] -= 1
            self.idle[idle] += 1
            entry.idle = idle
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
        self.dirty.pop(entry, None)
        self.idle[entry.idle] -= 1
        self.idle[Idle.NO] += 1
        entry.idle = Idle.NO
        self._free(entry)

    def detach_all(self) -> list[Key]:
        """Empties the table; what is held keeps its slot until it is let go.

        Returns: the keys that were resident.
        """
        keys = []
        entries = list(self.entries.values())
        self.entries.clear()
        self.resident.clear()
        self.dirty.clear()
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

    def _evict(self, count: int, droppable: tuple[Idle, ...]) -> None:
        evicted: list[Key] = []
        for key in self.policy.victims():
            entry = self.entries[key]
            if entry.idle not in droppable:
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

    def _free(self, entry: Entry) -> None:
        self.arena.free(entry.slot)
        entry.slot = NO_SLOT
