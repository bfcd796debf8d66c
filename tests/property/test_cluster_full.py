"""Clusters whose stores are full: hot blocks get their copies, in exchange for cold ones that are
held twice, and exchanges come to an end."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvist.cluster.record import NodeState
from kvist.core.keys import Key
from kvist.native import digest
from kvist.sim.cluster.network import CALM
from kvist.sim.cluster.node import SimNode
from kvist.sim.cluster.parts import Parts
from kvist.sim.cluster.script import Fault, Plan, What
from kvist.sim.cluster.storage import content_of
from kvist.sim.cluster.world import World

NODES = tuple(f"n{i}" for i in range(6))
BLOCKS = 160  # of a node
DEAD = "n5"
CRASH_S = 12.0


def plan(*, crash: bool) -> Plan:
    faults = [Fault(0.1, What.START, (name,)) for name in NODES]
    if crash:
        faults.append(Fault(CRASH_S, What.CRASH, (DEAD,)))
    return Plan(
        NODES,
        dict.fromkeys(NODES, ""),
        dict.fromkeys(NODES, BLOCKS // 4),
        dict.fromkeys(NODES, BLOCKS - BLOCKS // 4),
        dict.fromkeys(NODES, 0.0),
        tuple(faults),
        CALM,
        most_batches=1000,
        replicas=2,
        faults_s=18.0,
        work_s=22.0,
        end_s=200.0,
    )


def cold(number: int) -> Key:
    return digest(b"cold %d" % number)


def fill(node: SimNode, numbers: Iterable[int]) -> None:
    for n in numbers:
        node.storage.put(cold(n), None, content_of(cold(n)), lambda event: None)


def full_world(seed: int, *, twice: bool, crash: bool = False) -> World:
    """Nodes that begin full of blocks of old, each of which two nodes have (`twice`), or one."""
    world = World(seed, plan(crash=crash), Parts())
    for i, node in enumerate(world.nodes.values()):
        first = (i // 2 if twice else i) * BLOCKS
        fill(node, range(first, first + BLOCKS))
        assert node.storage.free_blocks == 0
    return world


def copies(world: World, keys: Iterable[Key]) -> list[int]:
    nodes = [node for node in world.nodes.values() if node.state is not NodeState.LEFT]
    return [sum(key in node.storage for node in nodes) for key in keys]


def hot(world: World) -> list[Key]:
    """What was written while the cluster ran, and is still somewhere."""
    return [key for key in dict.fromkeys(world._written) if copies(world, [key]) != [0]]


@pytest.mark.parametrize("seed", range(3))
def test_hot_blocks_get_their_copies_where_logs_are_full_of_what_others_have(seed: int) -> None:
    world = full_world(seed, twice=True)
    verdict = world.run()
    assert verdict.holds, verdict.violations
    found = copies(world, hot(world))
    assert sum(n >= 2 for n in found) > 0.9 * len(found) > 0
    assert verdict.counts["exchanges"] > 0


@pytest.mark.parametrize("seed", range(3))
def test_last_copies_are_not_given_up_for_second_ones(seed: int) -> None:
    world = full_world(seed, twice=False)
    verdict = world.run()
    assert verdict.holds, verdict.violations
    lost = copies(world, map(cold, range(len(NODES) * BLOCKS))).count(0)
    written = sum(copies(world, hot(world)))
    assert lost <= written  # room for what engines wrote and read, and for nothing else
    assert verdict.counts.get("exchanges", 0) <= 0.1 * written


@pytest.mark.parametrize("seed", range(2))
def test_exchanges_are_few_and_come_to_an_end(seed: int) -> None:
    """A node is lost, and with it a copy of many blocks; the others are full."""
    world = full_world(seed, twice=True, crash=True)
    late: list[tuple[float, int]] = []
    note = world._note

    def noted(*what: object) -> None:
        note(*what)
        if what[0] == "offer":
            late.append((float(str(what[1])), int(str(what[4]))))

    world._judge.note = noted
    verdict = world.run()
    assert verdict.holds, verdict.violations
    # each node takes a sixteenth of its blocks at once, and as much in eight seconds
    most = len(NODES) * BLOCKS / 16 * (1 + 200 / 8)
    assert 0 < verdict.counts["exchanges"] <= most + len(NODES)
    survivors = [n for name, n in world.nodes.items() if name != DEAD]
    assert all(node.storage.free_blocks <= 1 for node in survivors)
