"""Frames written by the first release stay readable for ever."""

from __future__ import annotations

from pathlib import Path

from kvist.codec.frame import FrameHeader, FrameKind
from kvist.native import checksum

GOLDEN = Path(__file__).with_name("frame_v1.bin")
PAYLOAD = bytes(i * 7 % 251 for i in range(5000))
BLOCK = FrameHeader(
    kind=FrameKind.BLOCK,
    sequence=0x0102030405060708,
    keyspace=bytes(range(32)),
    key=bytes(range(32, 64)),
    parent=bytes(range(64, 96)),
    raw_bytes=5000,
    stored_bytes=5000,
    payload_checksum=checksum(PAYLOAD),
)
TOMBSTONE = FrameHeader(
    kind=FrameKind.TOMBSTONE,
    sequence=0x0102030405060709,
    keyspace=bytes(range(32)),
    key=bytes(range(32, 64)),
    parent=None,
    raw_bytes=0,
    stored_bytes=0,
    payload_checksum=checksum(b""),
)


def frames() -> bytes:
    return BLOCK.pack() + PAYLOAD.ljust(8192, b"\0") + TOMBSTONE.pack()


def test_golden_frame_is_read() -> None:
    data = GOLDEN.read_bytes()
    block = FrameHeader.unpack(data)
    assert block == BLOCK
    assert data[4096 : 4096 + block.stored_bytes] == PAYLOAD
    assert FrameHeader.unpack(data[block.total_bytes :]) == TOMBSTONE


def test_golden_frame_is_what_we_write() -> None:
    assert frames() == GOLDEN.read_bytes()
