"""The writing side of the SSD tier: an append-only log of segments under a hard byte cap.

Segments are kept oldest first; the newest may be *active* (being written), all others are
read-only. `append` stages a frame for the active segment; `commit` waits until all is written,
syncs and only then makes the appended blocks visible. Before a frame that would exceed the cap,
and once upon ENOSPC, the oldest segment is *reclaimed*: its blocks leave the index, its file is
deleted, and those of its blocks that were read since they were written are appended again, as far
as they fit into half of what was freed. Reclaiming in order of age also keeps a tombstone longer
than the frames that it hides.

Not thread-safe: the tier holds one lock around every call, but for `file`.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from kvist.codec.frame import PAGE_BYTES, FrameHeader
from kvist.core.errors import FormatError, TierError, TierFullError
from kvist.tiers.ssd.contents import Evictions
from kvist.tiers.ssd.engine import IoEngine
from kvist.tiers.ssd.index import BlockIndex
from kvist.tiers.ssd.io import SegmentFile, SegmentIo, tier_error
from kvist.tiers.ssd.lock import LOCK_BYTES
from kvist.tiers.ssd.recovery import read_frame
from kvist.tiers.ssd.segment import Record, tail_bytes
from kvist.tiers.ssd.segments import LogLimits, LostFrames, Segment, SegmentWriter, StagedFrame

MAX_SEGMENTS = 512  # bounds open files; the oldest is reclaimed before one more is begun
REINSERT_LIMIT_BYTES = 64 << 20  # bounds the memory that hot blocks take while their segment goes


class SegmentLog:
    """Appends, seals, reclaims."""

    def __init__(
        self,
        directory: Path,
        *,
        io: SegmentIo,
        engine: IoEngine,
        index: BlockIndex,
        limits: LogLimits,
        segments: Iterable[Segment],
        next_number: int,
    ) -> None:
        self.limits = limits
        self.evictions = Evictions(index)
        self.evicted_blocks = 0
        self.reinserted_blocks = 0
        self._directory = directory
        self._io = io
        self._index = index
        self._writer = SegmentWriter(directory, io=io, engine=engine, limits=limits)
        self._segments = {s.number: s for s in segments}  # oldest first
        self._active: Segment | None = None
        self._next_number = next_number
        self._next_sequence = 1 + max((s.last_sequence for s in self._segments.values()), default=0)
        self._pending: list[Record] = []

    @property
    def segment_count(self) -> int:
        return len(self._segments)

    @property
    def footer_failures(self) -> int:
        return self._writer.footer_failures

    @property
    def buffered_segments(self) -> int:
        """Segments that are buffered although O_DIRECT was wanted."""
        return self._writer.buffered_segments

    @property
    def used_bytes(self) -> int:
        """What the directory takes: our segments, those we must not touch, and the lock file."""
        ours = sum(s.disk_bytes for s in list(self._segments.values()))
        return LOCK_BYTES + self.limits.foreign_bytes + ours

    def segments(self) -> list[Segment]:
        """The segments now, oldest first. Callable from any thread."""
        return list(self._segments.values())

    def file(self, segment: int) -> SegmentFile | None:
        """The file of a segment; `None` if it was reclaimed. Callable from any thread."""
        found = self._segments.get(segment)
        return found.file if found else None

    def ends(self) -> dict[int, int]:
        """Where the active segment's frames end, by number."""
        return {self._active.number: self._active.end} if self._active else {}

    def append(self, header: FrameHeader, data: memoryview) -> None:
        """Appends one frame, making room first; `data` must not change until `commit` returns.

        The header's sequence is given here. Visible only after `commit`.

        Raises:
            TierFullError: no room even after reclaiming.
            TierError: the medium failed. This frame, or an earlier one since the last `commit`,
                is absent.
        """
        self._make_room(header.total_bytes)
        try:  # making room may have appended hot blocks: sequences are given last
            self._stage(header, data)
        except LostFrames as lost:
            self._recover(lost)

    def commit(self) -> None:
        """Makes what was appended durable, then visible.

        Raises:
            TierError: the medium failed; frames not known to be durable are absent.
        """
        try:
            try:
                self._drain()
            finally:
                if self._active is not None:
                    self._sync(self._active)
        finally:
            pending, self._pending = self._pending, []
            self._index.commit(r for r in pending if self._is_durable(r))

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
                self._writer.seal(active)
            elif active is not None:
                self._delete(active)
        finally:
            for segment in self._segments.values():
                segment.file.close()
            self._segments = {}

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
                self._writer.cut(segment)
                self._writer.seal(segment)

    def go_direct(self) -> None:
        """Lets reads of the segments that `open` found go past the page cache."""
        for segment in self._segments.values():
            if self.limits.direct and not segment.file.go_direct():
                self._writer.buffered_segments += 1

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
            TierError: its file cannot be deleted, or a frame that was staged cannot be written.
        """
        self._drain()
        victim = next(iter(self._segments.values()), None)
        if victim is None or (victim is self._active and not victim.records):
            return False
        if victim is self._active:
            self._active = None
        leaving = self.evictions.leaving(victim)
        hot = self._read_hot(victim)
        dropped = self._delete(victim)
        reinserted = 0
        try:
            reinserted = self._reinsert(hot)
        finally:
            self.reinserted_blocks += reinserted
            self.evicted_blocks += dropped - reinserted
            self.evictions.tell(leaving, {r.key for r in self._pending})
        return True

    def _read_hot(self, victim: Segment) -> list[StagedFrame]:
        budget = min(victim.disk_bytes // 2, REINSERT_LIMIT_BYTES)
        kept = []
        for place in self._index.hot(victim.number):
            budget -= place.end - place.offset
            if budget < 0:
                break
            with contextlib.suppress(FormatError, TierError):  # unreadable: it is evicted
                found = read_frame(victim.file, place.offset, place.end)
                if found is not None and place.agrees(found[0]):
                    kept.append(StagedFrame(found[0], memoryview(found[1])))
        return kept

    def _reinsert(self, hot: list[StagedFrame]) -> int:
        """Appends hot blocks again as far as they fit; those that fail are simply evicted.

        Raises:
            TierError: the medium failed for another reason than its size.
        """
        first = self._next_sequence
        try:
            for frame in hot:
                if not self._fits(frame.header.total_bytes):
                    break
                self._stage(frame.header, frame.data)
            self._writer.finish()
        except LostFrames as lost:
            self._take_back(lost)
            if not isinstance(lost.error, TierFullError):
                raise lost.error from lost
        except TierFullError:  # no room for a new segment's first page
            pass
        return sum(r.sequence >= first for r in self._pending)

    def _delete(self, segment: Segment) -> int:
        """Deletes a segment's file and forgets its blocks; returns how many those were."""
        dropped = self._index.drop_segment(segment.number)
        try:
            self._io.unlink(segment.file.path)
        except FileNotFoundError:
            pass  # somebody did it for us
        except OSError as exc:
            raise tier_error(exc, f"delete {segment.file.path}") from exc
        del self._segments[segment.number]
        segment.file.close()
        return dropped

    # ---- frames -----------------------------------------------------------------------------

    def _stage(self, header: FrameHeader, data: memoryview) -> None:
        """Stages a frame in the active segment, rotating first if it is full.

        Raises:
            LostFrames: an earlier run failed.
            TierError: a segment cannot be begun or sealed.
        """
        if self._active is not None and self._needs_segment(header.total_bytes):
            try:
                self._writer.finish()
            except LostFrames as lost:
                raise LostFrames(lost.error, [*lost.frames, StagedFrame(header, data)]) from lost
            full, self._active = self._active, None
            self._writer.seal(full)
        active = self._active or self._begin()
        frame = StagedFrame(replace(header, sequence=self._next_sequence), data)
        self._next_sequence += 1
        self._pending.append(self._writer.stage(active, frame))

    def _drain(self) -> None:
        """Waits until everything that was staged is written.

        Raises:
            TierError: something could not be.
        """
        try:
            self._writer.finish()
        except LostFrames as lost:
            self._recover(lost)

    def _recover(self, lost: LostFrames) -> None:
        """Frames could not be written: where the medium is full, tries again with more room.

        Raises:
            TierError: they are lost.
        """
        self._take_back(lost)
        if not isinstance(lost.error, TierFullError):
            raise lost.error from lost
        if not self._reclaim_oldest():
            raise lost.error from lost
        for frame in lost.frames:
            try:
                self._write_now(frame)
            except TierFullError:
                if not self._reclaim_oldest():
                    raise
                self._write_now(frame)

    def _write_now(self, frame: StagedFrame) -> None:
        """Appends one frame and waits for it.

        Raises:
            TierError: it is absent.
        """
        self._make_room(frame.header.total_bytes)
        try:
            self._stage(frame.header, frame.data)
            self._writer.finish()
        except LostFrames as lost:
            self._take_back(lost)
            raise lost.error from lost

    def _take_back(self, lost: LostFrames) -> None:
        active = self._active
        if active is None:
            return
        self._pending = [
            r for r in self._pending if r.segment != active.number or r.offset < active.end
        ]
        if not isinstance(lost.error, TierFullError):
            self._active = None  # do not trust this file with more
            with contextlib.suppress(TierError):
                self._writer.sync(active)

    def _begin(self) -> Segment:
        """Creates a segment; its number is above that of every file in the directory."""
        number, self._next_number = self._next_number, self._next_number + 1
        room = self.limits.capacity_bytes - self.used_bytes
        reserve = self.limits.segment_bytes if room >= self.limits.segment_bytes else 0
        self._active = self._segments[number] = self._writer.create(number, reserve_bytes=reserve)
        return self._active

    def _sync(self, segment: Segment) -> None:
        """Makes the frames of `segment` durable; one that fails is not written to any more."""
        try:
            self._writer.sync(segment)
        except TierError:
            if self._active is segment:
                self._active = None
            raise
