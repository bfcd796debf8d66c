"""TTFT and goodput with and without Kvist, from the cluster simulation.

Nodes share nothing below HBM, and the router keeps a conversation on its node. So of a large
cluster a few nodes are simulated, with as large a part of the sessions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from kvist.core.errors import ConfigError
from kvist.sim.advise.advice import Served, TierAdvice, Traffic
from kvist.sim.advise.question import Medium, Question
from kvist.sim.advise.replicas import Fleet
from kvist.sim.advise.sample import sample
from kvist.sim.advise.traffic import USUAL_OUTPUT_TOKENS, Ideal
from kvist.sim.des.cluster import simulate
from kvist.sim.des.report import Report
from kvist.sim.des.routing_spec import RouterKind
from kvist.sim.des.spec import (
    ArrivalSpec,
    ClusterSpec,
    Role,
    StoreSpec,
    TierSpec,
)
from kvist.sim.traces import Trace

WITHOUT, WITH = "engine alone", "with Kvist"
# What is simulated where nothing is worth buying: what a host has anyway.
LEAST_DRAM_BYTES = 64 * 1024**3
_CDF_POINTS = 60

Progress = Callable[[float], None]


def compare(
    trace: Trace,
    known: Ideal,
    facts: Traffic,
    question: Question,
    own: Fleet,
    tiers: tuple[TierAdvice, ...],
    progress: Progress,
) -> tuple[Served, ...]:
    """Runs the engine alone, then with the tiers that are worth buying."""
    nodes, part = _part(trace, known, facts, question, own.nodes)
    sizes = {tier.medium: tier.worth_bytes // own.nodes for tier in tiers}
    sizes[Medium.DRAM] = max(sizes[Medium.DRAM], LEAST_DRAM_BYTES)
    store = StoreSpec(
        dram=TierSpec(capacity_bytes=sizes[Medium.DRAM]),
        ssd=TierSpec(capacity_bytes=sizes[Medium.SSD]),
    )
    spec = replace(
        question.cluster(),
        roles=(Role.MIXED,) * nodes,
        router=RouterKind.CACHE_AWARE_LOCAL,
        arrivals=ArrivalSpec(
            limit=question.effort.simulated_requests, output_tokens=USUAL_OUTPUT_TOKENS
        ),
    )
    runs = ((WITHOUT, spec), (WITH, replace(spec, store=store)))
    scale = own.nodes / nodes
    return tuple(
        _served(name, spec, _run(spec, part, question.seed, i / 2, progress), scale, own.nodes)
        for i, (name, spec) in enumerate(runs)
    )


def _part(
    trace: Trace, known: Ideal, facts: Traffic, question: Question, nodes: int
) -> tuple[int, Trace]:
    """How many nodes to simulate, and the requests that come to them."""
    share = min(1.0, question.effort.simulated_requests / facts.requests)
    few = max(1, min(nodes, math.floor(nodes * share)))
    if few == nodes:
        return nodes, trace
    wanted = int(trace.accesses_blocks * few / nodes)
    part = sample(trace, known, max(1, wanted), question.seed)
    # The sample's own share decides, so that its load on a node is that of the whole.
    few = max(1, round(nodes * part.share_ratio))
    return few, part.trace


def _run(spec: ClusterSpec, trace: Trace, seed: int, start: float, progress: Progress) -> Report:
    total = max(1, len(trace.requests))
    return simulate(
        spec, trace, seed=seed, progress=lambda n: progress(start + min(n, total) / total / 2)
    )


def _served(name: str, spec: ClusterSpec, report: Report, scale: float, nodes: int) -> Served:
    times = sorted(s.ttft_s for s in report.served if math.isfinite(s.ttft_s))
    if not times:
        raise ConfigError(
            f"none of {report.requests} requests could be served",
            path="--count",
            remedy="take more devices or nodes",
        )
    step = max(1, len(times) // _CDF_POINTS)
    ranks = sorted({*range(0, len(times), step), len(times) - 1})
    busy = report.prefill_device_s / spec.hardware.count / len(spec.roles)
    return Served(
        name=name,
        nodes=nodes,
        requests=report.requests,
        ttft_s=report.ttft_s,
        itl_s=report.itl_s,
        goodput_rps=report.goodput_rps * scale,
        effective_ratio=report.effective_ratio,
        token_hit_ratio=report.hit_ratio,
        prefill_utilisation=busy / max(1e-9, report.duration_s),
        cdf=tuple((times[i], (i + 1) / report.requests) for i in ranks),
    )
