"""What a person may do with a store: look, pin, evict, move, clear; all of it, or one tenant's.

Where a tenant is named, nothing but its own blocks is seen or touched, and a key of another tenant
takes the way of a key that is nowhere. Nothing here is in an engine's path: every call is made of
short holds of the store's lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvist.core.errors import NoSpaceError, StoreError
from kvist.core.events import Removed
from kvist.core.keys import Key
from kvist.core.lease import ReadLease
from kvist.core.outcome import Outcome, Tier
from kvist.store import forget, lineage, survey
from kvist.store.desk import WAKE_S, Desk
from kvist.store.entry import Entry, Idle, State
from kvist.store.link import LowerLink
from kvist.store.stats import BlockInfo

PINNED_DIVISOR = 2  # of DRAM at most this part may be pinned
_PROMOTE_BLOCKS = 16  # in one lease: an engine's reads wait behind no more than these
_EVICT_BLOCKS = 256


class Reads(Protocol):
    """`TieredStore.read`."""

    def __call__(self, keys: Sequence[Key], *, deadline_s: float, tenant: str = "") -> ReadLease:
        """See `core/lease.py`."""
        ...


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks that continue each other, of one tenant and in one tier.

    `last` is their name: a key stands for all blocks before it. `age_s` is that of the last.
    """

    first: Key
    last: Key
    tier: Tier
    tenant: str | None
    blocks: int
    size_bytes: int
    pinned_blocks: int
    leased_blocks: int
    age_s: float | None


@dataclass(frozen=True, slots=True)
class Held:
    """What a tenant has in a tier; a `tenant` of `None` stands for all that nobody is known of."""

    tier: Tier
    tenant: str | None
    blocks: int
    size_bytes: int
    pinned_blocks: int


@dataclass(frozen=True, slots=True)
class Done:
    """What became of the blocks of an order: changed, as they should be already, or neither."""

    changed: int
    present: int
    left: int


class Caretaker:
    """Thread-safe. `of` is the tenant whose blocks alone count; `None`: everybody's."""

    def __init__(
        self, desk: Desk, link: LowerLink | None, read: Reads, clear: Callable[[], None]
    ) -> None:
        """`read` and `clear` are the store's own."""
        self._desk, self._link, self._read, self._clear = desk, link, read, clear

    # -- looking ----------------------------------------------------------------------------

    def blocks(self, tier: Tier | None, of: str | None) -> Iterator[BlockInfo]:
        """See `survey.blocks`."""
        return survey.blocks(self._desk, self._link, tier, of=of)

    def prefix(
        self, ending: str, tier: Tier | None, of: str | None, *, alone: bool
    ) -> Iterator[BlockInfo]:
        """The blocks of the prefix whose last key begins with `ending` (hex), from the first on.

        `alone`: that last block only.

        Raises:
            StoreError: no key, or several, begin like that.
            TierError: the medium failed.
        """
        key = lineage.find(self._desk, self._link, ending, of)
        keys = [key] if alone else lineage.prefix(self._desk, self._link, key)
        parent: Key | None = None
        for key in keys:
            with self._desk.lock:
                found = survey.copies(self._desk, self._link, key)
            for info in found:
                if tier in (None, info.tier) and of in (None, info.tenant):
                    yield replace(info, parent=info.parent or parent)
            parent = key

    def runs(self, tier: Tier | None, of: str | None) -> Iterator[Run]:
        """The same as runs. Below, only blocks written one after the other are told as one.

        Raises:
            TierError: the medium failed.
        """
        link = self._link
        if tier in (None, Tier.DRAM):
            yield from self._runs_in_dram(of)
        if link is None or tier not in (None, link.name):
            return
        run: list[BlockInfo] = []
        for block in survey.below(self._desk, link, of):
            if run and (block.parent, block.tenant) != (run[-1].key, run[-1].tenant):
                yield _run(run, self._desk.table.raw_bytes)
                run = []
            run.append(block)
        if run:
            yield _run(run, self._desk.table.raw_bytes)

    def _runs_in_dram(self, of: str | None) -> Iterator[Run]:
        """Every block with another number of children than one ends a run, or two by tenant."""
        desk, table = self._desk, self._desk.table
        raw_bytes = table.raw_bytes
        with desk.lock:
            keys = list(table.entries)
        for key in keys:
            if table.children.get(key, 0) == 1:
                continue
            with desk.lock:
                line = self._line(key)
            start = 0
            for end in range(1, len(line) + 1):
                if end == len(line) or line[end].tenant != line[start].tenant:
                    if of in (None, line[start].tenant):
                        yield _run(line[start:end][::-1], raw_bytes)
                    start = end

    def _line(self, key: Key) -> list[BlockInfo]:
        """A block and those before it that no other continues; caller holds the lock."""
        table, line = self._desk.table, []
        entry = table.entries.get(key)
        while entry is not None and survey.shown(self._desk, entry):
            line.append(survey.resident(self._desk, entry))
            parent = entry.parent
            if parent is None or table.children.get(parent, 0) != 1:
                break
            entry = table.entries.get(parent)
        return line

    def usage(self, of: str | None) -> list[Held]:
        """Blocks and bytes by tier and tenant, the largest first.

        Raises:
            TierError: the medium failed.
        """
        count: Counter[tuple[Tier, str | None]] = Counter()
        size, pinned = count.copy(), count.copy()
        for block in self.blocks(None, of):
            place = (block.tier, block.tenant)
            count[place] += 1
            size[place] += block.size_bytes or self._desk.table.raw_bytes
            pinned[place] += block.pinned
        held = [Held(*at, count[at], size[at], pinned[at]) for at in count]
        return sorted(held, key=lambda h: (-h.size_bytes, h.tier.value, h.tenant or ""))

    # -- acting -----------------------------------------------------------------------------

    def evict(self, keys: Sequence[Key], of: str | None) -> Done:
        """Forgets blocks in every tier, but for those that are leased, pinned or moving.

        Raises:
            TierError: the tier below failed; DRAM has forgotten its copies all the same.
        """
        gone = forget.evict(self._desk, self._link, keys, of=of)
        return Done(gone, 0, len(set(keys)) - gone)

    def pin(self, keys: Sequence[Key], of: str | None) -> Done:
        """Keeps blocks that are in DRAM there, until `unpin` or `clear`.

        Raises:
            NoSpaceError: more than a part of DRAM would be pinned; nothing was.
        """
        desk, wanted = self._desk, list(dict.fromkeys(keys))
        with desk.lock:
            here = [e for key in wanted if (e := self._mine(key, of)) is not None and e.resident]
            fresh = [entry.key for entry in here if not entry.pinned]
            most = desk.table.arena.capacity_slots // PINNED_DIVISOR
            held = sum(e.pinned for e in desk.table.entries.values()) if fresh else 0
            if held + len(fresh) > most:
                raise NoSpaceError(f"no more can be pinned: at most {most} blocks of DRAM may be")
            changed = forget.set_pinned(desk, fresh, pinned=True)
        return Done(changed, len(here) - changed, len(wanted) - len(here))

    def unpin(self, keys: Sequence[Key], of: str | None) -> Done:
        """Undoes `pin`."""
        changed = forget.set_pinned(self._desk, keys, pinned=False, of=of)
        return Done(changed, len(set(keys)) - changed, 0)

    def demote(self, keys: Sequence[Key], of: str | None, *, deadline_s: float) -> Done:
        """Drops the copies in DRAM of blocks that are below, waiting for those on their way down.

        Raises:
            StoreError: nothing is below DRAM.
        """
        desk, link = self._desk, self._link
        if link is None:
            raise StoreError("nothing is below DRAM; set store.ssd.enabled=true and restart")
        until = desk.clock() + deadline_s
        waiting = list(dict.fromkeys(keys))
        total, dropped, there = len(waiting), [], 0
        with desk.changed:
            while True:
                left = []
                for key in waiting:
                    entry = self._mine(key, of)
                    if entry is None:
                        there += self._is_mine(key, of) and link.tier.contains(key)
                    elif entry.idle is Idle.CLEAN and link.tier.contains(key):
                        desk.table.drop(entry)
                        dropped.append(key)
                    elif entry.state is State.DIRTY and not (entry.refs or entry.pinned):
                        left.append(key)
                waiting, wait_s = left, until - desk.clock()
                if not waiting or wait_s <= 0:
                    break
                desk.changed.wait(min(wait_s, WAKE_S))
            if dropped:
                desk.outbox.put(Removed(tuple(dropped), Tier.DRAM))
        desk.outbox.drain()
        return Done(len(dropped), there, total - len(dropped) - there)

    def promote(
        self,
        keys: Sequence[Key],
        parents: Sequence[Key | None],
        of: str | None,
        *,
        deadline_s: float,
    ) -> Done:
        """Brings blocks up to DRAM, which makes room for them as for any read.

        `parents[i]` is the parent of block i, or `None` where it is not known. One that is another
        tenant's counts as unknown.
        """
        desk, until = self._desk, self._desk.clock() + deadline_s
        changed = present = 0
        batch: list[Key] = []
        head: Key | None = None  # the parent of the batch's first
        tenant: str | None = None
        for key, parent in zip(keys, parents, strict=True):
            with desk.lock:
                mine, owner = self._is_mine(key, of), desk.table.owner(key)
            if not mine:
                continue
            if key in desk.table.resident:
                present += 1
                continue
            follows = batch and parent == batch[-1] and owner == tenant
            if batch and (not follows or len(batch) == _PROMOTE_BLOCKS):
                changed += self._bring(head, batch, tenant, until)
                batch = []
            if not batch:
                known = parent is not None and self._is_mine(parent, of)
                head, tenant = parent if known else None, owner
            batch.append(key)
        changed += self._bring(head, batch, tenant, until)
        return Done(changed, present, len(keys) - changed - present)

    def _bring(
        self, head: Key | None, keys: Sequence[Key], tenant: str | None, until: float
    ) -> int:
        """Loads a run of blocks whose parent is `head`; says how many came."""
        left = until - self._desk.clock()
        if not keys or left <= 0:
            return 0
        above = [head] if head is not None and head in self._desk.table.resident else []
        try:
            with self._read([*above, *keys], deadline_s=left, tenant=tenant or "") as lease:
                outcomes = [lease.wait(i) for i in range(len(above), len(lease))]
        except NoSpaceError:
            return 0
        return outcomes.count(Outcome.HIT)

    def clear(self, of: str | None, *, deadline_s: float) -> tuple[int, bool]:
        """Forgets everything, or as much of a tenant's as the time allows.

        Everything: pinned blocks too. Of a tenant's, those pinned, leased or moving stay.

        Returns: blocks that are known to be gone, and whether none is left that could go.

        Raises:
            TierError: the tier below failed.
        """
        if of is None:
            with self._desk.lock:
                gone = len(self._desk.table.resident)
            self._clear()
            return gone, True
        until, gone = self._desk.clock() + deadline_s, 0
        batch: list[Key] = []
        for block in self.blocks(None, of):
            batch.append(block.key)
            if len(batch) == _EVICT_BLOCKS:
                gone += forget.evict(self._desk, self._link, batch, of=of)
                batch = []
                if self._desk.clock() >= until:
                    return gone, False
        return gone + forget.evict(self._desk, self._link, batch, of=of), True

    # -- inside -----------------------------------------------------------------------------

    def _is_mine(self, key: Key, of: str | None) -> bool:
        return of is None or self._desk.table.owner(key) == of

    def _mine(self, key: Key, of: str | None) -> Entry | None:
        return self._desk.table.entries.get(key) if self._is_mine(key, of) else None


def _run(blocks: Sequence[BlockInfo], raw_bytes: int) -> Run:
    """Blocks in the order of the prompt as one."""
    last = blocks[-1]
    return Run(
        blocks[0].key,
        last.key,
        last.tier,
        last.tenant,
        len(blocks),
        sum(block.size_bytes or raw_bytes for block in blocks),
        sum(block.pinned for block in blocks),
        sum(block.refs > 0 for block in blocks),
        last.age_s,
    )
