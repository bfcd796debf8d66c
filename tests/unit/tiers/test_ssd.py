"""The SSD tier: bytes, byte cap, hot blocks, lock, removal, statistics."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvist.core.errors import ClosedError, ConfigError, TierBusyError, TierError, TierFullError
from kvist.core.outcome import Outcome
from kvist.native import checksum
from kvist.testing.tier_suite import BLOCK_BYTES, read_block, suite_block, suite_key, suite_payload
from kvist.tiers.protocol import Payload
from kvist.tiers.ssd import FsyncMode, MissCause, SegmentState, SsdTier, scan_directory

KEYSPACE = b"k" * 32
CAPACITY_BYTES = 1 << 20


def open_tier(
    directory: Path, *, capacity_bytes: int = CAPACITY_BYTES, keyspace: bytes = KEYSPACE
) -> SsdTier:
    return SsdTier.open(
        directory, keyspace=keyspace, capacity_bytes=capacity_bytes, fsync=FsyncMode.OFF
    )


def walked_bytes(directory: Path) -> int:
    found = [p.lstat() for p in directory.iterdir()]
    return sum(max(f.st_size, f.st_blocks * 512) for f in found)


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("segment-*.kvs"))


def test_clean_close_leaves_only_sealed_segments(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.put([suite_payload(i) for i in range(40)])
    tier.close()
    report = scan_directory(tmp_path)
    assert {s.state for s in report.segments} == {SegmentState.SEALED}
    assert (report.frames_ok, report.corrupt_frames) == (40, 0)
    assert sum(u.blocks for s in report.segments for u in s.keyspaces) == 40
    again = open_tier(tmp_path)
    assert again.stats().recovered_segments == 0
    assert [read_block(again, i) for i in range(40)] == [suite_block(i) for i in range(40)]
    again.close()


def test_close_without_blocks_leaves_no_segment(tmp_path: Path) -> None:
    open_tier(tmp_path).close()
    assert segments(tmp_path) == []


def test_directory_and_files_are_private(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "a" / "b")
    tier.put([suite_payload(1)])
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    modes = {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "a" / "b").iterdir()}
    assert modes == {0o600}
    tier.close()


@pytest.mark.parametrize("batch", [1, 3, 50])
@pytest.mark.parametrize("size_bytes", [100, 8192, 50_000])
def test_cap_holds_at_every_moment(tmp_path: Path, batch: int, size_bytes: int) -> None:
    tier = open_tier(tmp_path)
    for start in range(0, 300, batch):
        tier.put([suite_payload(i, size_bytes) for i in range(start, start + batch)])
        read_block(tier, start, size_bytes)
        assert walked_bytes(tmp_path) <= tier.stats().bytes_used <= CAPACITY_BYTES
    tier.remove([suite_key(i) for i in range(300)])
    tier.close()
    assert walked_bytes(tmp_path) <= CAPACITY_BYTES


def test_smaller_cap_is_met_on_open(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.put([suite_payload(i) for i in range(70)])
    tier.close()
    tier = open_tier(tmp_path, capacity_bytes=CAPACITY_BYTES // 4)
    assert walked_bytes(tmp_path) <= CAPACITY_BYTES // 4
    assert tier.contains(suite_key(69))
    assert not tier.contains(suite_key(0))
    assert tier.stats().evicted_blocks == 70 - tier.stats().blocks
    tier.close()


def test_block_that_is_read_outlives_those_that_are_not(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    for i in range(400):
        tier.put([suite_payload(i)])
        assert read_block(tier, 0) == suite_block(0)
    assert not tier.contains(suite_key(1))
    assert tier.stats().reinserted_blocks > 0
    tier.close()
    again = open_tier(tmp_path)
    assert read_block(again, 0) == suite_block(0)
    again.close()


def test_blocks_that_are_all_hot_do_not_stop_reclaiming(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    for i in range(300):
        tier.put([suite_payload(i)])
        for j in range(max(0, i - 100), i + 1):
            read_block(tier, j)
    stats = tier.stats()
    assert stats.blocks + stats.evicted_blocks == 300
    assert walked_bytes(tmp_path) <= CAPACITY_BYTES
    tier.close()


def test_batch_larger_than_the_cap_keeps_its_end(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.put([suite_payload(i) for i in range(200)])
    assert tier.contains(suite_key(199))
    assert not tier.contains(suite_key(0))
    for i in range(200):
        assert read_block(tier, i) in (None, suite_block(i))
    tier.close()


def test_frame_larger_than_a_segment_gets_its_own(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    size = CAPACITY_BYTES // 2
    tier.put([suite_payload(1), suite_payload(2, size), suite_payload(3)])
    assert read_block(tier, 2, size) == suite_block(2, size)
    assert walked_bytes(tmp_path) <= CAPACITY_BYTES
    tier.close()


def test_other_keyspaces_stay_and_are_readable(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.put([suite_payload(1)])
    tier.close()
    tier = open_tier(tmp_path, keyspace=b"o" * 32)
    tier.put([suite_payload(2)])
    assert read_block(tier, 1) == suite_block(1)
    uses = {u.keyspace: u.blocks for s in tier.verify().segments for u in s.keyspaces}
    assert uses == {KEYSPACE: 1, b"o" * 32: 1}
    tier.close()


def test_second_open_is_refused_with_directory_and_pid(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    with pytest.raises(TierBusyError, match=rf"{tmp_path}.*process {os.getpid()}"):
        open_tier(tmp_path)
    code = (
        "import sys; from pathlib import Path; from kvist.tiers.ssd import SsdTier\n"
        "from kvist.core.errors import TierBusyError\n"
        "try: SsdTier.open(Path(sys.argv[1]), keyspace=bytes(32), capacity_bytes=1<<20)\n"
        "except TierBusyError: sys.exit(7)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], timeout=60, env=os.environ, check=False
    )
    assert done.returncode == 7
    tier.close()
    open_tier(tmp_path).close()


def test_clear_deletes_our_segments_only(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    tier = open_tier(tmp_path)
    tier.put([suite_payload(i) for i in range(40)])
    tier.clear()
    assert segments(tmp_path) == []
    assert tier.stats().blocks == 0
    assert not tier.contains(suite_key(3))
    tier.put([suite_payload(3)])
    assert read_block(tier, 3) == suite_block(3)
    tier.close()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_tombstones_outlive_what_they_hide(tmp_path: Path) -> None:
    """Segments go oldest first, so at no restart does a removed block come back."""
    tier = open_tier(tmp_path)
    tier.put([suite_payload(i) for i in range(60)])
    tier.remove([suite_key(i) for i in range(0, 60, 2)])
    for i in range(100, 160):
        tier.put([suite_payload(i)])
        tier.close()
        tier = open_tier(tmp_path)
        assert not any(tier.contains(suite_key(j)) for j in range(0, 60, 2))
    tier.close()


def test_stats_count_hits_and_misses_by_cause(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.put([suite_payload(1), suite_payload(1)])
    read_block(tier, 1)
    read_block(tier, 2)
    read_block(tier, 1, 5)
    stats = tier.stats()
    assert (stats.puts, stats.hits, stats.blocks, stats.segments) == (1, 1, 1, 1)
    assert stats.misses_by_cause == {MissCause.ABSENT: 1, MissCause.SIZE: 1}
    assert stats.capacity_bytes == CAPACITY_BYTES
    tier.close()


def test_verify_reports_progress_and_reads_the_active_segment(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.put([suite_payload(i) for i in range(40)])
    seen: list[tuple[int, int]] = []
    report = tier.verify(lambda done, of: seen.append((done, of)))
    count = len(segments(tmp_path))
    assert seen == [(i, count) for i in range(1, count + 1)]
    assert (report.frames_ok, report.corrupt_frames) == (40, 0)
    assert sum(s.torn_bytes for s in report.segments) == 0
    tier.close()


def test_typed_buffers_are_taken_as_bytes(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    words = memoryview(bytearray(suite_block(1))).cast("Q")
    tier.put([Payload(suite_key(1), None, words)])
    out = memoryview(bytearray(BLOCK_BYTES)).cast("Q")
    assert tier.read_into(suite_key(1), out) is Outcome.HIT
    assert out.tobytes() == suite_block(1)
    tier.close()


def test_open_refuses_a_useless_capacity_or_keyspace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        open_tier(tmp_path, capacity_bytes=1000)
    with pytest.raises(ConfigError):
        open_tier(tmp_path, keyspace=b"short")


def test_least_capacity_holds_one_small_block(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, capacity_bytes=6 * 4096)
    for i in range(5):
        tier.put([suite_payload(i, 4096)])
        assert read_block(tier, i, 4096) == suite_block(i, 4096)
        assert walked_bytes(tmp_path) <= 6 * 4096
    with pytest.raises(TierFullError):
        tier.put([suite_payload(9, 4097)])
    tier.close()


def test_path_that_is_no_directory_is_a_tier_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError):
        open_tier(tmp_path / "file")
    with pytest.raises(TierError):
        scan_directory(tmp_path / "absent")


def test_closed_tier_refuses_maintenance(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.close()
    with pytest.raises(ClosedError):
        tier.verify()
    with pytest.raises(ClosedError):
        tier.clear()


def test_number_of_segments_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvist.tiers.ssd.log.MAX_SEGMENTS", 5)
    for i in range(12):
        tier = open_tier(tmp_path)
        tier.put([suite_payload(i)])
        assert read_block(tier, i) == suite_block(i)
        tier.close()
    assert len(segments(tmp_path)) <= 5


def test_a_checksum_taken_before_is_the_one_that_reads_are_proven_by(tmp_path: Path) -> None:
    """So what changed in memory after the copy is found, too."""
    tier = open_tier(tmp_path)
    data = memoryview(suite_block(1))
    tier.put([Payload(suite_key(1), None, data, checksum=checksum(data))])
    tier.put([Payload(suite_key(2), None, data, checksum=checksum(data) ^ 1)])
    assert read_block(tier, 1) == suite_block(1)
    assert read_block(tier, 2) is None
    assert tier.stats().misses_by_cause == {MissCause.PAYLOAD: 1}
    tier.close()
