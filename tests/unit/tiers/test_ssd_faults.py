"""A medium that fails gives `TierError` or `TierFullError`, and loses only what it must."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvist.core.errors import TierError, TierFullError
from kvist.testing.chaos import Call, ChaosIo, Effect, Fault
from kvist.testing.tier_suite import BLOCK_BYTES, read_block, suite_block, suite_key, suite_payload
from kvist.tiers.ssd import FsyncMode, PosixIo, SegmentIo, SsdTier, scan_directory

CAPACITY_BYTES = 1 << 20
COMMAND_TIMEOUT_S = 20


def open_tier(directory: Path, io: SegmentIo, capacity_bytes: int = CAPACITY_BYTES) -> SsdTier:
    return SsdTier.open(directory, keyspace=bytes(32), capacity_bytes=capacity_bytes, io=io)


def fill(tier: SsdTier) -> None:
    for i in range(200):
        tier.put([suite_payload(i)])


def wrong(tier: SsdTier, count: int) -> list[int]:
    """Blocks that are neither right nor absent."""
    return [i for i in range(count) if read_block(tier, i) not in (None, suite_block(i))]


def test_short_writes_and_reads_are_continued(tmp_path: Path) -> None:
    io = ChaosIo()
    io.set(
        Fault(Call.WRITE, Effect.SHORT, limit_bytes=999),
        Fault(Call.READ, Effect.SHORT, limit_bytes=777),
    )
    tier = open_tier(tmp_path, io)
    tier.put([suite_payload(i) for i in range(10)])
    assert [read_block(tier, i) for i in range(10)] == [suite_block(i) for i in range(10)]
    tier.close()
    tier = open_tier(tmp_path, io)
    assert [read_block(tier, i) for i in range(10)] == [suite_block(i) for i in range(10)]
    tier.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("partial_bytes", [0, 1000, 4096])
def test_full_medium_is_tier_full_and_leaves_no_partial_frame(
    tmp_path: Path, code: int, partial_bytes: int
) -> None:
    io = ChaosIo()
    tier = open_tier(tmp_path, io)
    tier.put([suite_payload(1)])
    io.set(Fault(Call.WRITE, code=code, limit_bytes=partial_bytes))
    with pytest.raises(TierFullError) as info:
        tier.put([suite_payload(2)])
    assert info.value.errno == code
    assert not tier.contains(suite_key(2))
    assert scan_directory(tmp_path).corrupt_frames == 0
    assert sum(s.torn_bytes for s in scan_directory(tmp_path).segments) == 0
    io.heal()
    tier.put([suite_payload(3)])
    assert read_block(tier, 3) == suite_block(3)
    tier.close()
    tier = open_tier(tmp_path, io)
    assert read_block(tier, 3) == suite_block(3)
    assert not tier.contains(suite_key(2))
    tier.close()


@pytest.mark.parametrize("call", [Call.WRITE, Call.SYNC, Call.OPEN])
def test_failing_medium_is_a_tier_error_and_the_block_is_absent(tmp_path: Path, call: Call) -> None:
    io = ChaosIo()
    tier = open_tier(tmp_path, io)
    if call is not Call.OPEN:
        tier.put([suite_payload(1)])
    io.set(Fault(call))
    with pytest.raises(TierError) as info:
        tier.put([suite_payload(2), suite_payload(3)])
    assert info.value.errno == errno.EIO
    assert not isinstance(info.value, TierFullError)
    assert not tier.contains(suite_key(2))
    io.heal()
    if call is not Call.OPEN:
        assert read_block(tier, 1) == suite_block(1)
    tier.put([suite_payload(4)])
    tier.close()
    tier = open_tier(tmp_path, io)
    assert not tier.contains(suite_key(2))
    assert read_block(tier, 4) == suite_block(4)
    tier.close()


def test_failing_read_is_a_tier_error_and_keeps_the_block(tmp_path: Path) -> None:
    io = ChaosIo()
    tier = open_tier(tmp_path, io)
    tier.put([suite_payload(1)])
    io.set(Fault(Call.READ))
    with pytest.raises(TierError):
        read_block(tier, 1)
    io.heal()
    assert read_block(tier, 1) == suite_block(1)
    tier.close()


def test_block_is_hidden_even_if_its_tombstone_cannot_be_written(tmp_path: Path) -> None:
    io = ChaosIo()
    tier = open_tier(tmp_path, io)
    tier.put([suite_payload(1)])
    io.set(Fault(Call.WRITE))
    with pytest.raises(TierError):
        tier.remove([suite_key(1)])
    assert not tier.contains(suite_key(1))
    io.heal()
    tier.close()


def test_segment_that_cannot_be_deleted_stays_counted(tmp_path: Path) -> None:
    io = ChaosIo()
    tier = open_tier(tmp_path, io)
    io.set(Fault(Call.UNLINK, code=errno.EACCES))
    with pytest.raises(TierError):
        fill(tier)
    used = sum(p.stat().st_size for p in tmp_path.iterdir())
    assert used <= tier.stats().bytes_used <= CAPACITY_BYTES
    io.heal()
    tier.put([suite_payload(999)])
    assert read_block(tier, 999) == suite_block(999)
    assert wrong(tier, 200) == []
    tier.close()


def test_failed_footer_is_counted_and_the_segment_is_scanned(tmp_path: Path) -> None:
    io = ChaosIo()
    tier = open_tier(tmp_path, io)
    tier.put([suite_payload(1)])
    io.set(Fault(Call.WRITE))
    tier.close()
    assert tier.stats().footer_failures == 1
    tier = open_tier(tmp_path, PosixIo())
    assert tier.stats().recovered_segments == 1
    assert read_block(tier, 1) == suite_block(1)
    tier.close()


def test_failed_open_gives_the_directory_back(tmp_path: Path) -> None:
    io = ChaosIo()
    tier = open_tier(tmp_path, io)
    tier.put([suite_payload(1)])
    tier.close()
    io.set(Fault(Call.READ))
    with pytest.raises(TierError):
        open_tier(tmp_path, io)
    io.heal()
    open_tier(tmp_path, io).close()


def test_deleted_directory_is_a_tier_error(tmp_path: Path) -> None:
    directory = tmp_path / "tier"
    tier = open_tier(directory, PosixIo())
    tier.put([suite_payload(1)])
    shutil.rmtree(directory)
    assert read_block(tier, 1) == suite_block(1)  # the file is still open
    for i in range(2, 40):
        with pytest.raises(TierError):
            tier.put([suite_payload(i)])
        assert not tier.contains(suite_key(i))
    with pytest.raises(TierError):
        tier.verify()
    tier.close()


@pytest.mark.parametrize("seed", range(6))
def test_random_faults_never_give_wrong_bytes_or_another_exception(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    io = ChaosIo()
    tier = open_tier(tmp_path, io, 300_000)
    absent: set[int] = set()  # removed, or never stored
    codes = [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS]
    for i in range(150):
        calls = chance.sample(list(Call), chance.randrange(3)) if chance.random() < 0.4 else []
        limit_bytes = chance.choice([0, 100, 4096])
        io.set(*(Fault(c, code=chance.choice(codes), limit_bytes=limit_bytes) for c in calls))
        try:
            tier.put([suite_payload(i)])
        except TierError:
            absent.add(i)
        assert tier.contains(suite_key(i)) == (i not in absent)
        try:
            read_block(tier, chance.randrange(i + 1))
            if chance.random() < 0.2:
                tier.remove([suite_key(i)])
                absent.add(i)
        except TierError:
            pass
        used = sum(p.stat().st_size for p in tmp_path.iterdir())
        assert used <= 300_000
        if chance.random() < 0.05:
            io.heal()
            tier.close()
            tier = open_tier(tmp_path, io, 300_000)
    io.heal()
    assert wrong(tier, 150) == []
    tier.close()
    tier = open_tier(tmp_path, io, 300_000)
    assert wrong(tier, 150) == []
    assert not any(tier.contains(suite_key(i)) for i in absent)
    tier.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    where = tmp_path / "disk"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "kvist-test", str(where)]
    try:
        done = subprocess.run(mount, capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.decode().strip()}")
    yield where
    subprocess.run(["umount", "-l", str(where)], timeout=COMMAND_TIMEOUT_S, check=True)


def test_disk_smaller_than_the_cap_keeps_the_newest_blocks(small_disk: Path) -> None:
    """ENOSPC from a real file system: the oldest segment goes, the write is tried once more."""
    tier = open_tier(small_disk / "tier", PosixIo(), CAPACITY_BYTES)
    for i in range(150):
        tier.put([suite_payload(i)])
        assert read_block(tier, i) == suite_block(i)
    assert tier.stats().evicted_blocks > 0
    with pytest.raises(TierFullError):
        tier.put([suite_payload(1000, 600_000)])
    assert wrong(tier, 150) == []
    tier.close()
    tier = open_tier(small_disk / "tier", PosixIo(), CAPACITY_BYTES)
    assert wrong(tier, 150) == []
    tier.close()


def test_disk_filled_by_others_is_tier_full(small_disk: Path) -> None:
    tier = SsdTier.open(
        small_disk / "tier", keyspace=bytes(32), capacity_bytes=1 << 20, fsync=FsyncMode.OFF
    )
    tier.put([suite_payload(1)])
    free_bytes = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    (small_disk / "other").write_bytes(bytes(free_bytes))
    with pytest.raises(TierFullError):
        tier.put([suite_payload(2, 4 * BLOCK_BYTES)])
    assert not tier.contains(suite_key(2))
    tier.close()
