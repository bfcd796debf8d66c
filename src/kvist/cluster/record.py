"""What a node says of itself: the record that travels in its event batches and in discovery."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import msgspec
from msgspec import Meta

from kvist.core.errors import FormatError, VersionError
from kvist.core.outcome import Tier

FULL_DIVISOR = 16  # a tier with less than this part free is full
RECORD_VERSION = 1
MOST_RECORD_BYTES = 8192

Name = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^@\s/]+$")]
Place = Annotated[str, Meta(max_length=512)]
Fingerprint = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class NodeState(Enum):
    """What a node is willing to do."""

    JOINING = "joining"  # serves what it has, takes no replicas yet
    ACTIVE = "active"
    DRAINING = "draining"  # serves what it has, takes nothing new, gives its blocks away
    LEFT = "left"  # its last word


class TierSpace(msgspec.Struct, frozen=True, gc=False):
    """Bytes of one tier of a node."""

    tier: Annotated[str, Meta(max_length=16)]
    used_bytes: Count
    capacity_bytes: Count


class Holds(msgspec.Struct, frozen=True, gc=False):
    """Whose blocks a node has: the fingerprints of its open keyspaces, in hexadecimal."""

    block_tokens: Annotated[int, Meta(ge=1, le=1 << 20)]
    keyspaces: Annotated[tuple[Fingerprint, ...], Meta(max_length=64)]


class NodeRecord(msgspec.Struct, frozen=True, gc=False):
    """One node as it was when it wrote this.

    Of two records the one with the higher (`incarnation`, `version`) is the newer. The incarnation
    grows with each start of the node, the version with each record of a start.

    Attributes:
        domain: what fails together with this node: a rack, a host; its own name if empty.
        events: where it publishes its events; `replay`: where it answers asks about them.
        newest: the number of its newest batch of events, so that lost ones are missed.
        blocks: where it serves blocks.
        weight: share of the replicas that it offers to take (`placement.own_weight`); 0: none.
        free_bytes: what it could take now; of a `full` node, in exchange for what it has.
        group_blocks: cut of the prefix groups (`placement.group_keys`); equal in a whole cluster.
        holds: whose blocks it has; not written where there are none.
    """

    node: Name
    incarnation: Count
    version: Count
    state: NodeState
    domain: Place = ""
    events: Place = ""
    replay: Place = ""
    newest: Count = 0
    blocks: Place = ""
    weight: Count = 0
    free_bytes: Count = 0
    tiers: Annotated[tuple[TierSpace, ...], Meta(max_length=8)] = ()
    group_blocks: Annotated[int, Meta(ge=1, le=1 << 16)] = 16
    format: Count = RECORD_VERSION
    holds: Holds | msgspec.UnsetType = msgspec.UNSET

    @property
    def age(self) -> tuple[int, int]:
        """Orders the records of one node."""
        return self.incarnation, self.version

    @property
    def lasting(self) -> TierSpace | None:
        """The tier in which copies stay: the SSD, or DRAM where there is none."""
        tiers = {space.tier: space for space in self.tiers}
        return tiers.get(Tier.SSD.value) or tiers.get(Tier.DRAM.value)

    @property
    def full(self) -> bool:
        """Whether what it takes pushes out what it has, so that it should get hot blocks only.

        A log counts as full before it is, since it reclaims its space in large parts.
        """
        space = self.lasting
        if space is None:
            return False
        return FULL_DIVISOR * (space.capacity_bytes - space.used_bytes) < space.capacity_bytes

    @property
    def failure_domain(self) -> str:
        """The domain, never empty."""
        return self.domain or self.node


_decoder = msgspec.json.Decoder(NodeRecord)
_version_decoder = msgspec.json.Decoder(dict[str, object])


def encode_record(record: NodeRecord) -> bytes:
    """One line of JSON, so that an operator can read what discovery holds."""
    return msgspec.json.encode(record)


def decode_record(data: bytes) -> NodeRecord:
    """The inverse of `encode_record`.

    Raises:
        FormatError: no record, or (`VersionError`) one of a newer Kvist.
    """
    if len(data) > MOST_RECORD_BYTES:
        raise FormatError(f"a node record of {len(data)} bytes")
    try:
        found = _version_decoder.decode(data).get("format", RECORD_VERSION)
        if found != RECORD_VERSION:
            raise VersionError(f"a node record of format {found}")
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"not a node record: {error}") from error


def next_incarnation(now_ns: int, *former: int) -> int:
    """The incarnation of a start at the wall-clock time `now_ns`, above all known former ones.

    Former ones stand in discovery and on the node's disk; they count where a clock was set back.
    """
    return max(1, now_ns, *(incarnation + 1 for incarnation in former))
