"""What a store shows of itself: its statistics, and the blocks that it holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from kvist.core.keys import Key
from kvist.core.outcome import Tier
from kvist.store.desk import Desk
from kvist.store.entry import Entry, Idle, State
from kvist.store.link import LowerLink
from kvist.store.stats import BlockInfo, StoreStats
from kvist.tiers.protocol import Lists

_BATCH_BLOCKS = 256  # shown under one hold of the store's lock


def snapshot(desk: Desk, link: LowerLink | None, *, prefetching_blocks: int) -> StoreStats:
    """The state now; caller holds the lock."""
    table = desk.table
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
        leases=len(desk.leases),
        prefetching_blocks=prefetching_blocks,
        lower_read=link.read.state if link else None,
        lower_write=link.write.state if link else None,
        lower_stalled=link is not None and link.reads_stalled(),
        breaker_opened=link.read.opened + link.write.opened if link else 0,
        **asdict(table.counters),
    )


def blocks(
    desk: Desk, link: LowerLink | None, tier: Tier | None = None, *, of: str | None = None
) -> Iterator[BlockInfo]:
    """The blocks of a tier, or of all from the fastest, oldest entry first; no lock is held.

    Only those of tenant `of`, if one is given. What comes or goes meanwhile may be missing. A tier
    below that cannot list has nothing here; listing one that can reads from its medium.

    Raises:
        TierError: the medium failed.
    """
    if tier in (None, Tier.DRAM):
        yield from in_dram(desk, of)
    if link is not None and tier in (None, link.name):
        yield from below(desk, link, of)


def in_dram(desk: Desk, of: str | None = None) -> Iterator[BlockInfo]:
    """The resident blocks, oldest entry first."""
    table = desk.table
    with desk.lock:
        keys = list(table.entries)
    for start in range(0, len(keys), _BATCH_BLOCKS):
        with desk.lock:
            found = [
                resident(desk, entry)
                for key in keys[start : start + _BATCH_BLOCKS]
                if (entry := table.entries.get(key)) is not None
                and shown(desk, entry)
                and of in (None, entry.tenant)
            ]
        yield from found


def below(desk: Desk, link: LowerLink, of: str | None = None) -> Iterator[BlockInfo]:
    """The blocks of the tier below, oldest first, without those that have expired.

    Raises:
        TierError: the medium failed.
    """
    if not isinstance(link.tier, Lists):
        return
    ages = desk.table.ages
    for block in link.tier.list_blocks():
        tenant = desk.table.owner(block.key)
        if block.own and of in (None, tenant) and (ages is None or ages.live(block.key)):
            size = block.size_bytes
            yield BlockInfo(block.key, block.parent, link.name, tenant=tenant, size_bytes=size)


def copies(desk: Desk, link: LowerLink | None, key: Key) -> tuple[BlockInfo, ...]:
    """The block's copies, fastest tier first; caller holds the lock."""
    entry = desk.table.entries.get(key)
    found = [resident(desk, entry)] if entry is not None and entry.resident else []
    if link is not None and link.tier.contains(key):
        (place,) = link.tiers_of((key,))
        parent = entry.parent if entry else None
        found.append(BlockInfo(key, parent, place, tenant=desk.table.owner(key)))
    return tuple(found)


def shown(desk: Desk, entry: Entry) -> bool:
    """Whether `entry` is there for others: resident, and not expired."""
    ages = desk.table.ages
    return entry.resident and (ages is None or entry.idle is Idle.NO or ages.live(entry.key))


def resident(desk: Desk, entry: Entry) -> BlockInfo:
    """A block in DRAM; caller holds the lock."""
    return BlockInfo(
        entry.key,
        entry.parent,
        Tier.DRAM,
        entry.state,
        entry.refs,
        entry.pinned,
        entry.tenant,
        desk.table.raw_bytes,
        desk.clock() - entry.since_s,
    )
