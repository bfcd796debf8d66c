"""Which production code a simulated node is made of; tests put broken parts in their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvist.cluster.directory import Directory
from kvist.cluster.member import Member, Settings
from kvist.cluster.record import NodeRecord
from kvist.cluster.view import ClusterView


def make_member(record: NodeRecord, settings: Settings, now_s: float) -> Member:
    """A member as nodes run it."""
    view = ClusterView(
        own=record.node,
        replicas=settings.replicas,
        timings=settings.timings,
        directory=Directory(settings.limits),
    )
    return Member(record, settings, now_s, view=view)


@dataclass(frozen=True, slots=True)
class Parts:
    """How to make a node's member."""

    member: Callable[[NodeRecord, Settings, float], Member] = make_member
