"""Segment files of version 1, byte for byte: a stored cache must stay readable."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvist.codec.frame import PAGE_BYTES, FrameKind
from kvist.native import digest
from kvist.tiers.ssd.segment import (
    Record,
    pack_header,
    pack_tail,
    tail_bytes,
    unpack_footer,
    unpack_header,
    unpack_trailer,
)

HERE = Path(__file__).parent
NUMBER = 0x1234
KEYSPACE = digest(b"keyspace")
RECORDS = [
    Record(FrameKind.BLOCK, digest(b"a"), None, KEYSPACE, NUMBER, 4096, 8192, 8192, 1),
    Record(FrameKind.BLOCK, digest(b"b"), digest(b"a"), KEYSPACE, NUMBER, 16384, 8192, 5000, 2),
    Record(FrameKind.TOMBSTONE, digest(b"a"), None, KEYSPACE, NUMBER, 28672, 0, 0, 7),
]
END = RECORDS[-1].end
MADE = {
    "segment_header_v1.bin": pack_header(NUMBER),
    "segment_footer_v1.bin": pack_tail(RECORDS, segment=NUMBER, footer_offset=END)[:-PAGE_BYTES],
    "segment_trailer_v1.bin": pack_tail(RECORDS, segment=NUMBER, footer_offset=END)[-PAGE_BYTES:],
}


@pytest.mark.parametrize("name", MADE)
def test_bytes_are_those_of_version_1(name: str) -> None:
    if os.environ.get("KVIST_WRITE_GOLDEN"):
        (HERE / name).write_bytes(MADE[name])
    assert (HERE / name).read_bytes() == MADE[name]


def test_golden_segment_is_read_back() -> None:
    assert unpack_header((HERE / "segment_header_v1.bin").read_bytes()) == NUMBER
    trailer = unpack_trailer((HERE / "segment_trailer_v1.bin").read_bytes())
    footer = memoryview((HERE / "segment_footer_v1.bin").read_bytes())
    assert (trailer.segment, trailer.count, trailer.footer_offset) == (NUMBER, 3, END)
    assert trailer.file_bytes == END + tail_bytes(3) == END + len(footer) + PAGE_BYTES
    assert unpack_footer(footer, trailer, segment=NUMBER) == RECORDS
