"""What is simulated: traffic, clusters and limits of every run.

Nodes are those of Mooncake's testbed with the efficiency that `sim.reproduce` calibrated. Rates are
those of 16 nodes; more nodes get as many times more.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kvist.router.conductor import HOLD_S
from kvist.sim.des import spec
from kvist.sim.des.cluster import simulate
from kvist.sim.des.report import Report
from kvist.sim.des.routing_spec import AdmissionKind, Knows, RouterKind, RoutingSpec
from kvist.sim.reproduce.cluster import ClusterRun, System, cluster_spec
from kvist.sim.reproduce.published import CONVERSATION
from kvist.sim.traces import Trace

BASE_NODES = 16
CHUNK_TOKENS = 1024
SEED = 1


@dataclass(frozen=True, slots=True)
class Traffic:
    """A public trace and how fast it is played.

    Attributes:
        name: for tables.
        file: below the folder of traces.
        rate: times the trace's own rate, for 16 nodes.
        ttft_s: limit of the first token; some ten times what an idle cluster takes.
        tbt_s: limit of the longest tenth of gaps.
        jitter_s: so much later each request comes at most, by seed. 0 where times are binned, and
            the seed draws a place in the bin; without either, seeds would draw ties alone.
    """

    name: str
    file: str
    rate: float
    ttft_s: float
    tbt_s: float
    jitter_s: float = 0.0


CHAT = Traffic("conversation", f"mooncake/{CONVERSATION}_trace.jsonl", 2.0, 10.0, 0.3)
CODING = Traffic("coding agents", "unified/weka_agentic_200s_b512.jsonl.gz", 0.6, 10.0, 0.3, 1.0)
RAG = Traffic("RAG", "unified/ragpulse_b64.jsonl.gz", 2500.0, 5.0, 0.3)
ALL_TRAFFIC = (CHAT, CODING, RAG)


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation; hashable, so that studies share those that they have in common.

    Attributes:
        traffic: what comes.
        router: the policy.
        nodes: all that serve; half of them prefill and half decode where `apart`.
        apart: whether prefill and decode have nodes of their own.
        admission: the rule.
        rate: times the traffic's rate.
        gateways: how many route at once.
        exchange_s: how often they tell each other.
        requests: only so many of the trace's first; None for all.
        seed: of arrivals and draws.
    """

    traffic: Traffic
    router: RouterKind = RouterKind.KVIST
    nodes: int = BASE_NODES
    apart: bool = False
    admission: AdmissionKind = AdmissionKind.NONE
    rate: float = 1.0
    gateways: int = 1
    exchange_s: float = 0.1
    requests: int | None = None
    seed: int = SEED

    @property
    def label(self) -> str:
        """What is being done, for a line of progress."""
        parts = [f"{self.traffic.name}: {self.router.value}", f"{self.nodes} nodes"]
        if self.apart:
            parts.append(self.admission.value)
        if self.gateways > 1:
            parts.append(f"{self.gateways} gateways, told every {self.exchange_s:g} s")
        return f"{', '.join(parts)}, rate x {self.rate:g}"


def cluster(run: Run) -> spec.ClusterSpec:
    """The cluster of a run."""
    half = run.nodes // 2
    base = cluster_spec(
        ClusterRun(CONVERSATION, System.MOONCAKE, half, half, scope=spec.Scope.PEERS)
        if run.apart
        else ClusterRun(CONVERSATION, System.MOONCAKE, run.nodes, 0, scope=spec.Scope.PEERS)
    )
    engine = base.engine
    if not run.apart:
        engine = dataclasses.replace(
            engine,
            prefilling=spec.Prefilling.CHUNKED,
            step_tokens=CHUNK_TOKENS,
            prefix_cache=True,
            first_token=spec.FirstToken.PREFILL,
        )
    return dataclasses.replace(
        base,
        engine=engine,
        router=run.router,
        admission=run.admission,
        routing=_routing(run),
        slo=spec.Slo(run.traffic.ttft_s, run.traffic.tbt_s),
        arrivals=spec.ArrivalSpec(
            jitter_s=run.traffic.jitter_s,
            rate_scale=run.traffic.rate * run.rate * run.nodes / BASE_NODES,
            limit=run.requests,
        ),
    )


def _routing(run: Run) -> RoutingSpec:
    """`kvist` as it is shipped; the others send at once, as their originals do."""
    base = RoutingSpec(Knows.BOOKINGS, gateways=run.gateways, exchange_s=run.exchange_s)
    if run.router is not RouterKind.KVIST:
        return base
    return dataclasses.replace(base, hold_s=HOLD_S)


def measure(run: Run, trace: Trace) -> Report:
    """Simulates a run; deterministic."""
    return simulate(cluster(run), trace, seed=run.seed)
