"""Frame v1: how one block, or the removal of one, stands on any medium below DRAM.

A frame is a header page of 4096 bytes, then the payload, padded with zeros to whole pages. All
integers are little-endian.

    offset  bytes  field
         0      8  magic `KVISTFRM`
         8      2  version, 1
        10      2  kind: 1 block, 2 tombstone
        12      4  flags: bit 0 has_parent; all others 0
        16      8  sequence
        24     32  keyspace fingerprint
        56     32  key
        88     32  parent key (zeros without has_parent)
       120     64  codec chain, ASCII, NUL-padded
       184      8  raw_bytes: size of the decoded block
       192      8  stored_bytes: size of the payload
       200      8  XXH3-64 of the payload
       208   3880  zeros
      4088      8  XXH3-64 of the 4088 bytes before

Every page that Kvist writes as a header ends with that checksum, in this and all later versions:
so a page of a newer version (`VersionError`) is told from a damaged one (`ChecksumError`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum

from kvist.core.errors import ChecksumError, FormatError, VersionError
from kvist.core.keys import KEY_BYTES, Key
from kvist.native import checksum

PAGE_BYTES = 4096
FRAME_VERSION = 1
RAW_CODEC = "raw"

Buffer = bytes | bytearray | memoryview

_MAGIC = b"KVISTFRM"
_HEADER = struct.Struct("<8sHHIQ32s32s32s64sQQQ")
_HEAD = struct.Struct("<8sH")
_U64 = struct.Struct("<Q")
_BODY_BYTES = PAGE_BYTES - _U64.size
_HAS_PARENT = 1
_CODEC_BYTES = 64
_NO_PARENT = bytes(KEY_BYTES)


class FrameKind(Enum):
    """What a frame says of its key."""

    BLOCK = 1
    TOMBSTONE = 2


def padded_bytes(size_bytes: int) -> int:
    """`size_bytes` rounded up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def frame_bytes(stored_bytes: int) -> int:
    """Size of a whole frame whose payload has `stored_bytes`."""
    return PAGE_BYTES + padded_bytes(stored_bytes)


def seal_page(body: bytes) -> bytes:
    """A page of `body`, zeros, and the checksum of both.

    Raises:
        FormatError: `body` is larger than a page less its checksum.
    """
    if len(body) > _BODY_BYTES:
        raise FormatError(f"a page holds {_BODY_BYTES} bytes, not {len(body)}")
    page = body.ljust(_BODY_BYTES, b"\0")
    return page + _U64.pack(checksum(page))


def check_page(buffer: Buffer, *, magic: bytes, version: int) -> memoryview:
    """The page at the start of `buffer`, proven to be whole, of this kind and version.

    Raises:
        FormatError: it is too short, or has another magic.
        ChecksumError: its checksum does not match.
        VersionError: it is whole, but of another version.
    """
    view = memoryview(buffer).cast("B")[:PAGE_BYTES]
    if len(view) < PAGE_BYTES:
        raise FormatError(f"a page has {PAGE_BYTES} bytes, not {len(view)}")
    found_magic, found_version = _HEAD.unpack_from(view)
    if found_magic != magic:
        raise FormatError(f"magic is {found_magic!r}, not {magic!r}")
    if _U64.unpack_from(view, _BODY_BYTES)[0] != checksum(view[:_BODY_BYTES]):
        raise ChecksumError(f"the checksum of a {magic.decode()} page does not match")
    if found_version != version:
        raise VersionError(f"{magic.decode()} version {found_version}; this Kvist reads {version}")
    return view


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """The first page of a frame. `parent` is `None` for a first block and for a tombstone."""

    kind: FrameKind
    sequence: int
    keyspace: bytes
    key: Key
    parent: Key | None
    raw_bytes: int
    stored_bytes: int
    payload_checksum: int
    codec: str = RAW_CODEC

    @property
    def total_bytes(self) -> int:
        """Size of the frame on the medium, padding included."""
        return frame_bytes(self.stored_bytes)

    def pack(self) -> bytes:
        """The header page.

        Raises:
            FormatError: a field does not fit its place.
        """
        codec = self.codec.encode()
        parent = _NO_PARENT if self.parent is None else self.parent
        if {len(self.keyspace), len(self.key), len(parent)} != {KEY_BYTES}:
            raise FormatError(f"keyspace, key and parent have {KEY_BYTES} bytes each")
        if not self.codec.isascii() or not 0 < len(codec) <= _CODEC_BYTES or b"\0" in codec:
            raise FormatError(f"codec chain {self.codec!r} is not 1 to {_CODEC_BYTES} ASCII bytes")
        try:
            body = _HEADER.pack(
                _MAGIC,
                FRAME_VERSION,
                self.kind.value,
                0 if self.parent is None else _HAS_PARENT,
                self.sequence,
                self.keyspace,
                self.key,
                parent,
                codec,
                self.raw_bytes,
                self.stored_bytes,
                self.payload_checksum,
            )
        except struct.error as exc:
            raise FormatError(f"a frame field is out of range: {exc}") from exc
        return seal_page(body)

    @classmethod
    def unpack(cls, buffer: Buffer) -> FrameHeader:
        """Reads the header page at the start of `buffer`.

        Raises:
            FormatError: not a frame, or a field that v1 does not allow.
            ChecksumError: the header was damaged.
            VersionError: written by a newer Kvist.
        """
        page = check_page(buffer, magic=_MAGIC, version=FRAME_VERSION)
        (_, _, kind, flags, sequence, keyspace, key, parent, codec, raw, stored, digest) = (
            _HEADER.unpack_from(page)
        )
        if flags & ~_HAS_PARENT:
            raise FormatError(f"unknown frame flags {flags:#x}")
        try:
            return cls(
                kind=FrameKind(kind),
                sequence=sequence,
                keyspace=keyspace,
                key=key,
                parent=parent if flags & _HAS_PARENT else None,
                raw_bytes=raw,
                stored_bytes=stored,
                payload_checksum=digest,
                codec=codec.rstrip(b"\0").decode("ascii"),
            )
        except ValueError as exc:
            raise FormatError(f"a frame field that version 1 does not allow: {exc}") from exc


def stored_bytes_hint(page: Buffer) -> int:
    """What a header page, damaged or not, says its payload's size is. A guess, to be checked."""
    size: int = _U64.unpack_from(page, 192)[0]
    return size
