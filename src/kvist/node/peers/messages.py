"""What two nodes say to each other over TCP, and its bytes.

A message is its length (little-endian u32, itself not counted) and a MessagePack array
`[tag, field, ...]`. The node that reads blocks speaks first:

    reader                              owner
    Hello     versions, nonce      →
                                   ←    Challenge  version, nonce, whether a token is needed
    Proof     HMAC                 →               (`credentials.py`)
                                   ←    Proof      HMAC
    Want      keyspace, layout     →
                                   ←    Welcome
    Have      keys                 →
                                   ←    Held       a bit for each
    Read      keys                 →
                                   ←    for each key, in any order: a block header and the bytes
    Offer     keys                 →
                                   ←    Taken
    Carry     how                  →                                  (protocol 3)
                                   ←    Carried    how others read this node's memory
    Lend      keys                 →
                                   ←    Lent       for the first few keys: where the block lies
    Returned                       →

In place of any answer of the handshake there may be `Refused`, with the reason in words. `Hello`
and `Refused` keep their shape for ever, so that any two versions can at least refuse each other.
After the handshake one request is under way at a time on a connection; what breaks a rule ends it.

A block header (`kvist.native.answer`) is 56 bytes, little-endian: index in the request (u32), 1 for
a block and 0 for a miss (u32), bytes that follow (u64), their XXH3-64 (u64; 0 for a miss), and the
block's key: two sides that are out of step must not take one block for another. What follows a miss
is nothing, or, where the owner is in a cluster and has no such block, the place in its event stream
as of which that holds (`cluster.directory.Position`): incarnation and number, u64 each.

`Lend` is how blocks are read that travel another way (`carrying/`). A loan is `LOAN`, 52 bytes,
little-endian: the key, a `Loan` (u32) and two numbers (u64): of a block that is lent its address in
the memory of the owner's carrier and its XXH3-64, of one that is surely not there the position. The
owner holds on to what it lends until it hears anything else from that reader, which need not be
`Returned`; at the reader's deadline it takes it back and hangs up.

An `Offer` goes the other way than blocks do: who sends it has blocks that the other node should
fetch and keep.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from kvist.core.keys import KEY_BYTES, Key
from kvist.node.protocol import ProtocolError

MAGIC = "kvist-peer"
OLDEST_PROTOCOL = 2
NEWEST_PROTOCOL = 3
CARRYING_PROTOCOL = 3  # the first one with `Carry`
NONCE_BYTES = 32
MAC_BYTES = 32
NODE_BYTES = 16
MOST_HAVE_KEYS = 4096
MOST_READ_KEYS = 64
MOST_READ_S = 60.0
MOST_OFFER_KEYS = 64
MOST_TENANT = 256
MOST_REASON = 400
MOST_KIND = 32
MOST_CONTACT_BYTES = 48 << 10
MOST_LEND_KEYS = 16
MOST_STRANGER_BYTES = 512  # of a message before the credentials were proven
MOST_WANT_BYTES = 4 << 10
MOST_REQUEST_BYTES = MOST_HAVE_KEYS * KEY_BYTES + 64
HEAD = struct.Struct("<I")
LOAN = struct.Struct("<32sIQQ")
MOST_LENT_BYTES = MOST_LEND_KEYS * LOAN.size + 64
MOST_CARRIED_BYTES = MOST_CONTACT_BYTES + 64
NO_PARENT = bytes(KEY_BYTES)

_Number = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
_Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Node = Annotated[bytes, Meta(min_length=NODE_BYTES, max_length=NODE_BYTES)]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Common to all: an array whose first item is the tag."""


class Hello(_Message, frozen=True, tag=0):
    """A reader begins. `node` is a number that its process drew; an owner may find it its own."""

    magic: Annotated[str, Meta(max_length=32)]
    oldest: _Number
    newest: _Number
    node: _Node
    nonce: _Nonce


class Refused(_Message, frozen=True, tag=1):
    """The handshake failed, for a reason that a person can act on."""

    reason: Annotated[str, Meta(max_length=MOST_REASON)]


class Challenge(_Message, frozen=True, tag=2):
    """The owner's part of what both sides prove that they know the token for."""

    protocol: _Number
    node: _Node
    nonce: _Nonce
    token: bool


class Proof(_Message, frozen=True, tag=3):
    """An HMAC over both nonces; empty where no token is needed."""

    mac: Annotated[bytes, Meta(max_length=MAC_BYTES)]


class Want(_Message, frozen=True, tag=4):
    """The keyspace whose blocks are to be read, and what a block looks like."""

    fingerprint: Annotated[bytes, Meta(min_length=1, max_length=64)]
    layout: Annotated[str, Meta(max_length=2048)]
    block_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]


class Welcome(_Message, frozen=True, tag=5):
    """The handshake is over. `open`: whether the owner has a store of that keyspace now."""

    open: bool


class Have(_Message, frozen=True, tag=10):
    """→ Held."""

    keys: Annotated[bytes, Meta(max_length=MOST_HAVE_KEYS * KEY_BYTES)]


class Read(_Message, frozen=True, tag=11):
    """→ Block headers and blocks. After `deadline_s` the reader waits no longer."""

    keys: Annotated[bytes, Meta(max_length=MOST_READ_KEYS * KEY_BYTES)]
    deadline_s: Annotated[float, Meta(ge=0, le=MOST_READ_S)]


class Held(_Message, frozen=True, tag=12):
    """A bit for each key, the lowest bit of a byte first: whether it can be read now."""

    bits: Annotated[bytes, Meta(max_length=MOST_HAVE_KEYS // 8)]


class Offer(_Message, frozen=True, tag=13):
    """→ Taken. The node `source` has these blocks, as its events up to `number` say.

    One tenant stands for all; `NO_PARENT` for a first block's parent.
    """

    source: Annotated[str, Meta(min_length=1, max_length=128)]
    incarnation: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    number: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    keys: Annotated[bytes, Meta(max_length=MOST_OFFER_KEYS * KEY_BYTES)]
    parents: Annotated[bytes, Meta(max_length=MOST_OFFER_KEYS * KEY_BYTES)]
    tenants: Annotated[
        tuple[Annotated[str, Meta(max_length=MOST_TENANT)], ...], Meta(max_length=MOST_OFFER_KEYS)
    ]


class Taken(_Message, frozen=True, tag=14):
    """Of an offer, how many blocks will be fetched if nothing comes between."""

    count: Annotated[int, Meta(ge=0, le=MOST_OFFER_KEYS)]


class Carry(_Message, frozen=True, tag=15):
    """→ Carried. The reader could read blocks this way (`nixl`)."""

    kind: Annotated[str, Meta(min_length=1, max_length=MOST_KIND)]


class Carried(_Message, frozen=True, tag=16):
    """What a carrier needs to read from the owner's; empty: it cannot, now at least."""

    contact: Annotated[bytes, Meta(max_length=MOST_CONTACT_BYTES)]


class Lend(_Message, frozen=True, tag=17):
    """→ Lent. The reader reads for `deadline_s` at most."""

    keys: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=MOST_LEND_KEYS * KEY_BYTES)]
    deadline_s: Annotated[float, Meta(ge=0, le=MOST_READ_S)]


class Lent(_Message, frozen=True, tag=18):
    """Loans for the first keys, at least one. Not `current`: the reader must `Carry` anew."""

    current: bool
    loans: Annotated[bytes, Meta(max_length=MOST_LEND_KEYS * LOAN.size)]


class Returned(_Message, frozen=True, tag=19):
    """Nothing of what was lent is read any more. Has no answer."""


class Loan(IntEnum):
    """What an owner says of a block that it is asked to lend."""

    MISS = 0
    LENT = 1
    SURELY_NOT = 2
    """It has no such block as of a position."""
    ASK = 3
    """It cannot be lent now; a `Read` may bring it."""


Answer = Challenge | Refused | Proof | Welcome
Request = Have | Read | Offer | Carry | Lend | Returned
Message = Hello | Answer | Want | Request | Held | Taken | Carried | Lent
T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
HELLO = msgspec.msgpack.Decoder(Hello)
PROOF = msgspec.msgpack.Decoder(Proof)
WANT = msgspec.msgpack.Decoder(Want)
ANSWER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
REQUEST: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
HELD = msgspec.msgpack.Decoder(Held)
TAKEN = msgspec.msgpack.Decoder(Taken)
CARRIED = msgspec.msgpack.Decoder(Carried)
LENT = msgspec.msgpack.Decoder(Lent)


def refusal(reason: str) -> Refused:
    """`reason`, as much of it as a stranger's message may hold."""
    return Refused(reason.encode("ascii", "replace")[:MOST_REASON].decode())


def encode(message: Message) -> bytes:
    """A message with its length before it."""
    body = _encoder.encode(message)
    return HEAD.pack(len(body)) + body


def decode(decoder: msgspec.msgpack.Decoder[T], body: bytes | bytearray) -> T:
    """The message of a body.

    Raises:
        ProtocolError: it is none of those that `decoder` knows.
    """
    try:
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        raise ProtocolError(f"not a message: {error}") from error


def pack_bits(flags: Sequence[bool]) -> bytes:
    """Flags as bits, the lowest bit of a byte first."""
    packed = bytearray(-(-len(flags) // 8))
    for i, flag in enumerate(flags):
        packed[i >> 3] |= flag << (i & 7)
    return bytes(packed)


def unpack_bits(packed: bytes, count: int) -> list[bool]:
    """`count` flags.

    Raises:
        ProtocolError: there are more or fewer bytes than they take.
    """
    if len(packed) != -(-count // 8):
        raise ProtocolError(f"{len(packed)} bytes of flags for {count} keys")
    return [bool(packed[i >> 3] >> (i & 7) & 1) for i in range(count)]


def pack_loan(key: Key, loan: Loan, first: int = 0, second: int = 0) -> bytes:
    """What is said of one block, with its two numbers."""
    return LOAN.pack(key, loan, first, second)


def unpack_loans(packed: bytes, keys: Sequence[Key]) -> list[tuple[Loan, int, int]]:
    """What is said of the first of `keys`, each with its two numbers.

    Raises:
        ProtocolError: it is of other keys, of none, or nothing that can be said.
    """
    count = len(packed) // LOAN.size
    if len(packed) % LOAN.size or not 0 < count <= len(keys):
        raise ProtocolError(f"{len(packed)} bytes of loans for {len(keys)} keys")
    found = []
    for i in range(count):
        key, number, first, second = LOAN.unpack_from(packed, i * LOAN.size)
        try:
            loan = Loan(number)
        except ValueError as error:
            raise ProtocolError(f"loan {i} is none: {error}") from error
        if key != keys[i]:
            raise ProtocolError(f"loan {i} is not of the block that was asked for")
        found.append((loan, first, second))
    return found
