"""What an engine and its node say to each other. Only control crosses the socket, never KV.

A message is its length (little-endian u32, itself not counted) and a MessagePack array
`[tag, field, ...]`. The first message of a connection is a `Hello` or a `Control`; these two keep
their shape for ever, so that any two versions can at least refuse each other in words. What follows
is in the protocol that the node chose from the range that both speak.

Requests that carry an `id` get exactly one reply with it, in any order; `Release` and `Ended` get
none. A node speaks unasked in `Settled` (blocks of a read lease were decided), `Events` and
`Goodbye`. Keys travel as one string of 32 bytes each, slots as little-endian u32, outcomes and
tiers as one byte a block. Every field has a bound, and so has a message: what exceeds one ends the
connection.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvist.core.keys import KEY_BYTES
from kvist.core.outcome import Outcome, Tier

MAGIC = "kvist"
OLDEST_PROTOCOL = 1
NEWEST_PROTOCOL = 2  # it has `cache/messages.py`; an engine's messages are those of 1
MOST_KEYS = 1 << 16  # a million tokens in blocks of 16
NO_SLOT = 0xFFFFFFFF
_MOST_S = 86_400.0

OUTCOMES = (Outcome.MISS, Outcome.HIT, Outcome.PENDING)  # by code
MISS, HIT, PENDING = range(3)
CODE_OF = {outcome: code for code, outcome in enumerate(OUTCOMES)}
TIERS = (Tier.HBM, Tier.DRAM, Tier.SSD, Tier.REMOTE, Tier.PEER)  # by code
TIER_CODE = {tier: code for code, tier in enumerate(TIERS)}

Number = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
Seconds = Annotated[float, Meta(ge=0, le=_MOST_S)]
Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=2048)]
Keys = Annotated[bytes, Meta(max_length=MOST_KEYS * KEY_BYTES)]
Codes = Annotated[bytes, Meta(max_length=MOST_KEYS)]
Slots = Annotated[bytes, Meta(max_length=MOST_KEYS * 4)]
Numbers = Annotated[tuple[Number, ...], Meta(max_length=MOST_KEYS)]
Names = Annotated[tuple[Name, ...], Meta(max_length=MOST_KEYS)]
Checksum = Annotated[int, Meta(ge=0)]  # the session checks that it has 64 bits
Total = Annotated[int, Meta(ge=0)]
Checksums = Annotated[tuple[Checksum | None, ...], Meta(max_length=MOST_KEYS)]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Common to all: an array whose first item is the tag."""


# -- the first message ----------------------------------------------------------------------


class Hello(_Message, frozen=True, tag=0):
    """An engine wants the store of its keyspace. `layout` says in words what a block looks like."""

    magic: Name
    oldest: Number
    newest: Number
    pid: Number
    name: Name
    fingerprint: Annotated[bytes, Meta(min_length=1, max_length=64)]
    layout: Text
    block_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]
    wants_events: bool


class Control(_Message, frozen=True, tag=1):
    """A question to the node itself: `status`, `check`, `drain` or `cache`; a `Report` answers it.

    After `cache`, requests of `cache/messages.py` may follow.
    """

    magic: Name
    oldest: Number
    newest: Number
    what: Name


# -- requests -------------------------------------------------------------------------------


class Match(_Message, frozen=True, tag=10):
    """→ Matched."""

    id: Number
    keys: Keys


class Read(_Message, frozen=True, tag=11):
    """→ Leased, or Failed."""

    id: Number
    keys: Keys
    deadline_s: Seconds
    tenant: Name


class Write(_Message, frozen=True, tag=12):
    """→ Reserved, or Failed. `roots` are the blocks without a parent; one tenant stands for all."""

    id: Number
    keys: Keys
    parents: Keys
    roots: Numbers
    tenants: Names


class Commit(_Message, frozen=True, tag=13):
    """→ Committed, or Failed."""

    id: Number
    lease: Number
    blocks: Numbers
    checksums: Checksums


class Release(_Message, frozen=True, tag=14):
    """Gives a lease back."""

    lease: Number


class Prefetch(_Message, frozen=True, tag=15):
    """→ Count."""

    id: Number
    keys: Keys
    deadline_s: Seconds
    tenant: Name


class Ended(_Message, frozen=True, tag=16):
    """How a request ended."""

    keys: Keys
    finish: Annotated[int, Meta(ge=0, le=255)]
    output_tokens: Number | None
    partial: Annotated[bytes, Meta(max_length=KEY_BYTES)] | None


class Room(_Message, frozen=True, tag=17):
    """→ Count."""

    id: Number
    tenant: Name


class Totals(_Message, frozen=True, tag=18):
    """→ Read totals of each tier."""

    id: Number


class Evict(_Message, frozen=True, tag=19):
    """→ Count, or Failed."""

    id: Number
    keys: Keys


class Clear(_Message, frozen=True, tag=20):
    """→ Count (of nothing), or Failed."""

    id: Number


class Flush(_Message, frozen=True, tag=21):
    """→ Count: 1 if every committed block is durable."""

    id: Number
    deadline_s: Seconds


class Stats(_Message, frozen=True, tag=22):
    """→ Shown: the store's statistics as JSON."""

    id: Number


# -- replies --------------------------------------------------------------------------------


class Welcome(_Message, frozen=True, tag=40):
    """The handshake is over. The arena's memfd and the life pipe come with these bytes."""

    protocol: Number
    pid: Number
    session: Number
    size_bytes: Annotated[int, Meta(ge=1, le=1 << 50)]
    slot_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]
    block_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]


class Refused(_Message, frozen=True, tag=41):
    """The handshake failed, for a reason that a person can act on."""

    reason: Text
    for_good: bool


class Report(_Message, frozen=True, tag=42):
    """Answers a `Control`: JSON."""

    text: Annotated[str, Meta(max_length=1 << 20)]


class Matched(_Message, frozen=True, tag=50):
    """Tiers of the run, one code a block."""

    id: Number
    tiers: Codes


class Leased(_Message, frozen=True, tag=51):
    """A read lease: outcomes and slots of its blocks now."""

    id: Number
    lease: Number
    outcomes: Codes
    slots: Slots


class Settled(_Message, frozen=True, tag=52):
    """Blocks of a read lease that are pending no more."""

    lease: Number
    blocks: Numbers
    outcomes: Codes
    slots: Slots


class Reserved(_Message, frozen=True, tag=53):
    """A write lease; a block without a slot was present."""

    id: Number
    lease: Number
    slots: Slots


class Committed(_Message, frozen=True, tag=54):
    """For each block one byte: 1 if it was committed, 0 if another writer was first."""

    id: Number
    done: Codes


class Count(_Message, frozen=True, tag=55):
    """A number."""

    id: Number
    count: Number


class TierTotals(_Message, frozen=True, tag=56):
    """What was read from each tier, as (code, bytes, busy seconds)."""

    id: Number
    tiers: Annotated[tuple[tuple[Number, Total, float], ...], Meta(max_length=8)]


class Shown(_Message, frozen=True, tag=57):
    """JSON."""

    id: Number
    text: Annotated[str, Meta(max_length=1 << 16)]


class Failed(_Message, frozen=True, tag=58):
    """The store refused; `error` is the name of one of `core/errors.py`."""

    id: Number
    error: Name
    text: Text


class Events(_Message, frozen=True, tag=59):
    """One KV event: `kind` is `stored`, `removed` or `cleared`; `parent` may be empty."""

    kind: Name
    keys: Keys
    parent: Annotated[bytes, Meta(max_length=KEY_BYTES)]
    tier: Number


class Goodbye(_Message, frozen=True, tag=60):
    """The node ends the connection, and grants nothing any more."""

    reason: Text


First = Hello | Control
Request = (
    Match
    | Read
    | Write
    | Commit
    | Release
    | Prefetch
    | Ended
    | Room
    | Totals
    | Evict
    | Clear
    | Flush
    | Stats
)
Reply = (
    Welcome
    | Refused
    | Report
    | Matched
    | Leased
    | Settled
    | Reserved
    | Committed
    | Count
    | TierTotals
    | Shown
    | Failed
    | Events
    | Goodbye
)
Message = First | Request | Reply
