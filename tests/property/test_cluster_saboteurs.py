"""The simulation can fail: each of these broken parts is caught by some seed, in words that fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import pytest

from kvist.cluster.follower import Follower, Progress
from kvist.cluster.log import EventLog, Sealed
from kvist.cluster.member import Member, Settings
from kvist.cluster.membership import Membership
from kvist.cluster.record import NodeRecord, NodeState
from kvist.cluster.replication import Offer, Replicator, Scene
from kvist.cluster.wire import Batch
from kvist.sim.cluster.parts import Parts, make_member
from kvist.sim.cluster.world import run_seed

SEEDS = range(12)
NODES = 20


class IgnoresGaps(Follower):
    """Applies whatever comes next, as if nothing could be lost."""

    def take(self, batch: Batch, now_s: float) -> Progress:
        restarted = batch.incarnation > self.incarnation
        if batch.incarnation < self.incarnation or (not restarted and batch.number <= self.last):
            return Progress(())
        self.incarnation, self.last = batch.incarnation, batch.number
        return Progress((batch,), restarted)


class ForgetsRestarts(Follower):
    """Takes a restarted node's numbers for old ones."""

    def take(self, batch: Batch, now_s: float) -> Progress:
        self.incarnation = self.incarnation or batch.incarnation
        return super().take(msgspec.structs.replace(batch, incarnation=self.incarnation), now_s)

    def expect(self, incarnation: int, newest: int, now_s: float) -> None:
        super().expect(self.incarnation or incarnation, newest, now_s)


class DumpsLate(EventLog):
    """Numbers its dumps one too high, as if the next batch were in them already."""

    def since(self, number: int, now_s: float) -> list[Sealed]:
        answer = super().since(number, now_s)
        oldest = self._buffer[0].number
        if answer and number < oldest:
            answer[0] = replace(answer[0], number=answer[0].number + 1)
        return answer


class ForgetsDrain(Membership):
    """Places new blocks on whoever is there."""

    def takers(self) -> list[NodeRecord]:
        return [replace_weight(r) for r in self.records() if not self.is_suspect(r.node)]


def replace_weight(record: NodeRecord) -> NodeRecord:
    return msgspec.structs.replace(record, weight=max(record.weight, 8), state=NodeState.ACTIVE)


class KeepsTheDead(Membership):
    """Never lets anybody go."""

    def tick(self, now_s: float) -> list[tuple[str, object]]:  # type: ignore[override]
        return []


class LooksOnce(Replicator):
    """Looks at new blocks only, so a copy that is lost stays lost."""

    def tick(self, now_s: float, scene: Scene, *, draining: bool) -> list[Offer]:
        return super().tick(now_s, scene, draining=draining) if self._fresh else []


class OneRack(Membership):
    """Takes every node for a failure domain of its own."""

    def heard(self, node: str) -> NodeRecord | None:
        record = super().heard(node)
        return msgspec.structs.replace(record, domain=node) if record is not None else None

    def takers(self) -> list[NodeRecord]:
        return [msgspec.structs.replace(r, domain=r.node) for r in super().takers()]


@dataclass(frozen=True)
class Saboteur:
    """A broken part, how it gets into a member, and what the simulation must say."""

    name: str
    install: Callable[[Member], None]
    says: str


def _followers(kind: type[Follower]) -> Callable[[Member], None]:
    def install(member: Member) -> None:
        directory = member.view.directory
        directory._follower = lambda node: kind(node, directory._patience)  # type: ignore[method-assign]

    return install


def _class_of(path: str, kind: type[object]) -> Callable[[Member], None]:
    def install(member: Member) -> None:
        target: object = member
        for name in path.split("."):
            target = getattr(target, name)
        target.__class__ = kind  # the same state, another conduct

    return install


def _one_rack(member: Member) -> None:
    member.view.membership.__class__ = OneRack
    member.replicator._domain = member.own.node


SABOTEURS = (
    Saboteur("ignores gaps", _followers(IgnoresGaps), "is wrong about"),
    Saboteur("forgets restarts", _followers(ForgetsRestarts), "is wrong about"),
    Saboteur("dumps late", _class_of("log", DumpsLate), "is wrong about"),
    Saboteur("forgets drain", _class_of("view.membership", ForgetsDrain), "which takes nothing"),
    Saboteur("keeps the dead", _class_of("view.membership", KeepsTheDead), "believes in"),
    Saboteur("looks once", _class_of("replicator", LooksOnce), "lack copies"),
    Saboteur("one rack", _one_rack, "lack copies"),
)


@pytest.mark.parametrize("saboteur", SABOTEURS, ids=lambda s: s.name)
def test_broken_part_is_caught_by_some_seed(saboteur: Saboteur) -> None:
    def member(record: NodeRecord, settings: Settings, now_s: float) -> Member:
        made = make_member(record, settings, now_s)
        saboteur.install(made)
        return made

    for seed in SEEDS:
        verdict = run_seed(seed, nodes=NODES, parts=Parts(member=member))
        if any(saboteur.says in violation for violation in verdict.violations):
            return
    pytest.fail(f"{saboteur.name} was caught by none of {len(SEEDS)} seeds")
