"""The writing side of the SSD tier: an append-only log of segments under a hard byte cap.

Segments are kept oldest first; the newest may be *active* (being written), all others are
read-only. `append` puts a frame into the active segment; `commit` syncs and only then makes the
appended blocks visible. Before a frame that would exceed the cap, and once upon ENOSPC, the oldest
segment is *reclaimed*: its blocks leave the index, its file is deleted, and those of its blocks
that were read since they were written are appended again, as far as they fit into half of what was
freed. Reclaiming in order of age also keeps a tombstone longer than the frames that it hides.

Not thread-safe: the tier holds one lock around every call, but for `file`.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvist.codec.frame import PAGE_BYTES, FrameHeader, FrameKind, frame_bytes
from kvist.core.errors import FormatError, TierError, TierFullError
from kvist.native import checksum
from kvist.tiers.ssd.index import BlockIndex
from kvist.tiers.ssd.io import FsyncMode, SegmentFile, SegmentIo, sync_directory, tier_error
from kvist.tiers.ssd.lock import LOCK_BYTES
from kvist.tiers.ssd.recovery import read_frame
from kvist.tiers.ssd.segment import Record, pack_header, pack_tail, segment_name, tail_bytes

MAX_SEGMENTS = 512  # bounds open files; the oldest is reclaimed before one more is begun
REINSERT_LIMIT_BYTES = 64 << 20  # bounds the memory that hot blocks take while their segment goes


@dataclass(slots=True)
class Segment:
    """One file of ours. Frames before `synced_end` are durable; `end` is where the next goes."""

    number: int
    file: SegmentFile
    records: list[Record] = field(default_factory=list)
    end: int = PAGE_BYTES
    synced_end: int = PAGE_BYTES
    disk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LogLimits:
    """`foreign_bytes` is what files take that look like segments and must not be touched."""

    capacity_bytes: int
    segment_bytes: int
    fsync: FsyncMode
    foreign_bytes: int = 0


class SegmentLog:
    """Appends, seals, reclaims."""

    def __init__(
        self,
        directory: Path,
        *,
        io: SegmentIo,
        index: BlockIndex,
        limits: LogLimits,
        segments: Iterable[Segment],
        next_number: int,
    ) -> None:
        self.limits = limits
        self.evicted_blocks = 0
        self.reinserted_blocks = 0
        self.footer_failures = 0
        self._directory = directory
        self._io = io
        self._index = index
        self._segments = {s.number: s for s in segments}  # oldest first
        self._active: Segment | None = None
        self._next_number = next_number
        self._next_sequence = 1 + max(
            (r.sequence for s in self._segments.values() for r in s.records), default=0
        )
        self._pending: list[Record] = []

    @property
    def segment_count(self) -> int:
        return len(self._segments)

    @property
    def used_bytes(self) -> int:
        """What the directory takes: our segments, those we must not touch, and the lock file."""
        ours = sum(s.disk_bytes for s in list(self._segments.values()))
        return LOCK_BYTES + self.limits.foreign_bytes + ours

    def file(self, record: Record) -> SegmentFile | None:
        """The file that holds `record`; `None` if it was reclaimed. Callable from any thread."""
        segment = self._segments.get(record.segment)
        return segment.file if segment else None

    def ends(self) -> dict[int, int]:
        """Where the active segment's frames end, by number."""
        return {self._active.number: self._active.end} if self._active else {}

    def append(
        self,
        kind: FrameKind,
        *,
        keyspace: bytes,
        key: bytes,
        parent: bytes | None = None,
        data: memoryview,
    ) -> None:
        """Writes one frame, making room first. Visible only after `commit`.

        Raises:
            TierFullError: no room even after reclaiming.
            TierError: the medium failed. The frame is absent either way.
        """
        header = FrameHeader(
            kind=kind,
            sequence=self._next_sequence,
            keyspace=keyspace,
            key=key,
            parent=parent,
            raw_bytes=len(data),
            stored_bytes=len(data),
            payload_checksum=checksum(data),
        )
        self._make_room(header.total_bytes)
        try:  # making room may have appended hot blocks: sequences are given last
            self._write(replace(header, sequence=self._next_sequence), data)
        except TierFullError:
            if not self._reclaim_oldest():
                raise
            self._write(replace(header, sequence=self._next_sequence), data)

    def commit(self) -> None:
        """Makes what was appended durable, then visible.

        Raises:
            TierError: the medium failed; frames not known to be durable are absent.
        """
        try:
            if self._active is not None:
                self._sync(self._active)
        finally:
            pending, self._pending = self._pending, []
            self._index.replay(r for r in pending if self._is_durable(r))

    def enforce_cap(self) -> None:
        """Reclaims until the cap holds, or nothing of ours is left.

        Raises:
            TierError: a segment cannot be deleted.
        """
        while self.used_bytes > self.limits.capacity_bytes and self._reclaim_oldest():
            pass

    def clear(self) -> None:
        """Deletes every segment of ours, oldest first.

        Raises:
            TierError: a segment cannot be deleted.
        """
        self._active = None
        self._pending.clear()
        for segment in list(self._segments.values()):
            self._delete(segment)

    def close(self) -> None:
        """Seals the active segment, or deletes it when empty, and closes all files.

        Raises:
            TierError: the medium failed; everything is closed nevertheless.
        """
        active, self._active = self._active, None
        try:
            if active is not None and active.records:
                self._seal(active)
            elif active is not None:
                self._delete(active)
        finally:
            for segment in self._segments.values():
                segment.file.close()
            self._segments = {}

    def _is_durable(self, record: Record) -> bool:
        segment = self._segments.get(record.segment)
        return segment is not None and record.end <= segment.synced_end

    # ---- room -------------------------------------------------------------------------------

    def _needs_segment(self, size: int) -> bool:
        """Whether a frame of `size` bytes begins a new segment."""
        active = self._active
        return active is None or (
            bool(active.records)
            and active.end + size + tail_bytes(len(active.records) + 1) > self.limits.segment_bytes
        )

    def _projected_bytes(self, size: int) -> int:
        """What the directory will take once a frame of `size` is written and all is sealed."""
        active, used = self._active, self.used_bytes
        if active is not None:
            count = len(active.records) + (not self._needs_segment(size))
            end = active.end + (0 if self._needs_segment(size) else size)
            used += max(0, end + tail_bytes(count) - active.disk_bytes)
        if self._needs_segment(size):
            used += PAGE_BYTES + size + tail_bytes(1)
        return used

    def _fits(self, size: int) -> bool:
        return self._projected_bytes(size) <= self.limits.capacity_bytes and (
            self.segment_count < MAX_SEGMENTS or not self._needs_segment(size)
        )

    def _make_room(self, size: int) -> None:
        least = LOCK_BYTES + self.limits.foreign_bytes + PAGE_BYTES + size + tail_bytes(1)
        if least > self.limits.capacity_bytes:
            raise TierFullError(
                errno.ENOSPC,
                f"a frame of {size} bytes does not fit into {self._directory}, whose cap is "
                f"{self.limits.capacity_bytes} bytes",
            )
        while not self._fits(size):
            if not self._reclaim_oldest():
                raise TierFullError(errno.ENOSPC, f"{self._directory} is at its cap")

    def _reclaim_oldest(self) -> bool:
        """Frees the oldest segment; returns whether there was one.

        Raises:
            TierError: its file cannot be deleted.
        """
        victim = next(iter(self._segments.values()), None)
        if victim is None or (victim is self._active and not victim.records):
            return False
        if victim is self._active:
            self._active = None
        hot = self._read_hot(victim)
        before = self.reinserted_blocks
        dropped = self._delete(victim)
        try:
            for record, data in hot:
                if not self._fits(frame_bytes(len(data))) or not self._reinsert(record, data):
                    break
        finally:
            self.evicted_blocks += dropped - (self.reinserted_blocks - before)
        return True

    def _read_hot(self, victim: Segment) -> list[tuple[Record, bytes]]:
        budget = min(victim.disk_bytes // 2, REINSERT_LIMIT_BYTES)
        kept = []
        for record in self._index.hot(victim.records):
            budget -= record.end - record.offset
            if budget < 0:
                break
            with contextlib.suppress(FormatError, TierError):  # unreadable: it is evicted
                found = read_frame(victim.file, record.offset, record.end)
                if found is not None and record.agrees(found[0]):
                    kept.append((record, found[1]))
        return kept

    def _reinsert(self, record: Record, data: bytes) -> bool:
        """Appends a hot block again; on failure it is simply evicted."""
        header = FrameHeader(
            kind=FrameKind.BLOCK,
            sequence=self._next_sequence,
            keyspace=record.keyspace,
            key=record.key,
            parent=record.parent,
            raw_bytes=record.raw_bytes,
            stored_bytes=record.stored_bytes,
            payload_checksum=checksum(data),
        )
        try:
            self._write(header, memoryview(data))
        except TierFullError:
            return False
        self.reinserted_blocks += 1
        return True

    def _delete(self, segment: Segment) -> int:
        """Deletes a segment's file and forgets its blocks; returns how many those were."""
        dropped = self._index.drop(segment.records)
        try:
            self._io.unlink(segment.file.path)
        except FileNotFoundError:
            pass  # somebody did it for us
        except OSError as exc:
            raise tier_error(exc, f"delete {segment.file.path}") from exc
        del self._segments[segment.number]
        segment.file.close()
        return dropped

    # ---- segments ---------------------------------------------------------------------------

    def _write(self, header: FrameHeader, data: memoryview) -> None:
        """Appends to the active segment, rotating first if it is full; on failure cuts it back."""
        if self._active is not None and self._needs_segment(header.total_bytes):
            full, self._active = self._active, None
            self._seal(full)
        active = self._active or self._begin()
        padding = bytes(header.total_bytes - PAGE_BYTES - len(data))
        buffers = [memoryview(header.pack()), data, memoryview(padding)]
        try:
            active.file.write_at([b for b in buffers if len(b)], active.end)
        except TierError as exc:
            self._cut(active, active.end)
            if not isinstance(exc, TierFullError):
                self._active = None  # do not trust this file with more
                with contextlib.suppress(TierError):
                    self._sync(active)
            raise
        record = Record.of(header, segment=active.number, offset=active.end)
        self._next_sequence = header.sequence + 1
        active.records.append(record)
        active.end = record.end
        active.disk_bytes = max(active.disk_bytes, active.end)
        self._pending.append(record)

    def _begin(self) -> Segment:
        """Creates a segment; its number is above that of every file in the directory."""
        number, self._next_number = self._next_number, self._next_number + 1
        path = self._directory / segment_name(number)
        file = SegmentFile(self._io, path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        segment = Segment(number, file, disk_bytes=PAGE_BYTES)
        self._segments[segment.number] = segment
        try:
            file.write_at([memoryview(pack_header(segment.number))], 0)
            if self.limits.fsync is FsyncMode.BATCH:
                sync_directory(self._io, self._directory)
        except TierError:
            with contextlib.suppress(TierError):  # the first error is the one to report
                self._delete(segment)
            raise
        self._active = segment
        return segment

    def _sync(self, segment: Segment) -> None:
        """Makes the frames of `segment` durable; on failure those not yet so are cut off."""
        if segment.synced_end == segment.end:
            return
        try:
            if self.limits.fsync is FsyncMode.BATCH:
                segment.file.sync()
            segment.disk_bytes = max(segment.end, segment.file.disk_bytes())
        except TierError:
            # After a failed fdatasync the system may have dropped the pages: nothing written
            # since the last good one can be relied on, nor this file with more.
            segment.records = [r for r in segment.records if r.end <= segment.synced_end]
            segment.end = segment.synced_end
            self._cut(segment, segment.end)
            if self._active is segment:
                self._active = None
            raise
        segment.synced_end = segment.end

    def _cut(self, segment: Segment, end: int) -> None:
        """Truncates a segment after a failure; if that fails too, recovery ignores the tail."""
        with contextlib.suppress(TierError):
            segment.file.truncate(end)
            segment.disk_bytes = segment.file.disk_bytes()

    def _seal(self, segment: Segment) -> None:
        """Writes footer and trailer. Without them the segment is still good: it is scanned.

        Raises:
            TierError: its frames cannot be made durable.
        """
        self._sync(segment)
        tail = pack_tail(segment.records, segment=segment.number, footer_offset=segment.end)
        try:
            segment.file.write_at([memoryview(tail)], segment.end)
            if self.limits.fsync is FsyncMode.BATCH:
                segment.file.sync()
            segment.disk_bytes = segment.file.disk_bytes()
        except TierError:
            self.footer_failures += 1
            self._cut(segment, segment.end)

    def seal_recovered(self, numbers: Iterable[int]) -> None:
        """Cuts the torn tails off segments that a crash left, and seals those the cap allows.

        Those without a good frame are deleted.

        Raises:
            TierError: the medium failed.
        """
        for number in numbers:
            segment = self._segments.get(number)
            if segment is None:
                continue
            if not segment.records:
                self._delete(segment)
                continue
            sealed = segment.end + tail_bytes(len(segment.records))
            if self.used_bytes - segment.disk_bytes + sealed <= self.limits.capacity_bytes:
                self._cut(segment, segment.end)
                self._seal(segment)
