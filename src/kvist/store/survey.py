"""What a store shows of itself: its statistics, and the blocks that it holds."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice

from kvist.core.keys import Key
from kvist.core.outcome import Tier
from kvist.store.desk import Desk
from kvist.store.entry import Entry, Idle, State
from kvist.store.link import LowerLink
from kvist.store.stats import BlockInfo, StoreStats
from kvist.tiers.protocol import Lists


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


def in_dram(desk: Desk, limit: int) -> list[BlockInfo]:
    """Up to `limit` resident blocks, oldest entry first; caller holds the lock."""
    ages = desk.table.ages
    shown = (
        entry
        for entry in desk.table.entries.values()
        if entry.resident and (ages is None or entry.idle is Idle.NO or ages.live(entry.key))
    )
    return [_info(entry) for entry in islice(shown, limit)]


def below(desk: Desk, link: LowerLink, limit: int) -> list[BlockInfo]:
    """Up to `limit` blocks of the tier below, oldest first; reads from the medium, no lock held.

    Empty where the tier cannot list. Blocks that have expired are left out.

    Raises:
        TierError: the medium failed.
    """
    if not isinstance(link.tier, Lists):
        return []
    ages = desk.table.ages
    found = (
        BlockInfo(block.key, block.parent, link.name)
        for block in link.tier.list_blocks()
        if ages is None or ages.live(block.key)
    )
    return list(islice(found, limit))


def copies(desk: Desk, link: LowerLink | None, key: Key) -> tuple[BlockInfo, ...]:
    """The block's copies, fastest tier first; caller holds the lock."""
    entry = desk.table.entries.get(key)
    found = [_info(entry)] if entry is not None and entry.resident else []
    if link is not None and link.tier.contains(key):
        (place,) = link.tiers_of((key,))
        found.append(BlockInfo(key, entry.parent if entry else None, place))
    return tuple(found)


def _info(entry: Entry) -> BlockInfo:
    return BlockInfo(
        entry.key, entry.parent, Tier.DRAM, entry.state, entry.refs, entry.pinned, entry.tenant
    )
