"""What simulated nodes send each other besides event batches."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.cluster.directory import Position
from kvist.cluster.follower import Ask
from kvist.cluster.replication import Offer
from kvist.cluster.wire import Batch
from kvist.core.keys import Key


@dataclass(frozen=True, slots=True)
class Asked:
    """A reader's ask, and where to send the answer."""

    ask: Ask
    reader: str


@dataclass(frozen=True, slots=True)
class Fetch:
    """A block is wanted."""

    key: Key
    reader: str
    number: int


@dataclass(frozen=True, slots=True)
class Found:
    """It is here."""

    number: int
    key: Key
    parent: Key | None
    content: bytes


@dataclass(frozen=True, slots=True)
class Missing:
    """It is not here, as of `at`."""

    number: int
    node: str
    at: Position


Message = Batch | Asked | Fetch | Found | Missing | Offer
