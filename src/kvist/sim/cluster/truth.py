"""Whether a cluster that has come to rest is as it should be."""

from __future__ import annotations

from collections.abc import Mapping

from kvist.cluster.placement import Placement
from kvist.cluster.record import NodeRecord, NodeState
from kvist.core.keys import Key
from kvist.core.outcome import Tier
from kvist.native.owner_twin import TAG_BYTES
from kvist.sim.cluster.node import Judge, SimNode

Contents = dict[str, dict[Key, frozenset[Tier]]]


def judge_rest(nodes: Mapping[str, SimNode], replicas: int, judge: Judge) -> None:
    """Compares what the running nodes believe with what is so."""
    running = {name: node for name, node in nodes.items() if node.member is not None}
    truth: Contents = {name: node.storage.tiers() for name, node in running.items()}
    whole: dict[bytes, dict[str, frozenset[Tier]]] = {}
    for name, blocks in truth.items():
        for key, tiers in blocks.items():
            whole.setdefault(key[:TAG_BYTES], {})[name] = tiers
    for node in running.values():
        _judge_members(node, set(running), judge)
        _judge_index(node, whole, judge)
        if node.waits:
            judge.violated(f"{node.name} still waits for a block")
    _judge_copies(running, truth, replicas, judge)


def _judge_members(node: SimNode, running: set[str], judge: Judge) -> None:
    assert node.member is not None
    members = node.member.view.membership
    known = {record.node for record in members.records()}
    if known != running:
        judge.violated(
            f"{node.name} believes in {sorted(known - running)} and not in "
            f"{sorted(running - known)}"
        )
    silent = [name for name in sorted(known & running) if members.is_suspect(name)]
    if silent:
        judge.violated(f"{node.name} suspects {silent}, which run")
    if node.state is NodeState.JOINING:
        judge.violated(f"{node.name} is still joining")


def _judge_index(
    node: SimNode, whole: dict[bytes, dict[str, frozenset[Tier]]], judge: Judge
) -> None:
    assert node.member is not None
    index = dict(node.member.view.directory.contents())
    for tag, holders in whole.items():
        believed = index.pop(tag, {})
        others = {name: tiers for name, tiers in holders.items() if name != node.name}
        if believed == others:
            continue
        judge.violated(f"{node.name} is wrong about {tag.hex()[:8]}: {_differs(believed, others)}")
        return
    if index:
        judge.violated(f"{node.name} believes in {len(index)} blocks that nobody has")


def _differs(
    believed: Mapping[str, frozenset[Tier]], holders: Mapping[str, frozenset[Tier]]
) -> str:
    found = []
    for name in sorted({*believed, *holders}):
        ours, truth = believed.get(name, frozenset()), holders.get(name, frozenset())
        if ours != truth:
            found.append(f"{name} has it in {_tiers(truth)}, not in {_tiers(ours)}")
    return "; ".join(found)


def _tiers(tiers: frozenset[Tier]) -> str:
    return "+".join(sorted(tier.value for tier in tiers)) or "none"


def _judge_copies(
    running: Mapping[str, SimNode], truth: Contents, replicas: int, judge: Judge
) -> None:
    """Every block is in enough domains, unless no node with room is in another one.

    What a full node takes in exchange is judged elsewhere: it takes hot blocks only, and few.
    """
    records: dict[str, NodeRecord] = {}
    for name, node in running.items():
        assert node.member is not None
        records[name] = node.member.own
    active = [r for r in records.values() if r.state is NodeState.ACTIVE and r.weight > 0]
    takers = [r for r in active if not r.full]
    placement = Placement(takers, replicas=replicas)
    holders: dict[Key, list[str]] = {}
    for name, blocks in truth.items():
        for key in blocks:
            holders.setdefault(key, []).append(name)
    short = 0
    for key, names in holders.items():
        staying = [n for n in names if records[n].state is not NodeState.DRAINING]
        domains = {records[n].failure_domain for n in staying}
        if placement.further(key, domains, without=frozenset(names)):
            short += 1
        judge.count("blocks")
    if short:
        judge.violated(f"{short} of {len(holders)} blocks lack copies")
    for name, node in running.items():
        assert node.member is not None
        if node.state is NodeState.DRAINING and takers and not node.member.drained:
            judge.violated(f"{name} is not drained: {node.member.replicator.alone} blocks alone")
