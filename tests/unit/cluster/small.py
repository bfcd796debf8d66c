"""Keys, records and messages for tests of the cluster's decisions."""

from __future__ import annotations

from collections.abc import Sequence

from kvist.cluster.log import EventLog, Sealed
from kvist.cluster.record import NodeRecord, NodeState, TierSpace
from kvist.cluster.wire import NUMBER_BYTES, Batch, decode_message, topic_of
from kvist.core.events import KvEvent, Stored
from kvist.core.keys import Key
from kvist.core.outcome import Tier
from kvist.native import digest


def key(n: int) -> Key:
    return digest(b"%d" % n)


def chain(who: int, length: int) -> list[Key]:
    return [digest(b"%d %d" % (who, n)) for n in range(length)]


def stored(*numbers: int, tier: Tier = Tier.DRAM, parent: int | None = None) -> Stored:
    above = key(parent) if parent is not None else None
    return Stored(tuple(key(n) for n in numbers), above, tier)


def record(
    node: str,
    *,
    incarnation: int = 1,
    version: int = 1,
    state: NodeState = NodeState.ACTIVE,
    domain: str = "",
    weight: int = 8,
    full: bool = False,
) -> NodeRecord:
    return NodeRecord(
        node,
        incarnation=incarnation,
        version=version,
        state=state,
        domain=domain,
        weight=weight,
        group_blocks=4,
        tiers=(TierSpace("ssd", 1000 if full else 0, 1000),),
    )


def received(sealed: Sealed, node: str = "a", incarnation: int = 1) -> Batch:
    """A sealed batch as a reader gets it."""
    number = sealed.number.to_bytes(NUMBER_BYTES, "big")
    return decode_message(topic_of(node, incarnation), number, sealed.payload, source="")


def batches(
    log: EventLog, steps: Sequence[Sequence[KvEvent]], node: str = "a", incarnation: int = 1
) -> list[Batch]:
    """One batch for each step."""
    found = []
    for step in steps:
        for event in step:
            log.record(event)
        found.append(received(log.seal(0.0), node, incarnation))
    return found
