"""ENOSPC, EIO, a slow and a hung disk, on every call: misses in time, counted, and then healed."""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path

import pytest
from disk_store import (
    DEADLINE_S,
    IO_THREADS,
    STUCK_S,
    WAIT_S,
    DiskStore,
    disk_store,
    eventually,
    forget_dram,
    heals,
    put_soon,
    read,
    read_at_once,
    read_one_by_one,
    write_below,
)

from kvist.core.errors import NoSpaceError, TierError
from kvist.core.outcome import Outcome, Tier
from kvist.store import BreakerState
from kvist.testing.chaos import Call, ChaosIo, Effect, Fault, draw_faults
from kvist.testing.store_suite import key, put
from kvist.tiers.ssd import SsdTier

SEEDS = range(int(os.environ.get("KVIST_CHAOS_SEEDS", "12")))
PHASES = 12
SLOW_S = 5.0  # hung, for as long as a test looks
DELAY_S = 0.2


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_failing_reads_are_counted_misses_and_heal(tmp_path: Path, code: int) -> None:
    io = ChaosIo()
    with disk_store(tmp_path, io=io) as disk:
        write_below(disk.store, range(8))
        forget_dram(disk)
        io.set(Fault(Call.READ, code=code))
        assert read(disk.store, range(8)) == []
        for n in range(8):
            assert read(disk.store, [n]) == []
        stats = disk.stats()
        assert stats.load_failed >= 3
        assert stats.breaker_opened >= 1
        assert stats.lower_write is BreakerState.CLOSED  # the sides are judged apart
        io.heal()
        heals(disk, 0, 100)
        assert read(disk.store, range(8)) == list(range(8))  # an error drops no block


@pytest.mark.parametrize("call", [Call.WRITE, Call.SYNC, Call.OPEN])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_failing_writes_leave_blocks_in_dram_and_heal(
    tmp_path: Path, call: Call, code: int
) -> None:
    io = ChaosIo()
    # Of several segments: a full disk costs the oldest ones only.
    with disk_store(tmp_path, io=io, capacity_bytes=8 << 20, segment_bytes=1) as disk:
        write_below(disk.store, range(64))
        assert disk.tier.stats().segments > 4
        io.set(Fault(call, code=code))
        put_soon(disk.store, range(100, 110))
        eventually(lambda: disk.stats().breaker_opened >= 1)
        assert read(disk.store, range(100, 110)) == list(range(100, 110))
        assert disk.stats().lower_read is BreakerState.CLOSED
        assert disk.stats().flush_failed >= 1
        assert disk.stats().dirty_blocks >= 1
        # DRAM full of blocks that cannot go down: they give way, counted, nothing is refused.
        put_soon(disk.store, range(200, 232))
        assert disk.stats().evicted_unflushed >= 1
        assert read(disk.store, [63]) in ([63], [])
        io.heal()
        write_below(disk.store, [300])
        heals(disk, 300, 301)
    with disk_store(tmp_path, capacity_bytes=8 << 20) as disk:
        assert 300 in read_one_by_one(disk.store, [*range(64), *range(100, 110), 300])


def test_segment_that_cannot_be_deleted_refuses_writes_and_heals(tmp_path: Path) -> None:
    io = ChaosIo()
    with disk_store(tmp_path, io=io, capacity_bytes=1 << 20) as disk:
        write_below(disk.store, range(80))
        io.set(Fault(Call.UNLINK, code=errno.EACCES))
        put_soon(disk.store, range(100, 140))
        eventually(lambda: disk.stats().breaker_opened >= 1)
        used = sum(p.stat().st_size for p in tmp_path.iterdir())
        assert used <= disk.tier.stats().bytes_used <= 1 << 20
        io.heal()
        write_below(disk.store, [200])
        heals(disk, 200, 201)


def test_slow_disk_costs_the_deadline_and_trips_the_breaker(tmp_path: Path) -> None:
    io = ChaosIo()
    with disk_store(tmp_path, io=io, stuck_s=STUCK_S) as disk:
        write_below(disk.store, range(8))
        forget_dram(disk)
        io.set(Fault(Call.READ, Effect.SLOW, delay_s=SLOW_S))
        assert read(disk.store, [0, 1], deadline_s=DEADLINE_S) == []
        assert disk.stats().late == 2
        assert read(disk.store, [2], deadline_s=DEADLINE_S) == []
        eventually(lambda: disk.stats().lower_stalled)
        assert len(disk.store.match([key(3)])) == 0  # a disk that dawdles promises nothing
        io.heal()
        heals(disk, 3, 100)


def test_slow_writes_do_not_slow_callers_or_readers(tmp_path: Path) -> None:
    io = ChaosIo()
    with disk_store(tmp_path, io=io) as disk:
        write_below(disk.store, range(4))
        forget_dram(disk)
        io.set(Fault(Call.WRITE, Effect.SLOW, delay_s=DELAY_S))
        for n in range(100, 104):
            assert put(disk.store, [n]) == [True]
        assert read(disk.store, [0, 1, 2, 3]) == [0, 1, 2, 3]
        eventually(lambda: disk.stats().flush_failed == 0 and disk.stats().dirty_blocks == 0)
        assert io.met[Call.WRITE, Effect.SLOW] >= 1
        io.heal()
        heals(disk, 0, 200)


def hang_reads(disk: DiskStore, io: ChaosIo, numbers: range) -> None:
    io.set(Fault(Call.READ, Effect.HANG))
    for n in numbers:
        assert read(disk.store, [n], deadline_s=DEADLINE_S) == []
    for _ in range(IO_THREADS):
        assert io.hanging.acquire(timeout=WAIT_S)
    eventually(lambda: disk.stats().lower_stalled)


def test_hung_reads_are_misses_at_the_deadline_and_then_at_once(tmp_path: Path) -> None:
    io = ChaosIo()
    with disk_store(tmp_path, io=io, stuck_s=STUCK_S) as disk:
        write_below(disk.store, range(8))
        forget_dram(disk)
        hang_reads(disk, io, range(IO_THREADS))
        assert disk.store.match([key(5)]) == disk.store.match([key(77)])
        with disk.store.read([key(5)], deadline_s=WAIT_S) as lease:
            assert lease.outcome(0) is Outcome.MISS  # not even the deadline is waited for
        put(disk.store, [100])
        assert disk.store.flush(WAIT_S)  # writes still go down
        assert disk.stats().late == IO_THREADS
        io.heal()
        heals(disk, 5, 101)
        assert read(disk.store, range(8)) == list(range(8))


@pytest.mark.parametrize("call", [Call.WRITE, Call.SYNC])
def test_hung_writes_hold_up_neither_callers_nor_readers(tmp_path: Path, call: Call) -> None:
    io = ChaosIo()
    with disk_store(tmp_path, io=io, stuck_s=STUCK_S) as disk:
        write_below(disk.store, range(4))
        forget_dram(disk)
        io.set(Fault(call, Effect.HANG))
        assert put(disk.store, [100]) == [True]
        assert io.hanging.acquire(timeout=WAIT_S)
        assert read(disk.store, [0, 1, 2, 3]) == [0, 1, 2, 3]
        put_soon(disk.store, range(101, 140))
        assert disk.stats().evicted_unflushed >= 1
        io.heal()
        assert disk.store.flush(WAIT_S)
        heals(disk, 100, 200)


@pytest.mark.parametrize("call", [Call.READ, Call.WRITE, Call.SYNC])
def test_closing_over_a_hung_disk_ends_at_its_deadline(tmp_path: Path, call: Call) -> None:
    io = ChaosIo()
    with disk_store(tmp_path, io=io, stuck_s=STUCK_S) as disk:
        write_below(disk.store, range(4))
        forget_dram(disk)
        if call is Call.READ:
            hang_reads(disk, io, range(IO_THREADS))
        else:
            io.set(Fault(call, Effect.HANG))
            put(disk.store, [100])
            assert io.hanging.acquire(timeout=WAIT_S)
        closer = threading.Thread(target=lambda: disk.store.close(deadline_s=DEADLINE_S))
        closer.start()
        closer.join(WAIT_S)
        assert not closer.is_alive()
        io.heal()
        disk.store.check_integrity()
    disk.tier.close()  # the store left it to us, unclosed
    with disk_store(tmp_path) as disk:
        assert read(disk.store, range(4)) == list(range(4))


@pytest.mark.parametrize("call", [Call.OPEN, Call.READ])
def test_disk_that_fails_when_it_is_opened_gives_the_directory_back(
    tmp_path: Path, call: Call
) -> None:
    io = ChaosIo()
    with disk_store(tmp_path, io=io) as disk:
        write_below(disk.store, range(4))
    io.set(Fault(call))
    with pytest.raises(TierError):
        SsdTier.open(tmp_path, keyspace=bytes(32), capacity_bytes=1 << 20, io=io)
    io.heal()
    with disk_store(tmp_path, io=io) as disk:
        assert disk.store.match([key(n) for n in range(4)]).tiers == (Tier.SSD,) * 4
        assert read(disk.store, range(4)) == list(range(4))


@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_faults_cost_misses_only_and_the_tier_heals(tmp_path: Path, seed: int) -> None:
    """The schedule is a seed: phases of faults, with reads, writes and evictions in each."""
    chance = random.Random(seed)
    io = ChaosIo(seed=seed)
    known = 20
    with disk_store(tmp_path, io=io, capacity_bytes=1 << 20, stuck_s=STUCK_S) as disk:
        write_below(disk.store, range(known))
        for _ in range(PHASES):
            io.set(*draw_faults(chance, delay_s=DELAY_S))
            for _ in range(6):
                numbers = sorted(chance.sample(range(known), chance.randrange(1, 5)))
                try:
                    if chance.random() < 0.4:
                        put(disk.store, range(known, known + 3))
                        known += 3
                    else:
                        read_at_once(disk.store, numbers, deadline_s=chance.choice([0, 0.01, 0.05]))
                except NoSpaceError:
                    continue
            assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= 1 << 20
            disk.store.check_integrity()
        io.heal()
        write_below(disk.store, [known])
        heals(disk, known, known + 1)
        read_one_by_one(disk.store, range(known))
        stats = disk.stats()
        assert (stats.leases, stats.leased_blocks, stats.loading_blocks) == (0, 0, 0)
    with disk_store(tmp_path, capacity_bytes=1 << 20) as disk:
        assert known in read_one_by_one(disk.store, range(known + 1))
        assert disk.tier.stats().corrupt_frames == 0


def test_chaos_of_one_seed_meets_the_same_calls(tmp_path: Path) -> None:
    def met(seed: int) -> list[bool]:
        io = ChaosIo(seed=seed)
        io.set(Fault(Call.UNLINK, chance_ratio=0.5))
        failed = []
        for _ in range(40):
            (tmp_path / "f").touch()
            try:
                io.unlink(tmp_path / "f")
                failed.append(False)
            except OSError:
                failed.append(True)
        return failed

    assert met(1) == met(1)
    assert met(1) != met(2)
    assert 5 < sum(met(1)) < 35
    assert draw_faults(random.Random(3), delay_s=1) == draw_faults(random.Random(3), delay_s=1)
