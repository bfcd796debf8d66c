"""What happens to a simulated cluster, drawn from a seed: work, faults, and then quiet.

0 ........ joined_s ............ faults_s .................... end_s
nodes join | work and faults     | healed: work goes on a while, then quiet
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

from kvist.sim.cluster.network import Weather


class What(Enum):
    """What can happen to nodes."""

    START = "start"
    CRASH = "crash"
    DRAIN = "drain"  # and stays
    DEPART = "depart"  # drains, and goes when that is done
    CUT = "cut"
    HEAL = "heal"
    CLEAR = "clear"
    SLOW = "slow"
    DEAF = "deaf"  # discovery cannot be reached


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens at a time. `number`: of the cut that heals."""

    time_s: float
    what: What
    nodes: tuple[str, ...]
    number: int = 0
    for_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """One run, before it begins."""

    nodes: tuple[str, ...]
    domains: dict[str, str]
    dram_blocks: dict[str, int]
    ssd_blocks: dict[str, int]
    clock_off_s: dict[str, float]
    faults: tuple[Fault, ...]
    weather: Weather
    most_batches: int
    replicas: int
    joined_s: float = 4.0
    faults_s: float = 18.0
    work_s: float = 22.0
    end_s: float = 46.0


def drawn_plan(seed: int, nodes: int) -> Plan:
    """The plan of a seed; the same for ever."""
    rng = random.Random(f"plan {seed}")
    names = tuple(f"n{i:03d}" for i in range(nodes))
    racks = rng.choice((2, 5, 10, nodes))
    tight = rng.random() < 0.3
    faults: list[Fault] = []
    late = set(rng.sample(names, nodes // 5))
    for name in names:
        begin_s = rng.uniform(4.0, 17.0) if name in late else rng.uniform(0.0, 2.0)
        faults.append(Fault(begin_s, What.START, (name,)))
    faults += _troubles(rng, names)
    return Plan(
        names,
        {name: f"rack{rng.randrange(racks)}" if racks < nodes else "" for name in names},
        {name: rng.randint(12, 30) if tight else 200 for name in names},
        {name: rng.choice((0, 20, 60)) if tight else 100 for name in names},
        {name: rng.choice((0.0, 0.0, 300.0, -3.0)) for name in names},
        tuple(sorted(faults, key=lambda f: f.time_s)),
        Weather(
            loss=rng.choice((0.0, 0.02, 0.1)),
            double=rng.choice((0.0, 0.03)),
            late=rng.choice((0.0, 0.05, 0.2)),
        ),
        most_batches=rng.choice((4, 16, 1000)),
        replicas=rng.choice((2, 2, 3)),
    )


def _troubles(rng: random.Random, names: tuple[str, ...]) -> list[Fault]:
    found: list[Fault] = []

    def when() -> float:
        return rng.uniform(4.0, 17.0)

    for name in rng.sample(names, len(names) // 5):
        at_s = when()
        found.append(Fault(at_s, What.CRASH, (name,)))
        if rng.random() < 0.7:
            found.append(Fault(at_s + rng.uniform(0.2, 8.0), What.START, (name,)))
    for name in rng.sample(names, len(names) // 12):
        found.append(Fault(when(), rng.choice((What.DRAIN, What.DEPART)), (name,)))
    for name in rng.sample(names, len(names) // 12):
        found.append(Fault(when(), What.SLOW, (name,), for_s=rng.uniform(1.0, 12.0)))
    for name in rng.sample(names, len(names) // 25):
        found.append(Fault(when(), What.CLEAR, (name,)))
    for name in rng.sample(names, len(names) // 12):
        found.append(Fault(when(), What.DEAF, (name,), for_s=rng.uniform(2.0, 10.0)))
    for number in range(rng.randrange(4)):
        side = tuple(rng.sample(names, rng.choice((1, 3, len(names) // 2))))
        at_s = when()
        found.append(Fault(at_s, What.CUT, side, number))
        found.append(Fault(min(at_s + rng.uniform(1.0, 12.0), 17.9), What.HEAL, (), number))
    return found
