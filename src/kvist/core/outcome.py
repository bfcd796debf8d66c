"""What the store answers: outcomes, tiers, matches and the names of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvist.core.keys import Key


class Outcome(Enum):
    """What became of one block of a read lease."""

    PENDING = "pending"
    HIT = "hit"
    MISS = "miss"


class Tier(Enum):
    """A bounded pool on one medium, fastest first."""

    HBM = "hbm"
    DRAM = "dram"
    SSD = "ssd"
    PEER = "peer"
    REMOTE = "remote"

    __hash__ = (
        object.__hash__
    )  # members are singletons; Enum's own hash is slow, and events are many


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A block to be written: its key and its parent's (`None` for a first block).

    `tenant` is whose share of DRAM it takes; it is no part of the key.
    """

    key: Key
    parent: Key | None
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class ReadTotals:
    """What has been read from a tier so far.

    `busy_s` counts the time in which at least one read was under way, up to now: over an interval,
    bytes by busy seconds is the bandwidth that readers together get.
    """

    size_bytes: int = 0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Match:
    """The longest run of present blocks from the start; `tiers[i]` is where block i is."""

    tiers: tuple[Tier, ...]

    def __len__(self) -> int:
        return len(self.tiers)
