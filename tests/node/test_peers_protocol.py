"""The bytes that nodes exchange are a promise, and what is no message is refused."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from kvist.native.answer import BLOCK, HIT, POSITION
from kvist.node.peers import messages as m
from kvist.node.peers.credentials import Credentials
from kvist.node.protocol import ProtocolError

GOLDEN = Path(__file__).parents[1] / "golden" / "peer_protocol_v2.json"
GOLDEN_ADDED = GOLDEN.with_name("peer_protocol_v3.json")
TOKEN = Credentials(b"t" * 32)
ALL: tuple[m.Message, ...] = (
    m.Hello(m.MAGIC, 2, 2, b"n" * 16, b"x" * 32),
    m.Refused("no"),
    m.Challenge(2, b"o" * 16, b"y" * 32, True),
    m.Proof(b"p" * 32),
    m.Want(bytes(32), "layout", 2000),
    m.Welcome(True),
    m.Have(bytes(32)),
    m.Read(bytes(32), 1.5),
    m.Held(b"\x01"),
    m.Offer("a", 7, 9, bytes(32), m.NO_PARENT, ("t",)),
    m.Taken(1),
)
_LOANS = (
    (bytes(32), m.Loan.LENT, 2**64 - 1, 2**63),
    (b"k" * 32, m.Loan.SURELY_NOT, 7, 9),
    (b"l" * 32, m.Loan.ASK, 0, 0),
    (b"m" * 32, m.Loan.MISS, 0, 0),
)
ADDED: tuple[m.Message, ...] = (
    m.Carry("nixl"),
    m.Carried(b"contact"),
    m.Lend(bytes(32), 1.5),
    m.Lent(True, b"".join(m.pack_loan(*loan) for loan in _LOANS)),
    m.Returned(),
)
_DECODERS = (m.HELLO, m.ANSWER, m.WANT, m.REQUEST, m.HELD, m.TAKEN, m.CARRIED, m.LENT)


def _decoded(body: bytes) -> m.Message:
    for decoder in _DECODERS:
        try:
            return m.decode(decoder, body)
        except ProtocolError:
            continue
    raise AssertionError("not a message")


def test_bytes_of_peer_protocol_2_are_what_they_were() -> None:
    golden = json.loads(GOLDEN.read_text())
    assert [(repr(x), m.encode(x).hex()) for x in ALL] == [tuple(x) for x in golden["messages"]]
    for message in ALL:
        assert _decoded(m.encode(message)[m.HEAD.size :]) == message
    assert BLOCK.pack(3, HIT, 2 << 20, 2**64 - 1, b"k" * 32).hex() == golden["block"]
    assert POSITION.pack(2**63, 5).hex() == golden["position"]
    proofs = (
        TOKEN.proof_of_reader(b"hello", b"challenge"),
        TOKEN.proof_of_owner(b"hello", b"challenge"),
    )
    assert [proof.hex() for proof in proofs] == golden["proofs"]


def test_bytes_that_peer_protocol_3_adds_are_what_they_were() -> None:
    golden = json.loads(GOLDEN_ADDED.read_text())
    assert [(repr(x), m.encode(x).hex()) for x in ADDED] == [tuple(x) for x in golden["messages"]]
    for message in ADDED:
        assert _decoded(m.encode(message)[m.HEAD.size :]) == message
    packed = bytes.fromhex(golden["loans"])
    assert packed == b"".join(m.pack_loan(*loan) for loan in _LOANS)
    found = m.unpack_loans(packed, [key for key, *_ in _LOANS])
    assert found == [tuple(rest) for _, *rest in _LOANS]


@pytest.mark.parametrize("spoil", ["cut", "key", "none", "more", "unknown"])
def test_loans_that_are_not_of_what_was_asked_for_are_refused(spoil: str) -> None:
    keys = [key for key, *_ in _LOANS]
    packed = b"".join(m.pack_loan(*loan) for loan in _LOANS)
    packed = {
        "cut": packed[:-1],
        "key": b"x" + packed[1:],
        "none": b"",
        "more": packed + packed[: m.LOAN.size],
        "unknown": m.LOAN.pack(keys[0], 4, 0, 0),
    }[spoil]
    with pytest.raises(ProtocolError):
        m.unpack_loans(packed, keys)


def test_every_message_between_nodes_has_golden_bytes() -> None:
    declared = {
        found
        for found in vars(m).values()
        if isinstance(found, type)
        and issubclass(found, msgspec.Struct)
        and found.__name__[0] != "_"
    }
    assert declared == {type(message) for message in (*ALL, *ADDED)}


def test_what_a_stranger_may_say_fits_in_few_hundred_bytes() -> None:
    assert m.MOST_STRANGER_BYTES <= 512
    for message in (*ALL[:4], m.refusal("é" * 10_000), ALL[5], ALL[-1]):
        assert len(m.encode(message)) - m.HEAD.size <= m.MOST_STRANGER_BYTES


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 4096])
def test_bits_come_back_as_they_were(count: int) -> None:
    flags = [i % 3 == 0 for i in range(count)]
    packed = m.pack_bits(flags)
    assert m.unpack_bits(packed, count) == flags
    with pytest.raises(ProtocolError):
        m.unpack_bits(packed + b"\0", count)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x93\x0b\xc4",
        msgspec.msgpack.encode([11, bytes(32), -1.0]),
        msgspec.msgpack.encode([11, bytes(32), float("nan")]),
        msgspec.msgpack.encode([11, bytes(32), 61.0]),
        msgspec.msgpack.encode([11, bytes(65 * 32), 1.0]),
        msgspec.msgpack.encode([10, bytes(32), 1]),
        msgspec.msgpack.encode([99, bytes(32)]),
    ],
)
def test_what_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        m.decode(m.REQUEST, body)
