"""Who is in the cluster, and who may be believed to be alive.

Each node tells about itself in records (`record.py`); the newest by (incarnation, version) counts.
A node is as alive as its records are fresh on *this* reader's clock: clocks of hosts are not
compared.

    heard of         ──suspect_s of silence──►  suspect: read last, placed on no more
    suspect          ──expire_s of silence───►  gone: its blocks are nobody's, its records are void
    suspect or gone  ──a newer record────────►  alive again
    says LEFT                                   gone at once

What is gone is remembered for `forget_s`, so that late copies of old records do not bring it back.
A record of incarnation 0 is somebody else's word for a node that says nothing (a stock engine): it
never ages, and goes when it is no longer vouched for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from kvist.cluster.record import NodeRecord, NodeState

MOST_MEMBERS = 1024


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. A node sends a record each `beat_s`, at most."""

    beat_s: float = 1.0
    suspect_s: float = 4.0
    expire_s: float = 10.0
    forget_s: float = 600.0


class Change(Enum):
    """What became of a member."""

    JOINED = "joined"
    RESTARTED = "restarted"  # gone and joined at once
    CHANGED = "changed"
    SUSPECTED = "suspected"
    RECOVERED = "recovered"
    GONE = "gone"


@dataclass(slots=True)
class _Member:
    record: NodeRecord
    heard_s: float
    suspect: bool = False


class Membership:
    """One reader's view of the nodes. Time is passed in and never goes back."""

    def __init__(self, timings: Timings | None = None) -> None:
        self._timings = timings or Timings()
        self._members: dict[str, _Member] = {}
        self._gone: dict[str, tuple[tuple[int, int], float]] = {}  # age of its last record, when
        self._look_s = -math.inf
        self.version = 0  # moves with everything that placement or reads depend on
        self.refused = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, node: object) -> bool:
        return node in self._members

    def hear(self, record: NodeRecord, now_s: float) -> Change | None:
        """Takes a record; `None` if it says nothing new."""
        member = self._members.get(record.node)
        if member is None:
            return self._join(record, now_s)
        before = member.record
        if record.age <= before.age:
            return None
        if record.state is NodeState.LEFT:
            self._bury(record, now_s)
            return Change.GONE
        member.record, member.heard_s = record, now_s
        recovered, member.suspect = member.suspect, False
        if record.incarnation > before.incarnation:
            self.version += 1
            return Change.RESTARTED
        if recovered or _placing(record) != _placing(before):
            self.version += 1
            return Change.RECOVERED if recovered else Change.CHANGED
        return None

    def vouched(self, nodes: Iterable[str], now_s: float) -> list[str]:
        """Drops members of incarnation 0 that are not among `nodes`; returns them."""
        listed = set(nodes)
        lost = [
            n for n, m in self._members.items() if m.record.incarnation == 0 and n not in listed
        ]
        for node in lost:
            self._bury(self._members[node].record, now_s)
            self._gone.pop(node, None)
        return lost

    def tick(self, now_s: float) -> list[tuple[str, Change]]:
        """What silence has changed by now."""
        if now_s < self._look_s:
            return []
        times, changes = self._timings, []
        next_s = now_s + times.suspect_s
        for node, member in list(self._members.items()):
            if member.record.incarnation == 0:
                continue
            silent_s = now_s - member.heard_s
            if silent_s >= times.expire_s:
                self._bury(member.record, now_s)
                changes.append((node, Change.GONE))
                continue
            if silent_s >= times.suspect_s and not member.suspect:
                member.suspect = True
                self.version += 1
                changes.append((node, Change.SUSPECTED))
            limit_s = times.expire_s if member.suspect else times.suspect_s
            next_s = min(next_s, member.heard_s + limit_s)
        for node, (_, gone_s) in list(self._gone.items()):
            if now_s - gone_s >= times.forget_s:
                del self._gone[node]
        self._look_s = next_s
        return changes

    def get(self, node: str) -> NodeRecord | None:
        """The newest record of a member."""
        member = self._members.get(node)
        return member.record if member is not None else None

    def heard(self, node: str) -> NodeRecord | None:
        """The newest record of a member that is not suspect."""
        member = self._members.get(node)
        return member.record if member is not None and not member.suspect else None

    def records(self) -> list[NodeRecord]:
        """The newest record of every member, suspects too, in the order in which they came."""
        return [member.record for member in self._members.values()]

    def is_suspect(self, node: str) -> bool:
        """Whether a node is silent for longer than it should be; true for one that is unknown."""
        member = self._members.get(node)
        return member is None or member.suspect

    def takers(self) -> list[NodeRecord]:
        """Nodes that new blocks may be placed on: active, heard of lately, with room to offer."""
        return [
            m.record
            for m in self._members.values()
            if m.record.state is NodeState.ACTIVE and m.record.weight > 0 and not m.suspect
        ]

    def _join(self, record: NodeRecord, now_s: float) -> Change | None:
        buried = self._gone.get(record.node)
        if buried is not None and record.age <= buried[0]:
            return None
        if record.state is NodeState.LEFT:
            self._remember(record, now_s)
            return None
        if len(self._members) >= MOST_MEMBERS:
            self.refused += 1
            return None
        self._gone.pop(record.node, None)
        self._members[record.node] = _Member(record, now_s)
        self._look_s = min(self._look_s, now_s + self._timings.suspect_s)
        self.version += 1
        return Change.JOINED

    def _bury(self, record: NodeRecord, now_s: float) -> None:
        del self._members[record.node]
        self._remember(record, now_s)
        self.version += 1

    def _remember(self, record: NodeRecord, now_s: float) -> None:
        self._gone[record.node] = (record.age, now_s)
        if len(self._gone) > MOST_MEMBERS:
            del self._gone[next(iter(self._gone))]


def _placing(record: NodeRecord) -> tuple[object, ...]:
    return record.state, record.weight, record.domain, record.group_blocks, record.full
