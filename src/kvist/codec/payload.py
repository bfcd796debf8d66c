"""The head that every encoded payload begins with, and the two halves of a codec.

Theory of operation. A frame names the chain of codecs its payload went through; the payload's own
head says what it takes to decode it, so that a payload cut short, of another model, level or table
is refused before anything is allocated for it. All integers are little-endian.

    offset  bytes  field
         0      4  magic `KVPL`
         4      2  version, 1
         6      2  codec's number (`CodecId`)
         8      4  level, as the codec counts it
        12      4  zeros
        16     16  table: what else it was encoded with (zeros without one)
        32     16  layout: of the decoded block (zeros where the codec does not look at it)
        48      8  raw_bytes: size of what decoding gives
        56      8  body_bytes: what follows this head, exactly

The frame's checksum covers the payload, so damage does not come this far by accident; whoever
decodes still trusts nothing: every length is compared with the bytes that are there.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from kvist.codec.frame import Buffer
from kvist.core.errors import FormatError, VersionError
from kvist.core.layout import BlockLayout
from kvist.native import digest

PAYLOAD_VERSION = 1
TABLE_BYTES = 16
NO_TABLE = bytes(TABLE_BYTES)
NO_LAYOUT = bytes(16)

_MAGIC = b"KVPL"
_HEAD = struct.Struct("<4sHHII16s16sQQ")
HEAD_BYTES = _HEAD.size


class CodecId(IntEnum):
    """A codec's number: a promise about bytes, never given to another."""

    LOSSLESS = 1
    INT8 = 2
    FP8 = 3
    INT4 = 4
    CACHEGEN = 5
    AEAD = 6


class BlockCodec(Protocol):
    """A codec bound to one layout. Thread-safe; both halves release the GIL where it matters."""

    @property
    def name(self) -> str:
        """Its word in a frame's codec chain: lower-case letters, digits, `.`, `-`."""
        ...

    def encode(self, block: memoryview) -> bytes:
        """A payload of `block`, the raw bytes of one canonical block.

        Raises:
            FormatError: `block` is not of the size that the codec was bound to.
        """
        ...

    def decode(self, stored: memoryview, out: memoryview) -> None:
        """Fills `out`, the block's raw bytes, from a payload. On an error `out` is undefined.

        Raises:
            FormatError: the payload is not what the codec makes, or of another raw size.
        """
        ...


def layout_tag(layout: BlockLayout) -> bytes:
    """16 bytes that name what a block of `layout` looks like."""
    fields = (layout.layers, layout.kinds, layout.kv_heads, layout.block_tokens, layout.head_dim)
    return digest(f"{fields} {layout.dtype}".encode())[:16]


@dataclass(frozen=True, slots=True)
class PayloadHead:
    """The first 64 bytes of a payload."""

    codec: CodecId
    raw_bytes: int
    body_bytes: int
    level: int = 0
    table: bytes = NO_TABLE
    layout: bytes = NO_LAYOUT

    def pack(self) -> bytes:
        """The head's bytes.

        Raises:
            FormatError: a field does not fit its place.
        """
        if len(self.table) != TABLE_BYTES or len(self.layout) != len(NO_LAYOUT):
            raise FormatError("a payload's table and layout have 16 bytes each")
        try:
            return _HEAD.pack(
                _MAGIC,
                PAYLOAD_VERSION,
                self.codec,
                self.level,
                0,
                self.table,
                self.layout,
                self.raw_bytes,
                self.body_bytes,
            )
        except struct.error as exc:
            raise FormatError(f"a payload field is out of range: {exc}") from exc


def open_payload(
    stored: Buffer,
    *,
    codec: CodecId,
    raw_bytes: int | None = None,
    layout: bytes = NO_LAYOUT,
    level: int | None = None,
    table: bytes | None = None,
) -> tuple[PayloadHead, memoryview]:
    """The head of `stored`, proven to be of `codec` and of what the caller expects, and its body.

    Args:
        raw_bytes: the size that decoding must give; `None` where the caller takes any.
        layout: `layout_tag` of the block that is wanted.
        level, table: what the codec decodes with; `None` where the caller takes any.

    Raises:
        FormatError: it is too short or too long, or of another codec, size, layout, level or
            table.
        VersionError: written by a newer Kvist.
    """
    view = memoryview(stored).cast("B")
    if len(view) < HEAD_BYTES:
        raise FormatError(f"a payload has at least {HEAD_BYTES} bytes, not {len(view)}")
    magic, version, number, found_level, zeros, found_table, found_layout, raw, body = (
        _HEAD.unpack_from(view)
    )
    if magic != _MAGIC:
        raise FormatError(f"a payload's magic is {magic!r}, not {_MAGIC!r}")
    if version != PAYLOAD_VERSION:
        raise VersionError(f"payload version {version}; this Kvist reads {PAYLOAD_VERSION}")
    if number != codec or zeros:
        raise FormatError(f"a payload of codec {number}, not {codec.name.lower()}")
    if found_layout != layout:
        raise FormatError("a payload of a block of another layout")
    if raw_bytes is not None and raw != raw_bytes:
        raise FormatError(f"a payload of {raw} decoded bytes, not {raw_bytes}")
    if level not in (None, found_level):
        raise FormatError(f"a payload of level {found_level}, not {level}")
    if table not in (None, found_table):
        raise FormatError("a payload encoded with another table")
    if body != len(view) - HEAD_BYTES:
        raise FormatError(f"a payload of {len(view) - HEAD_BYTES} bytes that says {body}")
    head = PayloadHead(codec, raw, body, found_level, found_table, found_layout)
    return head, view[HEAD_BYTES:]
