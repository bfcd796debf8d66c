"""Direct, buffered, coalesced, preallocated: the ways in which the SSD tier moves bytes."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvist.core.errors import TierError
from kvist.core.outcome import Outcome
from kvist.testing.tier_suite import BLOCK_BYTES, read_block, suite_block, suite_key, suite_payload
from kvist.tiers.protocol import Payload
from kvist.tiers.ssd import EngineKind, FsyncMode, IoMode, MissCause, PosixIo, SsdTier
from kvist.tiers.ssd.buffers import PayloadBuffers, aligned_buffer, is_aligned
from kvist.tiers.ssd.engine import open_engine
from kvist.tiers.ssd.io import SegmentFile

KINDS = [EngineKind.URING, EngineKind.POOL, EngineKind.TWIN]
MODES = [IoMode.DIRECT, IoMode.BUFFERED]


def open_tier(
    directory: Path,
    *,
    mode: IoMode = IoMode.DIRECT,
    engine: EngineKind = EngineKind.AUTO,
    capacity_bytes: int = 64 << 20,
    io: PosixIo | None = None,
) -> SsdTier:
    return SsdTier.open(
        directory,
        keyspace=bytes(32),
        capacity_bytes=capacity_bytes,
        fsync=FsyncMode.OFF,
        mode=mode,
        engine=engine,
        io=io,
    )


class CountingIo(PosixIo):
    """Notes how many bytes each call was asked to move."""

    def __init__(self) -> None:
        self.reads: list[int] = []
        self.writes: list[int] = []

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.writes.append(sum(map(len, buffers)))
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.reads.append(sum(map(len, buffers)))
        return super().preadv(fd, buffers, offset)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_what_one_way_wrote_every_way_reads(tmp_path: Path, kind: EngineKind, mode: IoMode) -> None:
    tier = open_tier(tmp_path, mode=mode, engine=kind)
    sizes = [BLOCK_BYTES, 100, 300_000, 4096, 1 << 20]
    tier.put([suite_payload(i, size) for i, size in enumerate(sizes)])
    tier.close()
    for other in MODES:
        tier = open_tier(tmp_path, mode=other, engine=kind)
        outs = [aligned_buffer(size) for size in sizes]
        items = [(suite_key(i), out) for i, out in enumerate(outs)]
        assert dict(tier.read_many(items)) == dict.fromkeys(range(5), Outcome.HIT)
        assert [bytes(out) for out in outs] == [suite_block(i, s) for i, s in enumerate(sizes)]
        tier.close()


def test_engine_that_was_asked_for_is_reported(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, engine=EngineKind.TWIN, mode=IoMode.BUFFERED)
    assert (tier.stats().engine, tier.stats().direct) == (EngineKind.TWIN, False)
    tier.close()
    kind, engine = open_engine(EngineKind.AUTO, depth=4)
    engine.close()
    tier = open_tier(tmp_path)
    assert (tier.stats().engine, tier.stats().direct) == (kind, True)
    tier.close()


def test_kernel_without_rings_gets_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(depth: int) -> None:
        raise OSError(errno.EPERM, "not in this container")

    monkeypatch.setattr("kvist.tiers.ssd.engine.open_uring", refuse)
    kind, engine = open_engine(EngineKind.URING, depth=4)
    assert kind is EngineKind.POOL
    engine.close()


def test_file_system_without_direct_io_is_read_and_written_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SegmentFile, "go_direct", lambda self: False)
    tier = open_tier(tmp_path)
    tier.put([suite_payload(i) for i in range(5)])
    assert [read_block(tier, i) for i in range(5)] == [suite_block(i) for i in range(5)]
    assert tier.stats().buffered_segments == 1
    tier.close()


def test_batch_of_small_frames_is_one_write_and_one_read(tmp_path: Path) -> None:
    io = CountingIo()
    tier = open_tier(tmp_path, io=io)
    tier.put([suite_payload(0)])
    io.writes.clear()
    tier.put([suite_payload(i) for i in range(1, 21)])
    assert io.writes == [20 * (4096 + BLOCK_BYTES)]
    outs = [bytearray(BLOCK_BYTES) for _ in range(21)]
    io.reads.clear()
    items = [(suite_key(i), memoryview(out)) for i, out in enumerate(outs)]
    assert set(dict(tier.read_many(items)).values()) == {Outcome.HIT}
    assert [bytes(out) for out in outs] == [suite_block(i) for i in range(21)]
    assert io.reads == [21 * (4096 + BLOCK_BYTES)]
    tier.close()


def test_large_frames_are_written_in_runs_and_read_apart(tmp_path: Path) -> None:
    io = CountingIo()
    tier = open_tier(tmp_path, io=io, capacity_bytes=1 << 30)
    block = memoryview(bytes(3 << 20))
    tier.put([Payload(suite_key(i), None, block) for i in range(8)])
    frame = 4096 + len(block)
    assert sorted(io.writes)[-2:] == [3 * frame, 3 * frame]
    io.reads.clear()
    items = [(suite_key(i), memoryview(bytearray(len(block)))) for i in range(4)]
    assert set(dict(tier.read_many(items)).values()) == {Outcome.HIT}
    assert io.reads == [frame] * 4
    tier.close()


def test_more_frames_than_a_call_takes_are_stored(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.put([suite_payload(i, 100) for i in range(1500)])
    items = [(suite_key(i), memoryview(bytearray(100))) for i in range(1500)]
    assert set(dict(tier.read_many(items)).values()) == {Outcome.HIT}
    assert [bytes(out) for _, out in items] == [suite_block(i, 100) for i in range(1500)]
    tier.close()


class BrokenRead(PosixIo):
    """Fails reads that touch one offset."""

    bad_offset = -1

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset <= self.bad_offset < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, "bad sector")
        return super().preadv(fd, buffers, offset)


def test_bad_sector_is_an_error_of_its_own_blocks_only(tmp_path: Path) -> None:
    io = BrokenRead()
    tier = open_tier(tmp_path, io=io, capacity_bytes=1 << 30)
    size = 1 << 20
    tier.put([suite_payload(i, size) for i in range(4)])
    io.bad_offset = 4096 + 2 * (4096 + size) + 5000
    items = [(suite_key(i), memoryview(bytearray(size))) for i in range(4)]
    outcomes = dict(tier.read_many(items))
    assert isinstance(outcomes.pop(2), TierError)
    assert set(outcomes.values()) == {Outcome.HIT}
    io.bad_offset = -1
    assert dict(tier.read_many(items[2:3])) == {0: Outcome.HIT}
    tier.close()


def test_damaged_frame_in_a_coalesced_read_is_a_miss_of_that_block_only(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.put([suite_payload(i) for i in range(5)])
    tier.close()
    path = next(tmp_path.glob("*.kvs"))
    data = bytearray(path.read_bytes())
    data[4096 + 2 * (4096 + BLOCK_BYTES) + 4096 + 9] ^= 1
    path.write_bytes(data)
    tier = open_tier(tmp_path)
    items = [(suite_key(i), memoryview(bytearray(BLOCK_BYTES))) for i in range(5)]
    outcomes = dict(tier.read_many(items))
    assert [i for i, o in outcomes.items() if o is Outcome.MISS] == [2]
    assert tier.stats().misses_by_cause == {MissCause.PAYLOAD: 1}
    assert not tier.contains(suite_key(2))
    tier.close()


def test_reserved_blocks_count_against_the_cap_and_are_given_back(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.put([suite_payload(1)])

    def taken() -> int:
        return sum(max(p.stat().st_size, p.stat().st_blocks * 512) for p in tmp_path.iterdir())

    assert taken() <= tier.stats().bytes_used <= 64 << 20
    tier.close()
    assert taken() <= 10 * (4096 + BLOCK_BYTES)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 8192])
@pytest.mark.parametrize("shift", [0, 16])
def test_payload_moves_in_whole_pages_wherever_it_lies(size: int, shift: int) -> None:
    backing = aligned_buffer(16384)
    data = backing[shift : shift + size]
    data[:] = os.urandom(size)
    parts = PayloadBuffers.of(data)
    assert all(is_aligned(p) and len(p) % 4096 == 0 for p in parts.list())
    parts.fill(data)
    written = b"".join(parts.list())
    assert written == bytes(data).ljust(-(-size // 4096) * 4096, b"\0")
    content = bytes(data)
    data[len(parts.direct) :] = bytes(size - len(parts.direct))
    parts.finish(data)
    assert data == content
