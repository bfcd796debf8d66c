"""Frame v1 says what it holds, and every damaged bit is noticed."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvist.codec.frame import (
    PAGE_BYTES,
    FrameHeader,
    FrameKind,
    check_page,
    frame_bytes,
    padded_bytes,
    seal_page,
)
from kvist.core.errors import ChecksumError, FormatError, VersionError

KEY = bytes(range(32))
HEADER = FrameHeader(
    kind=FrameKind.BLOCK,
    sequence=7,
    keyspace=b"s" * 32,
    key=KEY,
    parent=b"p" * 32,
    raw_bytes=10_000,
    stored_bytes=9_000,
    payload_checksum=2**64 - 1,
    codec="lossless,aead",
)
u64 = st.integers(0, 2**64 - 1)
b32 = st.binary(min_size=32, max_size=32)
headers = st.builds(
    FrameHeader,
    kind=st.sampled_from(FrameKind),
    sequence=u64,
    keyspace=b32,
    key=b32,
    parent=st.none() | b32,
    raw_bytes=u64,
    stored_bytes=u64,
    payload_checksum=u64,
    codec=st.text("abcdefgh0123456789,:", min_size=1, max_size=64),
)


def resealed(page: bytes, offset: int, value: bytes) -> bytes:
    body = bytearray(page[:-8])
    body[offset : offset + len(value)] = value
    return seal_page(bytes(body))


@given(headers)
def test_header_survives_a_round_trip(header: FrameHeader) -> None:
    page = header.pack()
    assert len(page) == PAGE_BYTES
    assert FrameHeader.unpack(page) == header
    assert FrameHeader.unpack(memoryview(page + b"payload")) == header


def test_checksum_is_xxh3_of_what_precedes_it() -> None:
    page = HEADER.pack()
    assert struct.unpack("<Q", page[4088:])[0] == xxhash.xxh3_64_intdigest(page[:4088])


def test_zero_parent_is_not_no_parent() -> None:
    zero = replace(HEADER, parent=bytes(32))
    assert FrameHeader.unpack(zero.pack()).parent == bytes(32)
    assert FrameHeader.unpack(replace(HEADER, parent=None).pack()).parent is None


@pytest.mark.parametrize("offset", [*range(0, 216, 3), 2000, 4087, 4088, 4095])
def test_flipped_bit_is_noticed(offset: int) -> None:
    page = bytearray(HEADER.pack())
    page[offset] ^= 0x10
    with pytest.raises(FormatError):
        FrameHeader.unpack(page)


def test_damage_is_a_checksum_error() -> None:
    page = bytearray(HEADER.pack())
    page[60] ^= 1
    with pytest.raises(ChecksumError):
        FrameHeader.unpack(page)


def test_newer_version_is_a_version_error() -> None:
    with pytest.raises(VersionError, match="version 2"):
        FrameHeader.unpack(resealed(HEADER.pack(), 8, b"\x02\x00"))


@pytest.mark.parametrize(
    ("offset", "value"), [(10, b"\x03\x00"), (12, b"\x02"), (120, b"\xff")], ids=str
)
def test_field_that_v1_does_not_allow_is_a_format_error(offset: int, value: bytes) -> None:
    with pytest.raises(FormatError):
        FrameHeader.unpack(resealed(HEADER.pack(), offset, value))


@pytest.mark.parametrize("size", [0, 1, 4095])
def test_short_buffer_is_a_format_error(size: int) -> None:
    with pytest.raises(FormatError):
        FrameHeader.unpack(HEADER.pack()[:size])


def test_other_magic_is_a_format_error() -> None:
    with pytest.raises(FormatError, match="magic"):
        check_page(HEADER.pack(), magic=b"KVISTSEG", version=1)


@pytest.mark.parametrize(
    "bad",
    [
        replace(HEADER, key=b"short"),
        replace(HEADER, codec=""),
        replace(HEADER, codec="x" * 65),
        replace(HEADER, codec="é"),
        replace(HEADER, sequence=2**64),
    ],
    ids=["key", "no codec", "long codec", "codec not ascii", "sequence"],
)
def test_header_that_does_not_fit_is_not_packed(bad: FrameHeader) -> None:
    with pytest.raises(FormatError):
        bad.pack()


def test_page_body_that_does_not_fit_is_refused() -> None:
    with pytest.raises(FormatError):
        seal_page(bytes(4089))


def test_frames_fill_whole_pages() -> None:
    assert [padded_bytes(n) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
    assert frame_bytes(4097) == 4096 + 8192
