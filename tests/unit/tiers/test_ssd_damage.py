"""Whatever happens to its files, the SSD tier answers with the right bytes or with a miss."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from kvist.codec.frame import PAGE_BYTES, FrameHeader, seal_page
from kvist.core.keys import Key
from kvist.testing.tier_suite import BLOCK_BYTES, read_block, suite_block, suite_key, suite_payload
from kvist.tiers.protocol import Payload
from kvist.tiers.ssd import FsyncMode, MissCause, SegmentState, SsdTier, scan_directory

FRAME_BYTES = PAGE_BYTES + BLOCK_BYTES
COUNT = 8


def open_tier(directory: Path, capacity_bytes: int = 4 << 20) -> SsdTier:
    return SsdTier.open(
        directory, keyspace=bytes(32), capacity_bytes=capacity_bytes, fsync=FsyncMode.OFF
    )


def make_segment(directory: Path, count: int = COUNT, start: int = 0) -> Path:
    """A sealed segment with blocks `start` to `start + count`."""
    tier = open_tier(directory)
    tier.put([suite_payload(i) for i in range(start, start + count)])
    tier.close()
    return sorted(directory.glob("segment-*.kvs"))[-1]


def unseal(path: Path, count: int = COUNT) -> None:
    """What a crash leaves: frames without a footer."""
    os.truncate(path, PAGE_BYTES + count * FRAME_BYTES)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x04
    path.write_bytes(data)


def readable(tier: SsdTier, count: int = COUNT) -> list[int]:
    """Blocks that are hits; fails on wrong bytes."""
    found = []
    for i in range(count):
        data = read_block(tier, i)
        assert data in (None, suite_block(i))
        if data is not None:
            found.append(i)
    return found


def frame_at(i: int) -> int:
    return PAGE_BYTES + i * FRAME_BYTES


@pytest.mark.parametrize("cut", [1, 100, 4096, 4097, BLOCK_BYTES, FRAME_BYTES - 1])
def test_torn_tail_is_ignored_and_cut_off(tmp_path: Path, cut: int) -> None:
    path = make_segment(tmp_path)
    os.truncate(path, frame_at(COUNT) - cut)
    tier = open_tier(tmp_path)
    assert readable(tier) == list(range(COUNT - 1))
    assert tier.stats().recovered_segments == 1
    assert tier.stats().torn_bytes == FRAME_BYTES - cut
    tier.put([suite_payload(COUNT - 1)])
    assert readable(tier) == list(range(COUNT))
    tier.close()
    assert {s.state for s in scan_directory(tmp_path).segments} == {SegmentState.SEALED}


def test_every_truncation_of_a_segment_is_survived(tmp_path: Path) -> None:
    path = make_segment(tmp_path)
    whole = path.read_bytes()
    for size in range(0, len(whole), 2048):
        for old in tmp_path.glob("segment-*.kvs"):
            old.unlink()
        path.write_bytes(whole[:size])
        tier = open_tier(tmp_path)
        expected = max(0, min(COUNT, (size - PAGE_BYTES) // FRAME_BYTES))
        assert readable(tier) == list(range(expected))
        tier.close()


def test_zeros_after_the_last_frame_are_a_torn_tail(tmp_path: Path) -> None:
    path = make_segment(tmp_path)
    unseal(path)
    os.truncate(path, frame_at(COUNT) + 5 * PAGE_BYTES)
    tier = open_tier(tmp_path)
    assert readable(tier) == list(range(COUNT))
    tier.close()


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize(
    ("name", "offset", "cause"),
    [
        ("magic", 0, MissCause.HEADER),
        ("sequence", 17, MissCause.HEADER),
        ("key", 60, MissCause.HEADER),
        ("stored_bytes", 193, MissCause.HEADER),
        ("header checksum", 4090, MissCause.HEADER),
        ("payload", PAGE_BYTES + 77, MissCause.PAYLOAD),
    ],
)
def test_flipped_bit_in_a_frame_loses_that_block_only(
    tmp_path: Path, sealed: bool, name: str, offset: int, cause: MissCause
) -> None:
    path = make_segment(tmp_path)
    if not sealed:
        unseal(path)
    flip(path, frame_at(3) + offset)
    assert scan_directory(tmp_path).corrupt_frames == 1
    tier = open_tier(tmp_path)
    assert readable(tier) == [0, 1, 2, 4, 5, 6, 7]
    expected = cause if sealed else MissCause.ABSENT  # a scan does not even index it
    assert tier.stats().misses_by_cause == {expected: 1}
    assert not tier.contains(suite_key(3))
    tier.put([suite_payload(3)])
    assert readable(tier) == list(range(COUNT))
    tier.close()


def test_flipped_bit_anywhere_never_gives_wrong_bytes(tmp_path: Path) -> None:
    path = make_segment(tmp_path)
    whole = path.read_bytes()
    chance = random.Random(1)
    for _ in range(60):
        path.write_bytes(whole)
        flip(path, chance.randrange(len(whole)))
        tier = open_tier(tmp_path)
        assert len(readable(tier)) >= COUNT - 1 or tier.stats().skipped_segments == 1
        tier.close()


def test_damaged_segment_header_footer_or_trailer_loses_no_block(tmp_path: Path) -> None:
    path = make_segment(tmp_path)
    whole = path.read_bytes()
    footer = frame_at(COUNT)
    for offset in (0, 30, 4090, footer, footer + 40, len(whole) - PAGE_BYTES, len(whole) - 1):
        path.write_bytes(whole)
        flip(path, offset)
        tier = open_tier(tmp_path)
        assert readable(tier) == list(range(COUNT))
        tier.close()


def test_payload_that_holds_an_old_frame_is_not_taken_for_one(tmp_path: Path) -> None:
    path = make_segment(tmp_path, count=2)
    old = path.read_bytes()[frame_at(0) : frame_at(1)]
    key: Key = suite_key(90)
    tier = open_tier(tmp_path)
    tier.remove([suite_key(0)])
    tier.put([Payload(key, None, memoryview(old))])
    tier.close()
    newest = sorted(tmp_path.glob("segment-*.kvs"))[-1]
    os.truncate(newest, 2 * PAGE_BYTES + FRAME_BYTES + PAGE_BYTES)
    flip(newest, 2 * PAGE_BYTES)  # the header of the block that contains the old frame
    tier = open_tier(tmp_path)
    assert not tier.contains(suite_key(0))
    assert not tier.contains(key)
    tier.close()


def test_swapped_segment_files_only_trade_places(tmp_path: Path) -> None:
    first = make_segment(tmp_path)
    tier = open_tier(tmp_path)
    tier.remove([suite_key(0)])
    tier.close()
    second = sorted(tmp_path.glob("segment-*.kvs"))[-1]
    aside = tmp_path / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    tier = open_tier(tmp_path)
    assert readable(tier) == list(range(1, COUNT))
    tier.close()


def test_file_swapped_under_an_open_tier_is_a_counted_miss(tmp_path: Path) -> None:
    path = make_segment(tmp_path)
    tier = open_tier(tmp_path)
    data = bytearray(path.read_bytes())
    one, two = slice(frame_at(1), frame_at(2)), slice(frame_at(2), frame_at(3))
    data[one], data[two] = data[two], data[one]
    with path.open("r+b") as file:
        file.write(data)
    assert readable(tier) == [0, 3, 4, 5, 6, 7]
    assert tier.stats().misses_by_cause == {MissCause.IDENTITY: 2}
    os.truncate(path, frame_at(4))
    assert read_block(tier, 5) is None
    assert tier.stats().misses_by_cause[MissCause.SHORT] == 1
    tier.close()


def test_frame_of_a_newer_version_is_a_counted_miss(tmp_path: Path) -> None:
    path = make_segment(tmp_path)
    data = bytearray(path.read_bytes())
    page = data[frame_at(1) : frame_at(1) + PAGE_BYTES]
    page[8:10] = b"\x02\x00"
    data[frame_at(1) : frame_at(1) + PAGE_BYTES] = seal_page(bytes(page[:-8]))
    path.write_bytes(data)
    tier = open_tier(tmp_path)
    assert readable(tier) == [0, 2, 3, 4, 5, 6, 7]
    assert tier.stats().misses_by_cause == {MissCause.VERSION: 1}
    tier.close()


@pytest.mark.parametrize("damaged", [True, False])
def test_newer_segment_is_skipped_counted_and_never_touched(tmp_path: Path, damaged: bool) -> None:
    path = make_segment(tmp_path)
    page = bytearray(path.read_bytes()[:PAGE_BYTES])
    page[8:10] = b"\x02\x00"
    sealed = seal_page(bytes(page[:-8]))
    future = (sealed[:-1] + b"?" if damaged else sealed) + os.urandom(200_000)
    path.write_bytes(future)
    tier = open_tier(tmp_path, capacity_bytes=1 << 20)
    assert readable(tier) == []
    for i in range(200):
        tier.put([suite_payload(i)])
        used = sum(max(p.stat().st_size, p.stat().st_blocks * 512) for p in tmp_path.iterdir())
        assert used <= tier.stats().bytes_used <= 1 << 20
    tier.clear()
    assert tier.stats().skipped_segments == 1
    tier.close()
    assert path.read_bytes() == future
    assert [s.state for s in scan_directory(tmp_path).segments] == [SegmentState.NEWER]


def test_foreign_files_are_counted_and_never_touched(tmp_path: Path) -> None:
    make_segment(tmp_path)
    (tmp_path / "readme.txt").write_text("hello")
    (tmp_path / "segment-0000000000000077.kvs").write_bytes(b"not a segment" * 1000)
    (tmp_path / "segment-xyz.kvs").write_bytes(b"")
    (tmp_path / "segment-0000000000000078.kvs").mkdir()
    (tmp_path / "segment-0000000000000079.kvs").symlink_to(tmp_path / "readme.txt")
    os.mkfifo(tmp_path / "segment-000000000000007a.kvs")
    tier = open_tier(tmp_path)
    assert tier.stats().foreign_files == 6
    assert readable(tier) == list(range(COUNT))
    tier.put([suite_payload(100)])
    tier.clear()
    tier.close()
    assert (tmp_path / "readme.txt").read_text() == "hello"
    assert (tmp_path / "segment-0000000000000077.kvs").read_bytes() == b"not a segment" * 1000
    assert len(list(tmp_path.iterdir())) == 7


@pytest.mark.parametrize("written_bytes", [0, 5, 100, 4095])
def test_segment_whose_header_was_half_written_is_deleted(
    tmp_path: Path, written_bytes: int
) -> None:
    """The process died in the first write to a new file; it was taken for a foreign one once."""
    path = make_segment(tmp_path)
    os.truncate(path, written_bytes)
    zeros = tmp_path / "segment-0000000000000001.kvs"
    zeros.write_bytes(bytes(PAGE_BYTES))
    tier = open_tier(tmp_path)
    assert tier.stats().foreign_files == 0
    assert not path.exists()
    assert not zeros.exists()
    tier.close()


def test_later_sequence_wins(tmp_path: Path) -> None:
    """Block 3 is corrupt in the first segment and was written again: the copy is found."""
    path = make_segment(tmp_path)
    flip(path, frame_at(3) + PAGE_BYTES)
    tier = open_tier(tmp_path)
    assert read_block(tier, 3) is None
    tier.put([suite_payload(3)])
    tier.close()
    tier = open_tier(tmp_path)
    assert readable(tier) == list(range(COUNT))
    tier.close()


def test_footer_and_scan_agree(tmp_path: Path) -> None:
    path = make_segment(tmp_path)
    headers = []
    data = path.read_bytes()
    for i in range(COUNT):
        headers.append(FrameHeader.unpack(data[frame_at(i) : frame_at(i) + PAGE_BYTES]))
    assert [h.key for h in headers] == [suite_key(i) for i in range(COUNT)]
    assert [h.parent for h in headers] == [None] + [suite_key(i) for i in range(COUNT - 1)]
    with_footer = scan_directory(tmp_path).segments[0]
    unseal(path)
    without = scan_directory(tmp_path).segments[0]
    assert with_footer.keyspaces == without.keyspaces
    assert (with_footer.frames_ok, without.frames_ok) == (COUNT, COUNT)
