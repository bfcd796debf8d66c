"""The same faults as the kernel makes them. Each is skipped, with a reason, where it needs root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from disk_store import (
    DEADLINE_S,
    STUCK_S,
    WAIT_S,
    DiskStore,
    disk_store,
    eventually,
    forget_dram,
    heals,
    put_soon,
    read,
    read_one_by_one,
    write_below,
)
from real_media import LoopDisk, loop_disk, small_tmpfs, stopped, tasks

from kvist.core.errors import TierError
from kvist.native import IMPLEMENTATION
from kvist.store import BreakerState
from kvist.testing.store_suite import key, put
from kvist.tiers.ssd import EngineKind, FsyncMode, IoMode

COUNT = 8
MANY = 64  # slots: more than a write that hangs in the kernel can keep


@pytest.fixture
def disk_image(tmp_path: Path) -> Iterator[LoopDisk]:
    with loop_disk(tmp_path) as found:
        yield found


def fill_up(path: Path) -> None:
    """Leaves no byte free on the file system of `path`."""
    with path.open("ab", buffering=0) as file:
        for size in (65536, 4096):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))


def write_in_vain(disk: DiskStore, start: int) -> None:
    """Writes twice as many blocks as DRAM holds: every one is taken, although none goes down."""
    put_soon(disk.store, range(start, start + 2 * disk.stats().capacity_blocks))


def test_disk_that_others_fill_up_refuses_writes_and_heals(tmp_path: Path) -> None:
    with (
        small_tmpfs(tmp_path / "disk", size_bytes=2 << 20) as where,
        disk_store(where / "tier", blocks=MANY, capacity_bytes=4 << 20) as disk,
    ):
        fill_up(where / "other")
        put(disk.store, range(COUNT))
        eventually(lambda: disk.stats().flush_failed > 0)
        assert disk.stats().lower_read is BreakerState.CLOSED
        assert disk.stats().breaker_opened >= 1
        write_in_vain(disk, 200)
        assert disk.stats().evicted_unflushed > 0
        (where / "other").unlink()
        write_below(disk.store, [900])
        heals(disk, 900, 901)


def test_full_disk_leaves_the_tier_the_space_that_it_has(tmp_path: Path) -> None:
    """Its oldest blocks make room for the newest, since nobody else's bytes can."""
    with (
        small_tmpfs(tmp_path / "disk", size_bytes=2 << 20) as where,
        disk_store(where / "tier", blocks=MANY, capacity_bytes=4 << 20) as disk,
    ):
        write_below(disk.store, range(COUNT))
        fill_up(where / "other")
        write_below(disk.store, range(100, 100 + 4 * COUNT))
        assert disk.tier.stats().evicted_blocks > 0
        assert disk.stats().load_failed == 0
        forget_dram(disk)
        assert len(read(disk.store, range(100, 100 + 4 * COUNT))) <= COUNT
        (where / "other").unlink()
        write_below(disk.store, [900])
        heals(disk, 900, 901)


def test_disk_smaller_than_the_cap_goes_on_with_the_newest_blocks(tmp_path: Path) -> None:
    with (
        small_tmpfs(tmp_path / "disk", size_bytes=1 << 20) as where,
        disk_store(where / "tier", capacity_bytes=4 << 20, segment_bytes=1) as disk,
    ):
        write_below(disk.store, range(200))
        assert disk.tier.stats().evicted_blocks > 0
        assert 199 in read_one_by_one(disk.store, range(200))
        assert disk.stats().load_failed == 0


def test_file_system_that_turns_read_only_serves_reads_and_refuses_writes(tmp_path: Path) -> None:
    """As after a fatal error of the disk: `mount -o remount,ro` refuses while files are open."""
    with (
        loop_disk(tmp_path) as image,
        disk_store(image.where / "tier", fsync=FsyncMode.BATCH) as disk,
    ):
        write_below(disk.store, range(COUNT))
        forget_dram(disk)
        image.make_read_only()
        write_in_vain(disk, 200)
        assert disk.stats().breaker_opened >= 1
        assert disk.stats().flush_failed >= 1
        assert disk.stats().evicted_unflushed >= 1
        assert read(disk.store, range(COUNT)) == list(range(COUNT))
        assert disk.stats().lower_read is BreakerState.CLOSED
        disk.store.check_integrity()
        with suppress(TierError):  # the footer cannot be written
            disk.store.close(deadline_s=WAIT_S)
    with (
        loop_disk(tmp_path, check=True) as image,
        disk_store(image.where / "tier", fsync=FsyncMode.BATCH) as disk,
    ):
        assert read(disk.store, range(COUNT)) == list(range(COUNT))
        heals(disk, 0, 500)


def test_frozen_file_system_holds_up_neither_callers_nor_readers(disk_image: LoopDisk) -> None:
    with disk_store(
        disk_image.where / "tier", fsync=FsyncMode.BATCH, blocks=MANY, stuck_s=STUCK_S
    ) as disk:
        write_below(disk.store, range(COUNT))
        forget_dram(disk)
        with disk_image.frozen():
            write_in_vain(disk, 200)
            assert disk.stats().evicted_unflushed >= 1
            assert read(disk.store, range(COUNT)) == list(range(COUNT))
        assert disk.store.flush(WAIT_S)
        heals(disk, 0, 500)


def test_disk_whose_sectors_are_gone_gives_misses_and_heals(disk_image: LoopDisk) -> None:
    with disk_store(disk_image.where / "tier", fsync=FsyncMode.BATCH, mode=IoMode.DIRECT) as disk:
        write_below(disk.store, range(COUNT))
        forget_dram(disk)
        if disk.tier.stats().buffered_segments:
            pytest.skip("no O_DIRECT: what is in the page cache cannot fail")
        with disk_image.unreadable():
            for n in range(COUNT):
                assert read(disk.store, [n]) == []
            assert disk.stats().load_failed >= 3
            assert disk.stats().breaker_opened >= 1
        heals(disk, 0, 500)
        assert read(disk.store, range(COUNT)) == list(range(COUNT))


@pytest.mark.skipif(IMPLEMENTATION != "native", reason="Python's threads hold Python's lock")
@pytest.mark.parametrize("mode", [IoMode.DIRECT, IoMode.BUFFERED])
def test_stopped_io_threads_cost_a_deadline_and_heal(tmp_path: Path, mode: IoMode) -> None:
    """As if SIGSTOP could stop one thread: those that read and write stand still, ours run."""
    before = tasks()
    with disk_store(
        tmp_path, blocks=MANY, engine=EngineKind.POOL, mode=mode, stuck_s=STUCK_S
    ) as disk:
        write_below(disk.store, range(COUNT))
        forget_dram(disk)
        assert read(disk.store, range(COUNT)) == list(range(COUNT))  # every engine has its threads
        forget_dram(disk)
        ours = {thread.native_id for thread in disk.store._loader.threads}
        ours.add(disk.store._writer.thread.native_id)
        workers = {t for t in tasks() - before if t not in ours}
        assert workers
        with stopped(workers):
            for half in (range(4), range(4, 8)):  # one for each thread that loads
                assert read(disk.store, half, deadline_s=DEADLINE_S) == []
            assert disk.stats().late == COUNT
            eventually(lambda: disk.stats().lower_stalled)
            assert len(disk.store.match([key(0)])) == 0
            write_in_vain(disk, 200)
            assert disk.stats().evicted_unflushed >= 1
        heals(disk, 0, 500)
        assert read(disk.store, range(COUNT)) == list(range(COUNT))


def test_directory_that_is_deleted_under_a_store_costs_misses_only(tmp_path: Path) -> None:
    with disk_store(tmp_path / "tier", segment_bytes=1) as disk:
        write_below(disk.store, range(COUNT))
        for path in (tmp_path / "tier").iterdir():
            path.unlink()
        os.rmdir(tmp_path / "tier")
        write_in_vain(disk, 200)
        assert disk.stats().flush_failed >= 1
        read_one_by_one(disk.store, range(COUNT))
        disk.store.check_integrity()
        with suppress(TierError):
            disk.store.close(deadline_s=WAIT_S)
