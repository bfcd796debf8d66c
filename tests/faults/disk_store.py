"""A small `TieredStore` over a real SSD tier, as the tests of faults use it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path

from kvist.core.errors import NoSpaceError
from kvist.core.outcome import Outcome
from kvist.policy import LeafLru
from kvist.store import Breaker, BreakerState, StoreStats, TieredStore
from kvist.testing.store_suite import content, key, put
from kvist.tiers.dram import Arena
from kvist.tiers.ssd import EngineKind, FsyncMode, IoMode, SegmentIo, SsdTier

BLOCK_BYTES = 8192
FRAME_BYTES = 4096 + BLOCK_BYTES
WAIT_S = 20.0  # as long as it takes on a slow machine
STUCK_S = 0.5  # for disks that hang; else nothing counts as hung on a slow machine
IO_THREADS = 2
DEADLINE_S = 0.1
# A read answers within its deadline; this much more is the machine's, not ours.
GRACE_S = 20.0
_FRESH = count(10_000)


@dataclass(frozen=True, slots=True)
class DiskStore:
    """A store, and the tier below it for its counters."""

    store: TieredStore
    tier: SsdTier

    def stats(self) -> StoreStats:
        return self.store.stats()


@contextmanager
def disk_store(
    directory: Path,
    *,
    blocks: int = 16,
    capacity_bytes: int = 4 << 20,
    segment_bytes: int = 1 << 20,
    fsync: FsyncMode = FsyncMode.OFF,
    mode: IoMode = IoMode.AUTO,
    engine: EngineKind = EngineKind.AUTO,
    io: SegmentIo | None = None,
    stuck_s: float = WAIT_S,
) -> Iterator[DiskStore]:
    """Opens a store of `blocks` slots; at the end it must be sound, and is closed.

    An `io` is asked to sync; it may do as it likes.
    """
    tier = SsdTier.open(
        directory,
        keyspace=bytes(32),
        capacity_bytes=capacity_bytes,
        segment_bytes=segment_bytes,
        fsync=FsyncMode.BATCH if io is not None else fsync,
        mode=mode,
        engine=engine,
        io=io,
    )
    store = TieredStore(
        Arena(blocks * BLOCK_BYTES, slot_bytes=BLOCK_BYTES),
        LeafLru(),
        tier,
        raw_bytes=BLOCK_BYTES,
        io_threads=IO_THREADS,
        stuck_s=stuck_s,
        breaker=lambda: Breaker(
            clock=time.monotonic, random=lambda: 0.5, threshold=3, probe_s=0.01, probe_max_s=0.05
        ),
    )
    try:
        yield DiskStore(store, tier)
        store.check_integrity()
    finally:
        store.close(deadline_s=WAIT_S)


def eventually(claim: Callable[[], bool]) -> None:
    """Waits until `claim` holds."""
    end = time.monotonic() + WAIT_S
    while not claim():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.002)


def put_soon(store: TieredStore, numbers: Iterable[int]) -> None:
    """Writes blocks one by one, each as soon as there is room: a write below may hold slots."""

    def is_put(n: int) -> bool:
        try:
            return put(store, [n]) == [True]
        except NoSpaceError:
            return False

    for n in numbers:
        eventually(partial(is_put, n))


def write_below(store: TieredStore, numbers: Iterable[int]) -> None:
    """Writes blocks until each is durable below, a few at a time."""
    for n in numbers:
        assert store.flush(WAIT_S)
        put(store, [n])
    assert store.flush(WAIT_S)


def forget_dram(disk: DiskStore) -> None:
    """Fills DRAM with other blocks, so that what was in it is below only. Needs a sound disk."""
    write_below(disk.store, islice(_FRESH, disk.stats().capacity_blocks))


def read(store: TieredStore, numbers: Sequence[int], *, deadline_s: float = WAIT_S) -> list[int]:
    """As `read_at_once`, again while there is no room: a write below may hold slots."""
    end = time.monotonic() + WAIT_S
    while True:
        try:
            return read_at_once(store, numbers, deadline_s=deadline_s)
        except NoSpaceError:
            assert time.monotonic() < end, "there never was room"
            time.sleep(0.002)


def read_at_once(store: TieredStore, numbers: Sequence[int], *, deadline_s: float) -> list[int]:
    """Which blocks are hits; fails on wrong bytes, or where the deadline was not kept.

    Raises:
        NoSpaceError: there is no room for them now.
    """
    began = time.monotonic()
    found = []
    with store.read([key(n) for n in numbers], deadline_s=deadline_s) as lease:
        for i, n in enumerate(numbers):
            outcome = lease.wait(i)
            assert outcome is not Outcome.PENDING
            if outcome is Outcome.HIT:
                assert bytes(lease.buffer(i)) == content(key(n), BLOCK_BYTES), f"wrong bytes of {n}"
                found.append(n)
    assert time.monotonic() - began < deadline_s + GRACE_S
    return found


def read_one_by_one(store: TieredStore, numbers: Iterable[int]) -> list[int]:
    """As `read`, a lease for each: for stores with fewer slots than blocks."""
    return [n for n in numbers if read(store, [n])]


def heals(disk: DiskStore, below: int, fresh: int) -> None:
    """The tier comes back by itself: blocks go down, `below` is read from it, then `fresh` too."""
    forget_dram(disk)
    eventually(lambda: read(disk.store, [below]) == [below])
    closed = BreakerState.CLOSED
    eventually(lambda: (disk.stats().lower_read, disk.stats().lower_write) == (closed, closed))
    eventually(lambda: not disk.stats().lower_stalled)
    write_below(disk.store, [fresh])
    assert disk.tier.contains(key(fresh))
    forget_dram(disk)
    eventually(lambda: read(disk.store, [fresh]) == [fresh])
