"""What a node and its carrier say to each other: a message is one packet of a Unix socket.

node                         carrier
                        ←    Ready      where the memory lies, how others reach this agent
Meet      another agent →
Fetch     pieces        →
                        ←    Fetched    or why not
Attend    more or less  →
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from kvist.node.peers.messages import MOST_CONTACT_BYTES

MOST_PACKET_BYTES = 64 << 10
MOST_PIECES = 64
MOST_WHY = 400


class _Word(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Common to all: an array whose first item is the tag."""


class Ready(_Word, frozen=True, tag=0):
    """The memory can be read by others, and read into. Empty `agent`: it cannot, for `why`."""

    address: int
    agent: Annotated[bytes, Meta(max_length=MOST_CONTACT_BYTES)]
    why: Annotated[str, Meta(max_length=MOST_WHY)] = ""


class Meet(_Word, frozen=True, tag=1):
    """Another agent, which orders call by a number from here on; empty: not any more."""

    peer: int
    agent: Annotated[bytes, Meta(max_length=MOST_CONTACT_BYTES)]


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Bytes at an address of the other agent, and the place in our memory for them."""

    remote: int
    offset: int
    size_bytes: int


class Fetch(_Word, frozen=True, tag=2):
    """→ Fetched, once nothing more of it comes."""

    number: int
    peer: int
    pieces: Annotated[tuple[Piece, ...], Meta(max_length=MOST_PIECES)]


class Fetched(_Word, frozen=True, tag=3):
    """The pieces are there, or `why` not; then something may still come, if it had `begun`."""

    number: int
    why: Annotated[str, Meta(max_length=MOST_WHY)] = ""
    begun: bool = True


class Attend(_Word, frozen=True, tag=4):
    """So many more readers than before (or fewer) read from here: be quick, or need not be."""

    more: int


Order = Meet | Fetch | Attend
Report = Ready | Fetched
T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
ORDER: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
REPORT: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def packet(word: Order | Report) -> bytes:
    """A message as a packet."""
    return _encoder.encode(word)


def short(why: object) -> str:
    """A reason on one line, as much of it as a message holds."""
    return " ".join(str(why).split())[:MOST_WHY]
