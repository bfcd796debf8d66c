"""One simulated cluster of the paper's testbed: what is set, and what is measured.

Everything that was tuned stands here. `EFFICIENCY` multiplies all times of an engine, prefill and
decode; it is the one constant that was calibrated, on the conversation trace's gain over vLLM,
and every experiment uses it. What it multiplies is not tuned: prefill times fitted to kernels on
A100, and the decode step of engines of the time, 40 ms and more with the batch and its context
(Splitwise measured 45 to 53 ms for 1 to 32 sequences).
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

from kvist.cost.catalogue import model
from kvist.cost.decode import DecodeCoefficients
from kvist.cost.device import Hardware, device
from kvist.cost.plan_load import Overlap
from kvist.cost.prefill import PrefillCoefficients
from kvist.cost.seed import prefill_seed
from kvist.sim.des import spec
from kvist.sim.des.cluster import simulate
from kvist.sim.des.report import Report
from kvist.sim.des.routing_spec import RouterKind
from kvist.sim.reproduce import published
from kvist.sim.traces import Trace

EFFICIENCY = 1.14
EFFICIENCY_STEP = 0.1  # the sensitivity is shown at this much less and more
DECODE = DecodeCoefficients(d0_s=0.040, d1_s=0.15e-3, d2_s=3e-8)
HBM_TOKENS = 1_300_000  # of KV beside the weights in 8 x 80 GB
NIC_BYTES_PER_S = 12e9  # what a node's loads and hand-overs reach in their store
CHUNK_TOKENS = 512
SEED = 1

_ALONE_TOKENS = 1  # a prefill pass takes one prompt, however long


class System(enum.Enum):
    """Who serves."""

    VLLM = "vLLM"  # mixed nodes, a prefill is not interrupted, no cache
    VLLM_PREFIX = "vLLM with its prefix cache"  # the same, with the cache in HBM
    VLLM_CHUNKED = "vLLM with chunked prefill"  # the first, in chunks that decodes ride along with
    MOONCAKE = "Mooncake"  # prefill and decode apart, a pool in DRAM


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """One simulation; hashable, so that experiments share those that they have in common.

    Attributes:
        trace: name of the trace.
        system: who serves.
        prefill_nodes: all nodes where the system is not Mooncake, or where `decode_nodes` is 0.
        decode_nodes: 0 where requests end at their first token.
        scope: of Mooncake's cache.
        router: of Mooncake; the others take the least loaded node.
        rate: arrivals are this much faster than the trace's.
    """

    trace: str
    system: System
    prefill_nodes: int = published.NODES // 2
    decode_nodes: int = published.NODES // 2
    scope: spec.Scope = spec.Scope.GLOBAL
    router: RouterKind = RouterKind.CACHE_AWARE
    efficiency: float = EFFICIENCY
    nic_bytes_per_s: float = NIC_BYTES_PER_S
    rate: float = 1.0

    @property
    def label(self) -> str:
        """What is being done, for a line of progress."""
        who = self.system.value
        if self.system is System.MOONCAKE:
            who = (
                f"{self.prefill_nodes}P{self.decode_nodes}D, {self.router.value}, "
                f"{self.scope.value}, {self.nic_bytes_per_s * 8 / 1e9:g} Gb/s"
            )
        return f"{self.trace}: {who}, s {self.efficiency:.2f}, rate {self.rate:g}"


def prefill_coefficients(efficiency: float) -> PrefillCoefficients:
    """Prefill times of one node of the testbed."""
    return prefill_seed(model(published.MODEL), _hardware()).scaled(efficiency)


def decode_coefficients(efficiency: float) -> DecodeCoefficients:
    """Decode times of one node of the testbed."""
    return DECODE.scaled(efficiency)


def cluster_spec(run: ClusterRun) -> spec.ClusterSpec:
    """The cluster of a run as the simulator takes it."""
    shape = model(published.MODEL)
    mooncake = run.system is System.MOONCAKE
    store = spec.StoreSpec()
    if mooncake:
        pool = spec.TierSpec(published.POOL_TOKENS * shape.token_bytes, policy="leaf-lru")
        store = spec.StoreSpec(dram=pool, scope=run.scope, overlap=Overlap.LAYERWISE)
    roles = (spec.Role.PREFILL,) * run.prefill_nodes + (spec.Role.DECODE,) * run.decode_nodes
    if not run.decode_nodes:
        roles = (spec.Role.MIXED,) * run.prefill_nodes
    chunked = run.system is System.VLLM_CHUNKED
    return spec.ClusterSpec(
        model=shape,
        hardware=_hardware(),
        roles=roles,
        engine=spec.EngineSpec(
            prefilling=spec.Prefilling.CHUNKED if chunked else spec.Prefilling.NON_INTERRUPTIBLE,
            step_tokens=CHUNK_TOKENS if chunked else _ALONE_TOKENS,
            prefix_cache=run.system is System.VLLM_PREFIX,
            hbm_tokens=HBM_TOKENS,
            prefill=prefill_coefficients(run.efficiency),
            decode=decode_coefficients(run.efficiency),
            first_token=spec.FirstToken.DECODE,
        ),
        store=store,
        links=spec.LinkSpec(nic_bytes_per_s=run.nic_bytes_per_s),
        router=run.router if mooncake else RouterKind.LEAST_LOADED,
        slo=spec.Slo(published.TTFT_LIMIT_S, published.TBT_LIMITS_S[0]),
        arrivals=spec.ArrivalSpec(spread=True, rate_scale=run.rate),
    )


def measure(run: ClusterRun, trace: Trace) -> Report:
    """Simulates the run; deterministic."""
    if run.system is System.MOONCAKE and not run.decode_nodes:
        trace = first_tokens_only(trace)
    return simulate(cluster_spec(run), trace, seed=SEED)


def first_tokens_only(trace: Trace) -> Trace:
    """The trace with one token of output for every request."""
    short = tuple(dataclasses.replace(request, output_tokens=1) for request in trace.requests)
    return dataclasses.replace(trace, requests=short)


def _hardware() -> Hardware:
    return Hardware(device(published.DEVICE), published.DEVICES_PER_NODE)
