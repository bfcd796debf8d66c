"""What a store counts and shows; no logic."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.core.keys import Key
from kvist.core.outcome import Tier
from kvist.store.breaker import BreakerState
from kvist.store.entry import State


@dataclass(slots=True)
class Counters:
    """Totals since the store began, all in blocks but `no_space` (refused calls)."""

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
    no_space: int = 0


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A snapshot. Counters are totals since the store began; the rest is the state now.

    `read_dram`, `read_lower` and `read_absent` say where blocks asked of `read` were at that
    moment, `read_joined` how many waited for a load that was under way. `late` blocks missed their
    deadline. `write_present` blocks needed no write; `write_lost` were dropped at commit.
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
    no_space: int


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One resident block, as `list` shows it."""

    key: Key
    parent: Key | None
    tier: Tier
    state: State
    refs: int
    pinned: bool
