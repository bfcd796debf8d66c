"""The protocol's bytes are a promise, and what is no message is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import msgspec
import pytest
from conversation import FIRSTS, REPLIES, REQUESTS
from hypothesis import given
from hypothesis import strategies as st

from kvist.node import messages as m
from kvist.node.protocol import (
    MOST_BYTES,
    MOST_FIRST_BYTES,
    Frames,
    ProtocolError,
    choose_protocol,
    decode_first,
    decode_reply,
    decode_request,
    encode,
    split_keys,
    unpack_slots,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "node_protocol_v1.json"
ALL: tuple[m.Message, ...] = (*FIRSTS, *REQUESTS, *REPLIES)


def decode(body: bytes) -> m.Message:
    for decoder in (decode_first, decode_request, decode_reply):
        try:
            return decoder(body)
        except ProtocolError:
            continue
    raise AssertionError("not a message")


def test_bytes_of_protocol_1_are_what_they_were() -> None:
    """A file that is missing fails: these bytes cross between versions of Kvist."""
    golden = [
        (item["message"], bytes.fromhex(item["bytes"])) for item in json.loads(GOLDEN.read_text())
    ]
    assert [(repr(message), encode(message)) for message in ALL] == golden
    for message, (_, data) in zip(ALL, golden, strict=True):
        assert decode(data[4:]) == message


def test_every_message_has_golden_bytes() -> None:
    kinds = {type(message) for message in ALL}
    declared = {
        found
        for found in vars(m).values()
        if isinstance(found, type)
        and issubclass(found, msgspec.Struct)
        and found.__name__[0] != "_"
    }
    assert declared == kinds


def test_tags_of_messages_are_all_different() -> None:
    tags = [kind.__struct_config__.tag for kind in {type(message) for message in ALL}]
    assert len(set(tags)) == len(tags)


@given(st.lists(st.sampled_from(ALL), max_size=20), st.integers(1, 50))
def test_stream_cut_anywhere_gives_the_same_messages(
    messages: list[m.Message], part_bytes: int
) -> None:
    data = b"".join(encode(message) for message in messages)
    frames = Frames(MOST_BYTES)
    found = []
    for i in range(0, len(data), part_bytes):
        found += [decode(body) for body in frames.feed(data[i : i + part_bytes])]
    assert found == messages
    assert frames.held_bytes == 0


def test_length_beyond_the_limit_is_refused_before_the_body_comes() -> None:
    frames = Frames(MOST_FIRST_BYTES)
    with pytest.raises(ProtocolError, match="at most"):
        list(frames.feed(struct.pack("<I", MOST_FIRST_BYTES + 1)))
    assert frames.held_bytes == 4


def test_message_that_is_too_long_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="may be sent"):
        encode(m.Match(1, bytes(MOST_BYTES)))


@pytest.mark.parametrize(
    "fields",
    [
        [10, -1, b""],
        [10, 1 << 32, b""],
        [10, 1, bytes(32 * (m.MOST_KEYS + 1))],
        [10, 1, b"", "more"],
        [11, 1, b"", float("nan"), ""],
        [11, 1, b"", float("inf"), ""],
        [11, 1, b"", -1.0, ""],
        [11, 1, b"", 1.0, "x" * 257],
        [12, 1, b"", b"", [-1], []],
        [99, 1],
        {"tag": 10},
        "text",
        None,
    ],
)
def test_fields_out_of_bounds_are_refused(fields: object) -> None:
    with pytest.raises(ProtocolError):
        decode_request(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x92\x0a", b"\x91" * 5000, b"\xdd\xff\xff\xff\xff"]
)
def test_bytes_that_are_no_messagepack_are_refused(body: bytes) -> None:
    for decoder in (decode_first, decode_request, decode_reply):
        with pytest.raises(ProtocolError):
            decoder(body)


def test_greeting_of_something_else_is_refused() -> None:
    with pytest.raises(ProtocolError, match="first word"):
        decode_first(encode(m.Control("http", 1, 1, "status"))[4:])


def test_half_a_key_and_half_a_slot_are_refused() -> None:
    with pytest.raises(ProtocolError):
        split_keys(bytes(33))
    with pytest.raises(ProtocolError):
        unpack_slots(bytes(5))


@pytest.mark.parametrize(
    ("oldest", "newest", "chosen"),
    [(1, 1, 1), (1, 9, 2), (0, 1, 1), (2, 2, 2), (3, 9, None), (0, 0, None)],
)
def test_newest_common_protocol_is_chosen(oldest: int, newest: int, chosen: int | None) -> None:
    assert choose_protocol(oldest, newest) == chosen
