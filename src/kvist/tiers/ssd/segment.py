"""Segment file v1: a header page, frames, and once sealed a footer and a trailer page.

    header page   magic `KVISTSEG`, u16 version, u16 0, u32 0, u64 id
    frames        `codec.frame`, one after another
    footer        one entry of 136 bytes a frame, zeros to a whole page:
                  key 32, parent 32, keyspace 32, u64 offset, u64 raw_bytes, u64 stored_bytes,
                  u64 sequence, u16 kind, u16 has_parent, u32 0
    trailer page  magic `KVISTEND`, u16 version, u16 0, u32 0, u64 id, u64 count,
                  u64 footer offset, u64 XXH3-64 of the entries

Both pages end with a checksum (`codec.frame.seal_page`). The file's length is exactly what the
trailer implies, so a footer of another length, or none, means: scan the frames. A file is named
`segment-%016x.kvs`; the name, not the header, is its identity, so files that were swapped only
trade places. A new version of the frame raises the version of the segment too, since an older
Kvist keeps its hands off newer segments only.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvist.codec.frame import (
    PAGE_BYTES,
    Buffer,
    FrameHeader,
    FrameKind,
    check_page,
    frame_bytes,
    padded_bytes,
    seal_page,
)
from kvist.core.errors import ChecksumError, FormatError
from kvist.core.keys import KEY_BYTES, Key
from kvist.native import checksum

SEGMENT_VERSION = 1
SEGMENT_MAGIC = b"KVISTSEG"
TRAILER_MAGIC = b"KVISTEND"

_NAME = re.compile(r"segment-([0-9a-f]{16})\.kvs")
_HEADER = struct.Struct("<8sHHIQ")
_ENTRY = struct.Struct("<32s32s32sQQQQHHI")
_TRAILER = struct.Struct("<8sHHIQQQQ")
_NO_PARENT = bytes(KEY_BYTES)


@dataclass(frozen=True, slots=True)
class Record:
    """Where a frame is and what it says; `segment` is the number in the file's name."""

    kind: FrameKind
    key: Key
    parent: Key | None
    keyspace: bytes
    segment: int
    offset: int
    raw_bytes: int
    stored_bytes: int
    sequence: int

    @property
    def end(self) -> int:
        """Offset of the first byte after the frame."""
        return self.offset + frame_bytes(self.stored_bytes)

    @classmethod
    def of(cls, header: FrameHeader, *, segment: int, offset: int) -> Record:
        """The record of a frame that stands at `offset` of `segment`."""
        return cls(
            kind=header.kind,
            key=header.key,
            parent=header.parent,
            keyspace=header.keyspace,
            segment=segment,
            offset=offset,
            raw_bytes=header.raw_bytes,
            stored_bytes=header.stored_bytes,
            sequence=header.sequence,
        )

    def agrees(self, header: FrameHeader) -> bool:
        """Whether `header` is the one that this record was made of."""
        return self == Record.of(header, segment=self.segment, offset=self.offset)


@dataclass(frozen=True, slots=True)
class Trailer:
    """The last page of a sealed segment."""

    segment: int
    count: int
    footer_offset: int
    footer_checksum: int

    @property
    def file_bytes(self) -> int:
        """The only length that a file with this trailer may have."""
        return self.footer_offset + tail_bytes(self.count)


def segment_name(segment: int) -> str:
    """File name of segment number `segment`."""
    return f"segment-{segment:016x}.kvs"


def segment_number(name: str) -> int | None:
    """The number in a segment's file name; `None` for any other name."""
    found = _NAME.fullmatch(name)
    return int(found[1], 16) if found else None


def tail_bytes(count: int) -> int:
    """Size of footer and trailer of a segment with `count` frames."""
    return padded_bytes(count * _ENTRY.size) + PAGE_BYTES


def pack_header(segment: int) -> bytes:
    """The header page."""
    return seal_page(_HEADER.pack(SEGMENT_MAGIC, SEGMENT_VERSION, 0, 0, segment))


def unpack_header(buffer: Buffer) -> int:
    """The number that the segment was created with.

    Raises:
        FormatError, ChecksumError, VersionError: as for `check_page`.
    """
    page = check_page(buffer, magic=SEGMENT_MAGIC, version=SEGMENT_VERSION)
    number: int = _HEADER.unpack_from(page)[4]
    return number


def pack_tail(records: Sequence[Record], *, segment: int, footer_offset: int) -> bytes:
    """Footer and trailer, as they follow the last frame."""
    footer = b"".join(
        _ENTRY.pack(
            r.key,
            r.parent or _NO_PARENT,
            r.keyspace,
            r.offset,
            r.raw_bytes,
            r.stored_bytes,
            r.sequence,
            r.kind.value,
            r.parent is not None,
            0,
        )
        for r in records
    )
    trailer = _TRAILER.pack(
        TRAILER_MAGIC,
        SEGMENT_VERSION,
        0,
        0,
        segment,
        len(records),
        footer_offset,
        checksum(footer),
    )
    return footer.ljust(padded_bytes(len(footer)), b"\0") + seal_page(trailer)


def unpack_trailer(buffer: Buffer) -> Trailer:
    """Reads the trailer page.

    Raises:
        FormatError, ChecksumError, VersionError: as for `check_page`.
    """
    page = check_page(buffer, magic=TRAILER_MAGIC, version=SEGMENT_VERSION)
    _, _, _, _, segment, count, offset, digest = _TRAILER.unpack_from(page)
    return Trailer(segment, count, offset, digest)


def footer_entries(footer: memoryview, trailer: Trailer) -> memoryview:
    """The packed entries of a footer, proven against its trailer.

    Raises:
        ChecksumError: the footer does not match its trailer.
    """
    entries = footer[: trailer.count * _ENTRY.size]
    if len(entries) < trailer.count * _ENTRY.size or checksum(entries) != trailer.footer_checksum:
        raise ChecksumError("the checksum of a segment footer does not match")
    return entries


def unpack_footer(footer: memoryview, trailer: Trailer, *, segment: int) -> list[Record]:
    """The records of a footer; they are numbered with `segment`, the file's own number.

    Raises:
        ChecksumError: the footer does not match its trailer.
        FormatError: an entry points outside the frames, or is of an unknown kind.
    """
    records = []
    for entry in _ENTRY.iter_unpack(footer_entries(footer, trailer)):
        key, parent, keyspace, offset, raw, stored, sequence, kind, has_parent, _ = entry
        if kind not in (FrameKind.BLOCK.value, FrameKind.TOMBSTONE.value):
            raise FormatError(f"unknown frame kind {kind} in a segment footer")
        record = Record(
            kind=FrameKind(kind),
            key=key,
            parent=parent if has_parent else None,
            keyspace=keyspace,
            segment=segment,
            offset=offset,
            raw_bytes=raw,
            stored_bytes=stored,
            sequence=sequence,
        )
        if offset < PAGE_BYTES or offset % PAGE_BYTES or record.end > trailer.footer_offset:
            raise FormatError(f"a footer entry at {offset} lies outside the frames")
        records.append(record)
    return records
