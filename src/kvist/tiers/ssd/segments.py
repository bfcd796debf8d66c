"""Segment files while they are written: creating, staging runs of frames, syncing, sealing.

Frames are *staged*: they get their place in the segment and join the run that is being gathered.
A run is one vectored write. While a run is under way the next is gathered, so that checksums are
taken beside the I/O; one more may be queued behind it, so that the medium does not wait for us.
The engine does one write at a time, so what a crash leaves is a prefix of what was staged; when a
run fails, it and those behind it are cut off. `finish` waits for everything that was staged.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from kvist.codec.frame import PAGE_BYTES, FrameHeader
from kvist.core.errors import TierError
from kvist.tiers.ssd.buffers import PayloadBuffers, aligned_buffer, total_bytes
from kvist.tiers.ssd.engine import IoBatch, IoEngine
from kvist.tiers.ssd.io import (
    IOV_MAX,
    FsyncMode,
    SegmentFile,
    SegmentIo,
    after,
    sync_directory,
    tier_error,
)
from kvist.tiers.ssd.segment import Record, pack_header, pack_tail, segment_name

RUN_BYTES = 8 << 20
FIRST_RUN_BYTES = 2 << 20  # smaller, so that the medium has work soon
RUNS_UNDER_WAY = 2
_BUFFERS_A_FRAME = 3  # header, payload in place, rest of the payload
PREALLOCATE_FROM_BYTES = 1 << 20  # smaller segments get their blocks with the writes


@dataclass(slots=True)
class Segment:
    """One file of ours. Frames before `synced_end` are durable; `end` is where the next goes.

    `records` are kept until the footer is written; later the index knows what is in the file.
    """

    number: int
    file: SegmentFile
    records: list[Record] = field(default_factory=list)
    end: int = PAGE_BYTES
    synced_end: int = PAGE_BYTES
    disk_bytes: int = 0
    last_sequence: int = 0


@dataclass(frozen=True, slots=True)
class LogLimits:
    """`foreign_bytes` is what files take that look like segments and must not be touched."""

    capacity_bytes: int
    segment_bytes: int
    fsync: FsyncMode
    foreign_bytes: int = 0
    direct: bool = False


@dataclass(frozen=True, slots=True)
class StagedFrame:
    """A frame that has its place. `data` must stay as it is until the frame is written."""

    header: FrameHeader
    data: memoryview

    def buffers(self) -> list[memoryview]:
        """Header page, payload and padding, in whole pages."""
        page = aligned_buffer(PAGE_BYTES)
        page[:] = self.header.pack()
        payload = PayloadBuffers.of(self.data)
        payload.fill(self.data)
        return [page, *payload.list()]


@dataclass(slots=True)
class _Run:
    """Neighbouring frames that one call writes."""

    segment: Segment
    start: int
    frames: list[StagedFrame] = field(default_factory=list)
    buffers: list[memoryview] = field(default_factory=list)
    batch: IoBatch | None = None

    def is_full(self, limit_bytes: int) -> bool:
        size = self.segment.end - self.start
        return size >= limit_bytes or len(self.buffers) + _BUFFERS_A_FRAME > IOV_MAX

    def begin(self, engine: IoEngine) -> None:
        fd = self.segment.file.fd
        with contextlib.suppress(OSError):  # no ring, no thread: `end` writes all of it
            self.batch = engine.submit([(True, fd, self.start, self.buffers)])

    def end(self) -> None:
        """Waits, and writes what the one call did not.

        Raises:
            TierError: as for `SegmentFile.write_at`.
        """
        done = None
        if self.batch is not None:
            done = self.batch.next()
            self.batch.close()
        result = 0 if done is None else done[1]
        if result < 0 and result != -errno.EINVAL:
            failure = OSError(-result, os.strerror(-result))
            raise tier_error(failure, f"write {self.segment.file.path}")
        written = max(0, result)
        if written < total_bytes(self.buffers):
            self.segment.file.write_at(after(self.buffers, written), self.start + written)


class LostFrames(Exception):
    """A run failed: `frames` were taken back, in order; `error` says why. Never leaves the log."""

    def __init__(self, error: TierError, frames: list[StagedFrame]) -> None:
        super().__init__(str(error))
        self.error = error
        self.frames = frames


class SegmentWriter:
    """The writing of segment files; the log decides what goes where. Not thread-safe."""

    def __init__(
        self, directory: Path, *, io: SegmentIo, engine: IoEngine, limits: LogLimits
    ) -> None:
        self.footer_failures = 0
        self.buffered_segments = 0  # O_DIRECT was wanted and refused
        self._directory = directory
        self._io = io
        self._engine = engine
        self._limits = limits
        self._staged: _Run | None = None
        self._under_way: deque[_Run] = deque()  # oldest first

    def create(self, number: int, *, reserve_bytes: int) -> Segment:
        """A new segment with its header; `reserve_bytes` is what it may take from the start.

        Raises:
            TierError: the medium failed; there is no such file.
        """
        path = self._directory / segment_name(number)
        file = SegmentFile(self._io, path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        segment = Segment(number, file, disk_bytes=PAGE_BYTES)
        try:
            file.write_at([memoryview(pack_header(number))], 0)
            if self._limits.fsync is FsyncMode.BATCH:
                sync_directory(self._io, self._directory)
            if reserve_bytes >= PREALLOCATE_FROM_BYTES:
                file.reserve(reserve_bytes)
                segment.disk_bytes = max(PAGE_BYTES, file.disk_bytes())
        except TierError:
            with contextlib.suppress(OSError):  # the first error is the one to report
                self._io.unlink(path)
            file.close()
            raise
        if self._limits.direct and not file.go_direct():
            self.buffered_segments += 1
        return segment

    def stage(self, segment: Segment, frame: StagedFrame) -> Record:
        """Gives a frame its place at the end of `segment` and queues it.

        Raises:
            LostFrames: a run that was under way failed; this frame is among those lost.
        """
        record = Record.of(frame.header, segment=segment.number, offset=segment.end)
        run = self._staged
        if run is None:
            run = self._staged = _Run(segment, segment.end)
        run.frames.append(frame)
        run.buffers += frame.buffers()
        segment.records.append(record)
        segment.end = record.end
        segment.disk_bytes = max(segment.disk_bytes, segment.end)
        segment.last_sequence = record.sequence
        if run.is_full(RUN_BYTES if self._under_way else FIRST_RUN_BYTES):
            self._advance()
        return record

    def finish(self) -> None:
        """Waits until everything that was staged is written.

        Raises:
            LostFrames: a run failed; it and all after it were taken back.
        """
        self._advance()
        while self._under_way:
            self._end_oldest()

    def _advance(self) -> None:
        """Begins the run that was gathered; waits while there are too many before it."""
        while len(self._under_way) >= RUNS_UNDER_WAY:
            self._end_oldest()
        run, self._staged = self._staged, None
        if run is not None:
            run.begin(self._engine)
            self._under_way.append(run)

    def _end_oldest(self) -> None:
        run = self._under_way.popleft()
        try:
            run.end()
        except TierError as exc:
            raise self._take_back(run, exc) from exc

    def _take_back(self, failed: _Run, error: TierError) -> LostFrames:
        """Forgets `failed` and all after it, and cuts the file back."""
        frames = list(failed.frames)
        for run in self._under_way:
            with contextlib.suppress(TierError):
                run.end()
            frames += run.frames
        self._under_way.clear()
        staged, self._staged = self._staged, None
        segment = failed.segment
        segment.end = failed.start
        segment.records = [r for r in segment.records if r.offset < failed.start]
        self.cut(segment)
        return LostFrames(error, frames + (staged.frames if staged else []))

    def sync(self, segment: Segment) -> None:
        """Makes the frames of `segment` durable; on failure those not yet so are cut off.

        Raises:
            TierError: the medium failed.
        """
        if segment.synced_end == segment.end:
            return
        try:
            if self._limits.fsync is FsyncMode.BATCH:
                segment.file.sync()
            segment.disk_bytes = max(segment.end, segment.file.disk_bytes())
        except TierError:
            # After a failed fdatasync the system may have dropped the pages: nothing written
            # since the last good one can be relied on.
            segment.records = [r for r in segment.records if r.end <= segment.synced_end]
            segment.end = segment.synced_end
            self.cut(segment)
            raise
        segment.synced_end = segment.end

    def cut(self, segment: Segment) -> None:
        """Truncates a segment to its end; if that fails, recovery ignores the tail."""
        with contextlib.suppress(TierError):
            segment.file.truncate(segment.end)
            segment.disk_bytes = segment.file.disk_bytes()

    def seal(self, segment: Segment) -> None:
        """Writes footer and trailer. Without them the segment is still good: it is scanned.

        Raises:
            TierError: its frames cannot be made durable.
        """
        self.sync(segment)
        tail = pack_tail(segment.records, segment=segment.number, footer_offset=segment.end)
        buffer = aligned_buffer(len(tail))
        buffer[:] = tail
        self.cut(segment)  # gives back what was reserved and not used
        try:
            segment.file.write_at([buffer], segment.end)
            if self._limits.fsync is FsyncMode.BATCH:
                segment.file.sync()
            segment.disk_bytes = segment.file.disk_bytes()
        except TierError:
            self.footer_failures += 1
            self.cut(segment)
        segment.records = []
