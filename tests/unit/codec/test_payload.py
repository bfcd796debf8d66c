"""The head of an encoded payload: what it says is proven before anything is decoded."""

from __future__ import annotations

import struct

import pytest

from kvist.codec.payload import (
    HEAD_BYTES,
    NO_LAYOUT,
    CodecId,
    PayloadHead,
    layout_tag,
    open_payload,
)
from kvist.core.errors import FormatError, VersionError
from kvist.core.layout import BlockLayout

LAYOUT = BlockLayout(layers=2, kv_heads=3, head_dim=8, block_tokens=4, dtype="bfloat16")
BODY = bytes(range(40))
HEAD = PayloadHead(
    CodecId.CACHEGEN,
    raw_bytes=LAYOUT.block_bytes,
    body_bytes=len(BODY),
    level=3,
    table=bytes(range(16)),
    layout=layout_tag(LAYOUT),
)
STORED = HEAD.pack() + BODY


def opened(stored: bytes) -> tuple[PayloadHead, bytes]:
    head, body = open_payload(
        stored,
        codec=CodecId.CACHEGEN,
        raw_bytes=LAYOUT.block_bytes,
        layout=layout_tag(LAYOUT),
    )
    return head, bytes(body)


def patched(offset: int, new: bytes) -> bytes:
    return STORED[:offset] + new + STORED[offset + len(new) :]


def test_what_was_packed_is_opened_again() -> None:
    assert opened(STORED) == (HEAD, BODY)


def test_bytes_of_the_head_are_a_promise() -> None:
    head = PayloadHead(CodecId.INT8, raw_bytes=0x0102, body_bytes=3, level=7)
    assert head.pack() == b"KVPL" + struct.pack("<HHII", 1, 2, 7, 0) + bytes(32) + struct.pack(
        "<QQ", 0x0102, 3
    )


@pytest.mark.parametrize("size", [0, 3, HEAD_BYTES - 1, HEAD_BYTES, len(STORED) - 1])
def test_a_payload_cut_short_is_refused(size: int) -> None:
    with pytest.raises(FormatError):
        opened(STORED[:size])


def test_bytes_behind_the_payload_are_refused() -> None:
    with pytest.raises(FormatError, match="41 bytes that says 40"):
        opened(STORED + b"\0")


@pytest.mark.parametrize(
    ("offset", "new"),
    [
        (0, b"KVPX"),
        (6, struct.pack("<H", CodecId.INT8)),
        (12, b"\1"),
        (32, bytes(16)),
        (48, struct.pack("<Q", LAYOUT.block_bytes + 1)),
        (56, struct.pack("<Q", 1 << 60)),
    ],
)
def test_another_field_than_expected_is_refused(offset: int, new: bytes) -> None:
    with pytest.raises(FormatError):
        opened(patched(offset, new))


def test_a_newer_version_is_told_from_damage() -> None:
    with pytest.raises(VersionError, match="version 2"):
        opened(patched(4, b"\2"))


@pytest.mark.parametrize("head", [{"raw_bytes": -1}, {"level": 1 << 32}, {"table": b"short"}])
def test_a_field_that_does_not_fit_is_refused(head: dict[str, object]) -> None:
    fields = {"raw_bytes": 1, "body_bytes": 1, **head}
    with pytest.raises(FormatError):
        PayloadHead(CodecId.FP8, **fields).pack()  # type: ignore[arg-type]


def test_each_field_of_a_layout_changes_its_tag() -> None:
    others = [
        BlockLayout(3, 3, 8, 4, "bfloat16"),
        BlockLayout(2, 1, 8, 4, "bfloat16"),
        BlockLayout(2, 3, 4, 4, "bfloat16"),
        BlockLayout(2, 3, 8, 8, "bfloat16"),
        BlockLayout(2, 3, 8, 4, "float16"),
        BlockLayout(2, 3, 8, 4, "bfloat16", kinds=1),
    ]
    tags = {layout_tag(layout) for layout in [LAYOUT, *others]}
    assert len(tags) == 7
    assert NO_LAYOUT not in tags


def test_another_level_or_table_than_the_wanted_is_refused() -> None:
    fields = {"codec": CodecId.CACHEGEN, "layout": layout_tag(LAYOUT)}
    assert open_payload(STORED, level=3, table=bytes(range(16)), **fields)[0] == HEAD
    with pytest.raises(FormatError, match="level 3, not 2"):
        open_payload(STORED, level=2, **fields)
    with pytest.raises(FormatError, match="another table"):
        open_payload(STORED, table=bytes(16), **fields)
