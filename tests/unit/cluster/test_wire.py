"""Messages: what is written is read, what is foreign is understood, what is damaged is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import key, received, record, stored

from kvist.cluster.log import EventLog
from kvist.cluster.wire import (
    END_NUMBER,
    Batch,
    decode_message,
    encode_payload,
    topic_of,
)
from kvist.core.errors import FormatError
from kvist.core.events import Cleared, Content, Removed, Stored
from kvist.core.keys import token_bytes
from kvist.core.outcome import Tier

FIRST = (0).to_bytes(8, "big")


def read(payload: bytes, topic: bytes = topic_of("a", 7)) -> Batch:
    return decode_message(topic, FIRST, payload, source="listed")


@pytest.mark.parametrize("tier", list(Tier))
def test_every_tier_survives_the_way_through_media(tier: Tier) -> None:
    events = (stored(1, 2, tier=tier, parent=0), Removed((key(3),), tier), Cleared())
    assert read(encode_payload(events, ts=1.5, block_tokens=16)).events == events


def test_record_travels_with_a_batch_that_has_no_events() -> None:
    batch = read(encode_payload((), ts=0.0, block_tokens=16, record=record("a")))
    assert (batch.events, batch.record) == ((), record("a"))


def test_record_of_another_node_is_refused() -> None:
    with pytest.raises(FormatError, match="sends a record of b"):
        read(encode_payload((), ts=0.0, block_tokens=16, record=record("b")))


def test_topic_says_who_and_which_start() -> None:
    batch = read(encode_payload((), ts=0.0, block_tokens=16))
    assert (batch.node, batch.incarnation, batch.number) == ("a", 7, 0)
    stock = read(encode_payload((), ts=0.0, block_tokens=16), topic=b"kv@pod@model")
    assert (stock.node, stock.incarnation) == ("listed", 0)


def test_numbers_of_stock_engines_are_keys() -> None:
    event = {"type": "BlockRemoved", "block_hashes": [2**63 + 1, -1], "medium": "GPU"}
    (removed,) = read(msgspec.msgpack.encode([0.0, [event]])).events
    assert isinstance(removed, Removed)
    assert removed.keys == (b"\x80" + bytes(6) + b"\x01" + bytes(8), b"\xff" * 8 + bytes(8))
    assert removed.tier is Tier.HBM
    assert min(map(len, removed.keys)) == 16


def test_events_of_unknown_media_are_left_out() -> None:
    event = {"type": "BlockRemoved", "block_hashes": [key(1)], "medium": "TAPE"}
    assert read(msgspec.msgpack.encode([0.0, [event, {"type": "AllBlocksCleared"}]])).events == (
        Cleared(),
    )


def described(**more: object) -> Stored:
    """How a stock engine's event of two blocks is read."""
    event = {
        "type": "BlockStored",
        "block_hashes": [key(1), key(2)],
        "parent_block_hash": None,
        "token_ids": [7, 8, 9, 300_000],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    (stored,) = read(msgspec.msgpack.encode([0.0, [event | more]])).events
    assert isinstance(stored, Stored)
    return stored


def test_what_an_engine_says_of_its_blocks_is_kept() -> None:
    stored = described(group_idx=3, kv_cache_spec_kind="full_attention")
    content = Content(token_bytes([7, 8, 9, 300_000]), 2, "", "", 2, "full_attention")
    assert stored == Stored((key(1), key(2)), None, Tier.HBM, content, 3)


@pytest.mark.parametrize(
    ("extra_keys", "parent", "lora", "salt", "named"),
    [
        ([["salt"], None], None, None, "salt", 2),
        ([["ad", "salt"], ["ad"]], None, "ad", "salt", 2),
        ([["ad"], ["ad"]], key(9), "ad", "", 2),
        ([["salt"], None], key(9), None, "", 0),  # only a first block says its salt
        ([None, [["image", 3]]], None, None, "", 1),
        ([["salt", ["image", 0]], None], None, None, "", 0),
        ([[b"embeddings"], None], None, None, "", 0),
        ([["other"], ["ad"]], key(9), "ad", "", 0),
        ([None], None, None, "", 0),
        ("odd", None, None, "", 0),
        ([3, None], None, None, "", 0),
    ],
)
def test_extra_keys_say_salt_and_which_blocks_have_more_in_them(
    extra_keys: object, parent: bytes | None, lora: str | None, salt: str, named: int
) -> None:
    content = described(extra_keys=extra_keys, parent_block_hash=parent, lora_name=lora).content
    assert content is not None
    assert (content.salt, content.lora, content.named_blocks) == (salt, lora or "", named)


def test_group_of_a_removal_is_kept() -> None:
    event = {"type": "BlockRemoved", "block_hashes": [key(1)], "medium": "GPU", "group_idx": 2}
    assert read(msgspec.msgpack.encode([0.0, [event]])).events == (Removed((key(1),), Tier.HBM, 2),)


@pytest.mark.parametrize("tokens", [[-1], ["x"], 5, [2**32]])
def test_tokens_that_are_none_are_a_format_error(tokens: object) -> None:
    with pytest.raises(FormatError, match="tokens"):
        described(token_ids=tokens)


@pytest.mark.parametrize(
    ("topic", "number", "payload"),
    [
        (b"kvist@a", FIRST, b"\x92\x00\x90"),
        (b"kvist@a@zz", FIRST, b"\x92\x00\x90"),
        (topic_of("a", 1), b"\0" * 7, b"\x92\x00\x90"),
        (topic_of("a", 1), END_NUMBER, b"\x92\x00\x90"),
        (topic_of("a", 1), FIRST, b""),
        (topic_of("a", 1), FIRST, b"\x92\x00\x91\x81"),
        (topic_of("a", 1), FIRST, msgspec.msgpack.encode([0.0, [{"type": "Unheard"}]])),
        (topic_of("a", 1), FIRST, msgspec.msgpack.encode({"ts": 0.0})),
    ],
)
def test_what_is_no_message_is_a_format_error(topic: bytes, number: bytes, payload: bytes) -> None:
    with pytest.raises(FormatError):
        decode_message(topic, number, payload, source="x")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_a_format_error(payload: bytes) -> None:
    try:
        read(payload)
    except FormatError:
        return


@given(st.data())
def test_flipped_bits_are_a_batch_or_a_format_error(data: st.DataObject) -> None:
    whole = encode_payload((stored(1, 2), Cleared()), ts=0.0, block_tokens=16, record=record("a"))
    at, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    damaged = bytearray(whole)
    damaged[at] ^= 1 << bit
    try:
        read(bytes(damaged))
    except FormatError:
        return


def test_first_batch_of_a_start_needs_none_before_it() -> None:
    log = EventLog(block_tokens=16)
    log.record(Stored((key(1),), None, Tier.SSD))
    first, second = received(log.seal(0.0)), received(log.seal(0.0))
    assert first.is_base
    assert first.events == (Cleared(), Stored((key(1),), None, Tier.SSD))
    assert not second.is_base
