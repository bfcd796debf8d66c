"""The SSD tier: `LowerTier` over a segment log, its index and the lock of its directory."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kvist.codec.frame import PAGE_BYTES, RAW_CODEC, FrameHeader, FrameKind
from kvist.core.errors import ClosedError, ConfigError, FormatError, VersionError
from kvist.core.keys import KEY_BYTES, Key
from kvist.core.outcome import Outcome
from kvist.native import checksum
from kvist.tiers.protocol import Payload
from kvist.tiers.ssd.index import BlockIndex
from kvist.tiers.ssd.io import FsyncMode, PosixIo, SegmentFile, SegmentIo, held
from kvist.tiers.ssd.lock import LOCK_BYTES, DirectoryLock
from kvist.tiers.ssd.log import LogLimits, Segment, SegmentLog
from kvist.tiers.ssd.recovery import (
    Progress,
    SegmentContents,
    SegmentState,
    VerifyReport,
    list_directory,
    read_segment,
    scan_directory,
)
from kvist.tiers.ssd.segment import Record, tail_bytes

DEFAULT_SEGMENT_BYTES = 256 << 20
MIN_CAPACITY_BYTES = LOCK_BYTES + PAGE_BYTES + 2 * PAGE_BYTES + tail_bytes(1)  # one small frame
_SHARES = (8, 256)  # a segment is at most 1/8 and at least 1/256 of the capacity


class MissCause(Enum):
    """Why a read was a miss. All but the first two drop the entry."""

    ABSENT = "absent"
    SIZE = "size"  # the caller's buffer has another size than the block
    SHORT = "short"  # the file ends within the frame
    HEADER = "header"  # the header is damaged
    VERSION = "version"  # the header is of a newer version
    IDENTITY = "identity"  # a valid header of another block
    PAYLOAD = "payload"  # the payload's checksum does not match
    CODEC = "codec"  # encoded in a way that this tier does not decode


@dataclass(frozen=True, slots=True)
class SsdStats:
    """Counters since open, and what is there now."""

    blocks: int
    bytes_used: int
    capacity_bytes: int
    segments: int
    puts: int
    hits: int
    misses_by_cause: Mapping[MissCause, int]
    evicted_blocks: int
    reinserted_blocks: int
    skipped_segments: int
    foreign_files: int
    recovered_segments: int
    corrupt_frames: int
    torn_bytes: int
    footer_failures: int


@dataclass(frozen=True, slots=True)
class _Found:
    """What `open` found; `segments` are ours, oldest first."""

    segments: tuple[Segment, ...]
    unsealed: tuple[int, ...]
    next_number: int
    skipped_segments: int
    foreign_files: int
    untouched_bytes: int
    corrupt_frames: int
    torn_bytes: int


def _recover(directory: Path, io: SegmentIo, undo: ExitStack) -> _Found:
    """Reads what every segment holds; files are closed by `undo`, those not ours at once.

    Raises:
        TierError: the medium failed.
    """
    listing = list_directory(directory)
    ours: list[tuple[SegmentContents, Segment]] = []
    states: Counter[SegmentState] = Counter()
    untouched_bytes = 0
    for number, path in listing.segments.items():
        file = SegmentFile(io, path, os.O_RDWR)
        undo.callback(file.close)
        contents = read_segment(file, number)
        states[contents.state] += 1
        size, end = file.disk_bytes(), contents.good_end
        if contents.state in (SegmentState.NEWER, SegmentState.FOREIGN):
            untouched_bytes += size
            file.close()
            continue
        segment = Segment(
            number, file, list(contents.records), end=end, synced_end=end, disk_bytes=size
        )
        ours.append((contents, segment))
    ours.sort(key=lambda pair: pair[0].first_sequence)
    return _Found(
        segments=tuple(s for _, s in ours),
        unsealed=tuple(s.number for c, s in ours if c.state is SegmentState.UNSEALED),
        next_number=listing.next_number,
        skipped_segments=states[SegmentState.NEWER],
        foreign_files=listing.foreign_files + states[SegmentState.FOREIGN],
        untouched_bytes=untouched_bytes,
        corrupt_frames=sum(c.corrupt_frames for c, _ in ours),
        torn_bytes=sum(c.torn_bytes for c, _ in ours),
    )


class SsdTier:
    """Blocks on a local disk. Thread-safe: one writer at a time, readers beside it."""

    def __init__(
        self,
        directory: Path,
        *,
        keyspace: bytes,
        lock: DirectoryLock,
        index: BlockIndex,
        log: SegmentLog,
        found: _Found,
    ) -> None:
        """For `open`, which callers use."""
        self._directory = directory
        self._keyspace = keyspace
        self._lock = lock
        self._index = index
        self._log = log
        self._found = found
        self._write_lock = threading.Lock()
        self._count_lock = threading.Lock()
        self._misses: Counter[MissCause] = Counter()
        self._hits = 0
        self._puts = 0
        self._closed = False

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        keyspace: bytes,
        capacity_bytes: int,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        fsync: FsyncMode = FsyncMode.BATCH,
        io: SegmentIo | None = None,
    ) -> SsdTier:
        """Takes the directory, finds what is in it, and brings it under the cap.

        `segment_bytes` is kept between 1/256 and 1/8 of the capacity; a larger frame gets a
        segment of its own. `keyspace` (32 bytes) marks what is written; blocks of other keyspaces
        stay, count and are readable, since a key is unique over all keyspaces.

        Raises:
            TierBusyError: another tier holds the directory.
            TierError: the medium failed.
            ConfigError: the capacity or the keyspace cannot be used.
        """
        if capacity_bytes < MIN_CAPACITY_BYTES:
            raise ConfigError(f"an SSD tier needs {MIN_CAPACITY_BYTES} bytes or more")
        if len(keyspace) != KEY_BYTES:
            raise ConfigError(f"a keyspace fingerprint has {KEY_BYTES} bytes, not {len(keyspace)}")
        most, least = (capacity_bytes // share for share in _SHARES)
        io = io or PosixIo()
        with ExitStack() as undo:
            lock = DirectoryLock(directory)
            undo.callback(lock.release)
            found = _recover(directory, io, undo)
            index = BlockIndex()
            index.replay(r for segment in found.segments for r in segment.records)
            log = SegmentLog(
                directory,
                io=io,
                index=index,
                limits=LogLimits(
                    capacity_bytes=capacity_bytes,
                    segment_bytes=max(min(segment_bytes, most), least, 4 * PAGE_BYTES),
                    fsync=fsync,
                    foreign_bytes=found.untouched_bytes,
                ),
                segments=found.segments,
                next_number=found.next_number,
            )
            log.enforce_cap()
            log.seal_recovered(found.unsealed)
            undo.pop_all()
        return cls(directory, keyspace=keyspace, lock=lock, index=index, log=log, found=found)

    def contains(self, key: Key) -> bool:
        """Whether `key` is durable here. No I/O, no lock."""
        return self._index.get(key) is not None

    def put(self, payloads: Sequence[Payload]) -> None:
        """Appends blocks; one fdatasync, then they are visible. Present keys are skipped.

        Raises:
            TierFullError: no room even after reclaiming.
            TierError: the medium failed. What was not made durable is absent.
            ClosedError: the tier was closed.
        """
        with held(self._write_lock):
            self._require_open()
            seen: set[Key] = set()
            try:
                for payload in payloads:
                    if payload.key in seen or self.contains(payload.key):
                        continue
                    seen.add(payload.key)
                    self._log.append(
                        FrameKind.BLOCK,
                        keyspace=self._keyspace,
                        key=payload.key,
                        parent=payload.parent,
                        data=payload.data.cast("B"),
                    )
            finally:
                self._log.commit()
            self._puts += len(seen)

    def read_into(self, key: Key, out: memoryview) -> Outcome:
        """Reads and proves one block. On a `MISS` the bytes of `out` are undefined.

        Raises:
            TierError: the medium failed.
            ClosedError: the tier was closed.
        """
        self._require_open()
        out = out.cast("B")
        record = self._index.get(key)
        file = self._log.file(record) if record is not None else None
        if record is None or file is None:
            return self._miss(MissCause.ABSENT)
        if len(out) != record.raw_bytes:
            return self._miss(MissCause.SIZE)
        with file.pinned() as alive:
            cause = self._read(record, file, out) if alive else MissCause.ABSENT
        if cause is not None:
            if cause is not MissCause.ABSENT:
                self._index.drop([record])
            return self._miss(cause)
        self._index.touch(record)
        with held(self._count_lock):
            self._hits += 1
        return Outcome.HIT

    @staticmethod
    def _read(record: Record, file: SegmentFile, out: memoryview) -> MissCause | None:
        if record.stored_bytes != record.raw_bytes:
            return MissCause.CODEC
        page = memoryview(bytearray(PAGE_BYTES))
        buffers = [page, out] if len(out) else [page]
        if file.read_at(buffers, record.offset) < PAGE_BYTES + len(out):
            return MissCause.SHORT
        try:
            header = FrameHeader.unpack(page)
        except VersionError:
            return MissCause.VERSION
        except FormatError:
            return MissCause.HEADER
        if not record.agrees(header):
            return MissCause.IDENTITY
        if header.codec != RAW_CODEC:
            return MissCause.CODEC
        if checksum(out) != header.payload_checksum:
            return MissCause.PAYLOAD
        return None

    def remove(self, keys: Iterable[Key]) -> None:
        """Hides blocks at once and appends tombstones, so that they stay hidden after a restart.

        Raises:
            TierError: a tombstone could not be written; the blocks are hidden until a restart.
            ClosedError: the tier was closed.
        """
        with held(self._write_lock):
            self._require_open()
            found = [r for r in map(self._index.get, dict.fromkeys(keys)) if r is not None]
            self._index.drop(found)
            try:
                for record in found:
                    self._log.append(
                        FrameKind.TOMBSTONE,
                        keyspace=record.keyspace,
                        key=record.key,
                        data=memoryview(b""),
                    )
            finally:
                self._log.commit()

    def clear(self) -> None:
        """Deletes every segment of this version; newer ones and foreign files stay.

        Raises:
            TierError: a segment cannot be deleted.
            ClosedError: the tier was closed.
        """
        with held(self._write_lock):
            self._require_open()
            self._log.clear()
            self._index.clear()

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        """Reads every frame; drops nothing. `progress` gets segments done and segments in all.

        Raises:
            TierError: the medium failed.
            ClosedError: the tier was closed.
        """
        with held(self._write_lock):
            self._require_open()
            ends = self._log.ends()
        return scan_directory(self._directory, progress=progress, ends=ends)

    def stats(self) -> SsdStats:
        """Counters now; takes no lock that I/O holds."""
        with held(self._count_lock):
            misses, hits = dict(self._misses), self._hits
        return SsdStats(
            blocks=len(self._index),
            bytes_used=self._log.used_bytes,
            capacity_bytes=self._log.limits.capacity_bytes,
            segments=self._log.segment_count,
            puts=self._puts,
            hits=hits,
            misses_by_cause=misses,
            evicted_blocks=self._log.evicted_blocks,
            reinserted_blocks=self._log.reinserted_blocks,
            skipped_segments=self._found.skipped_segments,
            foreign_files=self._found.foreign_files,
            recovered_segments=len(self._found.unsealed),
            corrupt_frames=self._found.corrupt_frames,
            torn_bytes=self._found.torn_bytes,
            footer_failures=self._log.footer_failures,
        )

    def close(self) -> None:
        """Seals the active segment and gives the directory back. Idempotent.

        Raises:
            TierError: the medium failed; the directory is given back nevertheless.
        """
        with held(self._write_lock):
            if self._closed:
                return
            self._closed = True
            try:
                self._log.close()
            finally:
                self._index.clear()
                self._lock.release()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the SSD tier in {self._directory} was closed")

    def _miss(self, cause: MissCause) -> Outcome:
        with held(self._count_lock):
            self._misses[cause] += 1
        return Outcome.MISS
