"""Finds out what is in segment files: from the footer where it is valid, else by scanning frames.

A scan walks from frame to frame. Where a header is damaged, it goes on at the next valid header:
first where the damaged header's length points, then page by page; sequences rise within a segment,
so bytes of a payload that look like an older frame are not taken for one. Frames whose payload
does not match are skipped. What follows the last good frame is a torn tail. A segment of a newer
version is reported and never touched.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kvist.codec.frame import (
    PAGE_BYTES,
    FrameHeader,
    FrameKind,
    frame_bytes,
    padded_bytes,
    stored_bytes_hint,
)
from kvist.core.errors import FormatError, TierError, VersionError
from kvist.native import checksum
from kvist.tiers.ssd.buffers import aligned_buffer
from kvist.tiers.ssd.index import BlockIndex
from kvist.tiers.ssd.io import PosixIo, SegmentFile, SegmentIo, tier_error
from kvist.tiers.ssd.segment import (
    SEGMENT_MAGIC,
    SEGMENT_VERSION,
    Record,
    footer_entries,
    pack_header,
    segment_number,
    unpack_footer,
    unpack_header,
    unpack_trailer,
)

Progress = Callable[[int, int], None]

LOCK_NAME = "LOCK"

_MAX_NUMBER = 1 << 63  # a stray file with a greater number must not use up the numbers


class SegmentState(Enum):
    """What kind of file a segment is."""

    SEALED = "sealed"  # has a valid footer
    UNSEALED = "unsealed"  # was being written when its process died, or its footer is damaged
    NEWER = "newer"  # of a version that this Kvist does not read: never touched
    FOREIGN = "foreign"  # has a segment's name but is none: never touched


@dataclass(frozen=True, slots=True)
class SegmentContents:
    """What one file holds. `good_end` is where the last good frame ends.

    `records` stay empty where a footer went straight into an index.
    """

    number: int
    state: SegmentState
    records: tuple[Record, ...] = ()
    good_end: int = PAGE_BYTES
    corrupt_frames: int = 0
    torn_bytes: int = 0
    first_sequence: int = 0  # order of age, for first in, first out; an empty segment comes first
    last_sequence: int = 0


@dataclass(frozen=True, slots=True)
class KeyspaceUse:
    """Blocks of one keyspace in a segment, dead ones included, and the bytes of their frames."""

    keyspace: bytes
    blocks: int
    frame_bytes: int


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """One segment, every frame read."""

    number: int
    state: SegmentState
    size_bytes: int
    frames_ok: int
    corrupt_frames: int
    torn_bytes: int
    keyspaces: tuple[KeyspaceUse, ...]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """A whole directory, every frame read."""

    segments: tuple[SegmentReport, ...]
    foreign_files: int

    @property
    def corrupt_frames(self) -> int:
        return sum(s.corrupt_frames for s in self.segments)

    @property
    def frames_ok(self) -> int:
        return sum(s.frames_ok for s in self.segments)


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a tier's directory: segments by number, and how many others there are.

    `next_number` is above that of everything with a segment's name, directories and links too.
    """

    segments: dict[int, Path]
    foreign_files: int
    next_number: int


def list_directory(directory: Path) -> Listing:
    """Sorts the files of `directory`.

    Raises:
        TierError: the directory cannot be read.
    """
    segments, foreign, next_number = {}, 0, 0
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                number = segment_number(entry.name)
                if number is not None and number < _MAX_NUMBER:
                    next_number = max(next_number, number + 1)
                if number is not None and entry.is_file(follow_symlinks=False):
                    segments[number] = directory / entry.name
                elif entry.name != LOCK_NAME:
                    foreign += 1
    except OSError as exc:
        raise tier_error(exc, f"list {directory}") from exc
    return Listing(dict(sorted(segments.items())), foreign, next_number)


@dataclass(frozen=True, slots=True)
class _Sealed:
    """What a footer says."""

    frames_end: int
    records: tuple[Record, ...]
    first_sequence: int
    last_sequence: int


def read_frame(file: SegmentFile, offset: int, limit: int) -> tuple[FrameHeader, bytes] | None:
    """The frame at `offset` if it is whole, ends by `limit` and its payload matches.

    Raises:
        TierError: the medium failed.
        FormatError: its header is damaged (then its length is not known).
    """
    header = _header_at(file, offset)
    if offset + header.total_bytes > limit:
        raise FormatError("a frame that goes beyond the end")
    pages = aligned_buffer(padded_bytes(header.stored_bytes))
    payload = pages[: header.stored_bytes]
    size = file.read_at([pages], offset + PAGE_BYTES) if pages else 0
    if size < len(payload) or checksum(payload) != header.payload_checksum:
        return None
    return header, payload.tobytes()


def _header_at(file: SegmentFile, offset: int) -> FrameHeader:
    page = aligned_buffer(PAGE_BYTES)
    size = file.read_at([page], offset)
    return FrameHeader.unpack(page[:size])


def _next_header(file: SegmentFile, offset: int, limit: int, after_sequence: int) -> int | None:
    """Offset of the next valid header behind the damaged one at `offset`."""
    page = bytearray(PAGE_BYTES)
    file.read_at([memoryview(page)], offset)
    hint = offset + frame_bytes(stored_bytes_hint(page))
    pages = range(offset + PAGE_BYTES, limit, PAGE_BYTES)
    for candidate in ([hint] if hint in pages else []) + list(pages):
        try:
            if _header_at(file, candidate).sequence > after_sequence:
                return candidate
        except FormatError:
            continue
    return None


def scan_frames(file: SegmentFile, number: int, limit: int) -> SegmentContents:
    """Reads every frame up to `limit`, as the module's theory of operation says.

    Raises:
        TierError: the medium failed.
    """
    records: list[Record] = []
    offset, good_end, corrupt, sequence = PAGE_BYTES, PAGE_BYTES, 0, 0
    while offset + PAGE_BYTES <= limit:
        try:
            header = _header_at(file, offset)
            if header.sequence <= sequence or offset + header.total_bytes > limit:
                raise FormatError("a frame that is out of order or goes beyond the end")
        except FormatError:
            found = _next_header(file, offset, limit, sequence)
            if found is None:
                break
            corrupt, offset = corrupt + 1, found
            continue
        sequence = header.sequence
        if read_frame(file, offset, limit) is None:
            corrupt += 1
        else:
            records.append(Record.of(header, segment=number, offset=offset))
            good_end = offset + header.total_bytes
        offset += header.total_bytes
    torn = max(0, limit - max(offset, good_end))
    return SegmentContents(
        number,
        SegmentState.UNSEALED,
        tuple(records),
        good_end,
        corrupt,
        torn,
        first_sequence=records[0].sequence if records else 0,
        last_sequence=records[-1].sequence if records else 0,
    )


def _footer(file: SegmentFile, number: int, size: int, index: BlockIndex | None) -> _Sealed | None:
    """What trailer and footer say, if both are valid and fit the file.

    Raises:
        VersionError: the trailer is of a newer version.
        TierError: the medium failed.
    """
    page = bytearray(PAGE_BYTES)
    if size < 2 * PAGE_BYTES or file.read_at([memoryview(page)], size - PAGE_BYTES) < PAGE_BYTES:
        return None
    try:
        trailer = unpack_trailer(page)
        if trailer.file_bytes != size:
            return None
        footer = memoryview(bytearray(size - PAGE_BYTES - trailer.footer_offset))
        file.read_at([footer], trailer.footer_offset)
        if index is None:
            records = unpack_footer(footer, trailer, segment=number)
            sequences = [r.sequence for r in records] or [0]
            return _Sealed(trailer.footer_offset, tuple(records), min(sequences), max(sequences))
        entries = footer_entries(footer, trailer)
        first, last = index.add_footer(entries, segment=number, frames_end=trailer.footer_offset)
        return _Sealed(trailer.footer_offset, (), first, last)
    except VersionError:
        raise
    except FormatError:
        return None


def _is_ours(page: memoryview, number: int) -> bool:
    """Whether a segment file without a valid header may be repaired and deleted by us.

    Raises:
        VersionError: it may be of a newer version.
    """
    magic, version = page[: len(SEGMENT_MAGIC)], page[len(SEGMENT_MAGIC) :][:2]
    if len(page) == PAGE_BYTES and magic == SEGMENT_MAGIC:
        if int.from_bytes(version, "little") != SEGMENT_VERSION:
            raise VersionError("a damaged segment header that may be of a newer version")
        return True
    # Created, but its header was not written, or not all of it, when the process died.
    return not any(page) or pack_header(number).startswith(page)


def read_segment(
    file: SegmentFile, number: int, *, index: BlockIndex | None = None
) -> SegmentContents:
    """What a segment holds; frames are read only where there is no valid footer.

    With an `index`, that is where its frames are added; `BlockIndex.settle` must follow.

    Raises:
        TierError: the medium failed.
    """
    size = file.size_bytes()
    page = bytearray(PAGE_BYTES)
    head = memoryview(page)[: file.read_at([memoryview(page)], 0)]
    try:
        try:
            unpack_header(head)
            ours = True
        except VersionError:
            raise
        except FormatError:
            ours = _is_ours(head, number)
        found = _footer(file, number, size, index)
    except VersionError:
        return SegmentContents(number, SegmentState.NEWER)
    if found is not None:
        return SegmentContents(
            number,
            SegmentState.SEALED,
            found.records,
            found.frames_end,
            first_sequence=found.first_sequence,
            last_sequence=found.last_sequence,
        )
    if not ours:
        return SegmentContents(number, SegmentState.FOREIGN)
    contents = scan_frames(file, number, size)
    if index is not None:
        index.add(contents.records)
    return contents


def _report(file: SegmentFile, number: int, end: int | None) -> SegmentReport:
    """Reads every frame of one segment; `end` bounds a segment that is being written."""
    contents = read_segment(file, number) if end is None else scan_frames(file, number, end)
    good: list[Record] = []
    corrupt = contents.corrupt_frames
    for record in contents.records:
        try:
            found = read_frame(file, record.offset, contents.good_end)
        except FormatError:
            found = None
        if found is not None and record.agrees(found[0]):
            good.append(record)
        else:
            corrupt += 1
    return SegmentReport(
        number=number,
        state=contents.state,
        size_bytes=file.size_bytes(),
        frames_ok=len(good),
        corrupt_frames=corrupt,
        torn_bytes=contents.torn_bytes,
        keyspaces=_keyspaces(good),
    )


def _keyspaces(records: list[Record]) -> tuple[KeyspaceUse, ...]:
    uses: dict[bytes, KeyspaceUse] = {}
    for r in records:
        if r.kind is FrameKind.BLOCK:
            use = uses.get(r.keyspace, KeyspaceUse(r.keyspace, 0, 0))
            size = use.frame_bytes + r.end - r.offset
            uses[r.keyspace] = KeyspaceUse(r.keyspace, use.blocks + 1, size)
    return tuple(uses.values())


def scan_directory(
    directory: Path,
    *,
    progress: Progress | None = None,
    ends: Mapping[int, int] | None = None,
    io: SegmentIo | None = None,
) -> VerifyReport:
    """Reads every frame of every segment, without the tier's lock; changes nothing.

    Args:
        directory: a tier's directory.
        progress: called with segments done and segments in all.
        ends: where to stop in segments that are being written, by number.
        io: the system calls; the operating system's by default.

    Raises:
        TierError: the directory cannot be read or the medium failed.
    """
    listing = list_directory(directory)
    reports = []
    for done, (number, path) in enumerate(listing.segments.items(), start=1):
        try:
            file = SegmentFile(io or PosixIo(), path, os.O_RDONLY)
        except TierError as exc:
            if exc.errno != errno.ENOENT:  # else it was reclaimed since we listed it
                raise
        else:
            try:
                reports.append(_report(file, number, (ends or {}).get(number)))
            finally:
                file.close()
        if progress is not None:
            progress(done, len(listing.segments))
    return VerifyReport(tuple(reports), listing.foreign_files)
