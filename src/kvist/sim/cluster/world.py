"""One run: nodes, wires and faults of a plan, to a verdict and the hash of its trace."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import xxhash

from kvist.cluster.directory import Limits
from kvist.cluster.discovery.memory import Board
from kvist.cluster.follower import Patience
from kvist.cluster.member import Settings
from kvist.cluster.membership import Timings
from kvist.cluster.replication import Pace
from kvist.core.keys import Key
from kvist.native import digest
from kvist.sim.cluster.network import CALM, Network
from kvist.sim.cluster.node import Judge, Shared, SimNode
from kvist.sim.cluster.parts import Parts
from kvist.sim.cluster.script import Fault, Plan, What, drawn_plan
from kvist.sim.cluster.storage import Storage
from kvist.sim.cluster.truth import judge_rest
from kvist.sim.des.kernel import Kernel

NODES = 50
_TICK_S = 0.5
_SLOW_TICKS = 6.0
_CHAINS = 80
_MOST_BLOCKS = 12  # of a chain
_READ_EVERY_S = 0.04
_WRITE_EVERY_S = 0.1
_DEPART_S = 8.0  # how long who departs waits to be drained
_REST_S = 20.0  # without a block on its way: a cluster has come to rest
_LATEST_REST_S = 600.0  # after the plan's end; full nodes exchange blocks, and must come to an end
_LAST_S = 2.0  # from the last look to the end


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a run. `trace`: equal for equal runs."""

    seed: int
    nodes: int
    violations: tuple[str, ...]
    counts: dict[str, int]
    trace: str

    @property
    def holds(self) -> bool:
        """Whether every promise was kept."""
        return not self.violations

    @property
    def command(self) -> str:
        """Repeats the run."""
        size = "" if self.nodes == NODES else f" --nodes {self.nodes}"
        return f"python -m kvist.sim.cluster --seed {self.seed}{size}"


def run_seed(seed: int, *, nodes: int = NODES, parts: Parts | None = None) -> Verdict:
    """Plays a seed to its end.

    Raises:
        ValueError: fewer than 3 nodes.
    """
    if nodes < 3:
        raise ValueError("a cluster has at least 3 nodes")
    world = World(seed, drawn_plan(seed, nodes), parts or Parts())
    return world.run()


class World:
    """A cluster under a plan."""

    def __init__(self, seed: int, plan: Plan, parts: Parts) -> None:
        self._seed = seed
        self._plan = plan
        self._kernel = Kernel(seed)
        self._network = Network(self._kernel.stream("network"), plan.weather)
        self._hash = xxhash.xxh3_128()
        self._judge = Judge(note=self._note)
        self._work = self._kernel.stream("work")
        self._chains = [_chain(seed, n) for n in range(_CHAINS)]
        self._written: list[Key] = []
        self._slow: dict[str, float] = {}
        self._end_s = plan.end_s
        shared = Shared(
            self._kernel,
            self._network,
            Board(),
            parts,
            _settings(plan),
            self._judge,
        )
        self.nodes = {name: self._made(name, shared) for name in plan.nodes}

    def run(self) -> Verdict:
        """Plays everything and judges the end."""
        plan, kernel = self._plan, self._kernel
        for fault in plan.faults:
            kernel.at(fault.time_s, partial(self._happen, fault))
        for name in self.nodes:
            kernel.at(self._work.uniform(0, _TICK_S), partial(self._tick, name))
        kernel.at(1.0, self._write)
        kernel.at(1.5, self._read)
        kernel.at(plan.faults_s, self._calm)
        kernel.at(plan.end_s - _LAST_S, self._rest)
        kernel.run()
        judge_rest(self.nodes, plan.replicas, self._judge)
        self._judge.counts["messages"] = self._network.sent
        return Verdict(
            self._seed,
            len(plan.nodes),
            tuple(self._judge.violations),
            dict(sorted(self._judge.counts.items())),
            self._hash.hexdigest(),
        )

    def _made(self, name: str, shared: Shared) -> SimNode:
        plan = self._plan
        storage = Storage(plan.dram_blocks[name], plan.ssd_blocks[name])
        node = SimNode(name, plan.domains[name], storage, shared)
        node.clock_off_ns = round(plan.clock_off_s[name] * 1e9)
        return node

    def _tick(self, name: str) -> None:
        now_s = self._kernel.now_s
        node = self.nodes[name]
        node.tick(now_s)
        pause_s = _TICK_S
        if now_s < self._slow.get(name, 0.0):
            pause_s *= _SLOW_TICKS
        if now_s + pause_s < self._end_s:
            self._kernel.after(pause_s, lambda: self._tick(name))

    def _happen(self, fault: Fault) -> None:
        now_s = self._kernel.now_s
        self._note("fault", now_s, fault.what.value, *fault.nodes)
        self._judge.count(f"faults.{fault.what.value}")
        if fault.what is What.CUT:
            side = frozenset(fault.nodes)
            self._network.cuts[2 * fault.number] = (side, frozenset(self.nodes) - side)
            if fault.number % 3:  # every third is cut one way only
                self._network.cuts[2 * fault.number + 1] = (frozenset(self.nodes) - side, side)
        elif fault.what is What.HEAL:
            self._network.cuts.pop(2 * fault.number, None)
            self._network.cuts.pop(2 * fault.number + 1, None)
        for name in fault.nodes:
            self._befall(self.nodes[name], fault, now_s)

    def _befall(self, node: SimNode, fault: Fault, now_s: float) -> None:
        if fault.what is What.START and node.member is None:
            node.start(now_s)
        if node.member is None:
            return
        if fault.what is What.CRASH:
            node.crash()
        elif fault.what in (What.DRAIN, What.DEPART):
            node.member.drain()
            if fault.what is What.DEPART:
                self._kernel.after(1.0, lambda: self._depart(node, node.starts, now_s + _DEPART_S))
        elif fault.what is What.SLOW:
            self._slow[node.name] = now_s + fault.for_s
        elif fault.what is What.CLEAR:
            node.storage.clear(node.member.record)
        elif fault.what is What.DEAF:
            node.hears_discovery = False
            self._kernel.after(fault.for_s, lambda: setattr(node, "hears_discovery", True))

    def _depart(self, node: SimNode, start: int, latest_s: float) -> None:
        now_s = self._kernel.now_s
        if node.member is None or node.starts != start:
            return
        if node.member.drained or now_s >= latest_s:
            self._judge.count("departed.drained" if node.member.drained else "departed.late")
            node.leave(now_s)
            return
        self._kernel.after(1.0, lambda: self._depart(node, start, latest_s))

    def _calm(self) -> None:
        self._network.weather = CALM
        self._network.cuts.clear()
        self._slow.clear()
        for node in self.nodes.values():
            node.hears_discovery = True
        settled_s = _settings(self._plan).timings.expire_s + 2.0
        self._kernel.after(settled_s, lambda: setattr(self._judge, "quiet", True))

    def _rest(self) -> None:
        """Puts the end off for as long as blocks still move."""
        now_s = self._kernel.now_s
        moved_s = max(node.moved_s for node in self.nodes.values())
        if now_s - moved_s >= _REST_S:
            return
        self._end_s = moved_s + _REST_S + _LAST_S + _TICK_S
        if self._end_s > self._plan.end_s + _LATEST_REST_S:
            self._judge.violated(f"blocks still moved at {moved_s:.0f} s")
            self._end_s = now_s
            return
        self._judge.count("rests.late")
        self._kernel.at(self._end_s - _LAST_S, self._rest)

    def _write(self) -> None:
        node = self._somebody()
        chain = self._work.choice(self._chains)
        part = chain[: self._work.randint(1, len(chain))]
        if node is not None:
            node.write(part)
            self._written += part
        if self._kernel.now_s < self._plan.faults_s:
            self._kernel.after(self._work.expovariate(1 / _WRITE_EVERY_S), self._write)

    def _read(self) -> None:
        node = self._somebody()
        if node is not None and self._written:
            node.read(self._work.choice(self._written), self._kernel.now_s)
        if self._kernel.now_s < self._plan.work_s:
            self._kernel.after(self._work.expovariate(1 / _READ_EVERY_S), self._read)

    def _somebody(self) -> SimNode | None:
        node = self.nodes[self._work.choice(self._plan.nodes)]
        return node if node.member is not None else None

    def _note(self, *what: object) -> None:
        for item in what:
            self._hash.update(item if isinstance(item, bytes) else repr(item).encode())


def _settings(plan: Plan) -> Settings:
    return Settings(
        block_tokens=16,
        replicas=plan.replicas,
        slow_start_s=4.0,
        join_s=6.0,
        most_batches=plan.most_batches,
        timings=Timings(beat_s=3.0, suspect_s=7.0, expire_s=11.0, forget_s=60.0),
        limits=Limits(most_keys=1 << 14, patience=Patience(0.3, 0.6, 3.0, most_held=16)),
        pace=Pace(12, 16, fetch_s=3.0, again_s=8.0, exchange_divisor=16, exchange_s=8.0),
    )


def _chain(seed: int, number: int) -> list[Key]:
    """Blocks of one of many prompts; prompts of one family begin alike."""
    family, keys = number % 7, list[Key]()
    shared = 1 + number % 5
    for n in range(2 + (number * 5) % (_MOST_BLOCKS - 1)):
        who = family if n < shared else 1000 + number
        keys.append(digest(b"%d %d %d" % (seed, who, n) + (keys[-1] if keys else b"")))
    return keys
