"""What a store counts and shows; no logic."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.core.keys import Key
from kvist.core.outcome import Tier
from kvist.store.breaker import BreakerState
from kvist.store.entry import State


@dataclass(slots=True)
class Counters:
    """Totals since the store began, all in blocks but `no_space` and `over_quota` (calls)."""

    read_dram: int = 0
    read_lower: int = 0
    read_joined: int = 0
    read_absent: int = 0
    late: int = 0
    loaded: int = 0
    load_missed: int = 0
    load_failed: int = 0
    load_cancelled: int = 0
    committed: int = 0
    write_present: int = 0
    write_lost: int = 0
    abandoned: int = 0
    flushed: int = 0
    flush_failed: int = 0
    evicted: int = 0
    evicted_unflushed: int = 0
    evicted_quota: int = 0
    over_quota: int = 0
    expired: int = 0
    filtered: int = 0
    prefetch_asked: int = 0
    prefetch_loaded: int = 0
    prefetch_dropped: int = 0
    prefetch_used: int = 0
    restored: int = 0
    no_space: int = 0
    adopted: int = 0
    adopt_failed: int = 0


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A snapshot. Counters are totals since the store began; the rest is the state now.

    `read_dram`, `read_lower` and `read_absent` say where blocks asked of `read` were at that
    moment, `read_joined` how many waited for a load that was under way. `late` blocks missed their
    deadline. `write_present` blocks needed no write; `write_lost` were dropped at commit.

    `evicted_quota` of those `evicted` went because their tenant was at its share; `over_quota` of
    the calls counted in `no_space` were refused for that. `expired` blocks outlived their
    time-to-live. `filtered` blocks were refused by the insert filter of the tier below. Wishes that
    were `prefetch_asked` end as `prefetch_loaded` or `prefetch_dropped` (late, no room, a read came
    first, gone below); of those loaded, `prefetch_used` were read later. `restored` blocks were
    brought back to DRAM after the start, before anyone asked. `adopted` blocks lay in the arena of
    the process before this one; those that `adopt_failed` were damaged, cleared or written anew.
    """

    capacity_blocks: int
    free_blocks: int
    dram_blocks: int
    dram_bytes: int
    dirty_blocks: int
    loading_blocks: int
    writing_blocks: int
    leased_blocks: int
    pinned_blocks: int
    leases: int
    prefetching_blocks: int
    lower_read: BreakerState | None
    lower_write: BreakerState | None
    lower_stalled: bool
    breaker_opened: int
    read_dram: int
    read_lower: int
    read_joined: int
    read_absent: int
    late: int
    loaded: int
    load_missed: int
    load_failed: int
    load_cancelled: int
    committed: int
    write_present: int
    write_lost: int
    abandoned: int
    flushed: int
    flush_failed: int
    evicted: int
    evicted_unflushed: int
    evicted_quota: int
    over_quota: int
    expired: int
    filtered: int
    prefetch_asked: int
    prefetch_loaded: int
    prefetch_dropped: int
    prefetch_used: int
    restored: int
    no_space: int
    adopted: int = 0
    adopt_failed: int = 0


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One block in one tier, as `list` and `stat` show it.

    `state`, `refs`, `pinned` and `age_s`, since its bytes came there, are those of a block in DRAM.
    `tenant` is `None` where nobody is known, `size_bytes` what the block takes in its tier, if that
    is known. A tier below may know no `parent`.
    """

    key: Key
    parent: Key | None
    tier: Tier
    state: State = State.CLEAN
    refs: int = 0
    pinned: bool = False
    tenant: str | None = None
    size_bytes: int | None = None
    age_s: float | None = None
