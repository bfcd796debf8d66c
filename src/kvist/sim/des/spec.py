"""What is simulated: model, hardware, engines, tiers, links, routing, SLO, arrivals and faults.

Frozen values only; `cluster.simulate` runs them, `scenario` reads them from YAML. Sizes of tiers
are of one node, also of a pool that spans all nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from kvist.core.errors import ConfigError
from kvist.cost.decode import DecodeCoefficients
from kvist.cost.device import Hardware
from kvist.cost.model import ModelShape
from kvist.cost.plan_load import Overlap
from kvist.cost.prefill import PrefillCoefficients
from kvist.cost.seed import decode_seed, prefill_seed
from kvist.sim.des.routing_spec import AdmissionKind, RouterKind, RoutingSpec

_HBM_RATIO = 0.9  # what engines take of HBM


class Role(Enum):
    """What a node does with a request."""

    MIXED = "mixed"
    PREFILL = "prefill"
    DECODE = "decode"


class Prefilling(Enum):
    """How prefill and decode share an engine.

    `chunked` puts up to `step_tokens` of prefill into each decode step (vLLM V1);
    `non-interruptible` runs whole prompts first while every decode waits (vLLM 0.5).
    """

    CHUNKED = "chunked"
    NON_INTERRUPTIBLE = "non-interruptible"


class Handover(Enum):
    """When a prefill node sends KV to the decode node: after the prefill, or layer by layer."""

    AFTER = "after"
    LAYERWISE = "layerwise"


class FirstToken(Enum):
    """Who gives the first token to the user where prefill and decode are apart.

    `prefill`: the prefill node, at once; the way of the KV is then the first token gap.
    `decode`: the decode node, once the KV is there; the way of the KV is then part of TTFT.
    """

    PREFILL = "prefill"
    DECODE = "decode"


class Scope(Enum):
    """Who may read a node's DRAM and SSD.

    `local`: the node itself. `peers`: every node, and what it fetched it keeps a copy of.
    `global`: all nodes' space is one pool with one eviction order; each block has one holder.
    """

    LOCAL = "local"
    PEERS = "peers"
    GLOBAL = "global"


class LoadPolicy(Enum):
    """Which matched blocks are loaded: what `plan_load` says, all, or none."""

    PLANNED = "planned"
    ALWAYS = "always"
    NEVER = "never"


class FaultKind(Enum):
    """What goes wrong on a node."""

    LOST_NODE = "lost-node"
    SLOW_DISK = "slow-disk"
    DEGRADED_LINK = "degraded-link"


def _need(value: float, least: float, path: str) -> None:
    if not least <= value < math.inf:
        raise ConfigError(f"must be {least:g} or more and finite, not {value}", path=path)


def _above_zero(value: float, path: str) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"must be above 0 and finite, not {value}", path=path)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine, a replica of the model.

    Attributes:
        prefilling: how prefill and decode share steps.
        step_tokens: most tokens of one step (chunked), or of prompts that one prefill pass takes
            together (non-interruptible; a longer prompt runs alone).
        max_sequences: most requests that run at once.
        prefix_cache: whether blocks stay in HBM after their request, to be matched.
        hbm_policy: eviction order of those blocks, `lru` or `leaf-lru`.
        hbm_tokens: tokens of KV that HBM holds; None for what weights leave of 90 % of it.
        time_scale: multiplies all prefill and decode times, given or seeded: the one knob for an
            engine's efficiency.
        prefill: coefficients in place of those that the cost model seeds.
        decode: likewise.
        handover: when KV leaves a prefill node.
        first_token: who gives the first token.

    Raises:
        ConfigError: a value out of its range.
    """

    prefilling: Prefilling = Prefilling.CHUNKED
    step_tokens: int = 2048
    max_sequences: int = 256
    prefix_cache: bool = True
    hbm_policy: str = "lru"
    hbm_tokens: int | None = None
    time_scale: float = 1.0
    prefill: PrefillCoefficients | None = None
    decode: DecodeCoefficients | None = None
    handover: Handover = Handover.LAYERWISE
    first_token: FirstToken = FirstToken.PREFILL

    def __post_init__(self) -> None:
        _need(self.step_tokens, 1, "$.engine.step_tokens")
        _need(self.max_sequences, 1, "$.engine.max_sequences")
        _above_zero(self.time_scale, "$.engine.time_scale")
        if self.hbm_tokens is not None:
            _need(self.hbm_tokens, 1, "$.engine.hbm_tokens")
        if self.hbm_policy not in ("lru", "leaf-lru"):
            raise ConfigError(
                f"unknown order {self.hbm_policy!r}",
                path="$.engine.hbm_policy",
                remedy="take lru or leaf-lru",
            )


@dataclass(frozen=True, slots=True)
class TierSpec:
    """DRAM or SSD of one node; 0 bytes for none.

    Attributes:
        capacity_bytes: room for blocks on one node.
        policy: an order of `kvist replay` but `belady`: `value`, `leaf-lru`, `lru`, `second-sight`
            (leaf-LRU behind that insert filter), ...
    """

    capacity_bytes: int = 0
    policy: str = "value"

    def __post_init__(self) -> None:
        _need(self.capacity_bytes, 0, "$.tiers.capacity_bytes")


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """The cache below HBM. Without any capacity the engines run alone.

    Attributes:
        scope: who may read a node's tiers.
        load: which matched blocks are loaded.
        overlap: `none`, or `layerwise` loading beside computing.
        per_load_s: fixed overhead of a load beside the transfer.
        per_block_s: overhead of each of its blocks.
        ahead_requests: how many waiting requests an engine may load for at once.
    """

    dram: TierSpec = field(default_factory=TierSpec)
    ssd: TierSpec = field(default_factory=TierSpec)
    scope: Scope = Scope.LOCAL
    load: LoadPolicy = LoadPolicy.PLANNED
    overlap: Overlap = Overlap.NONE
    per_load_s: float = 1e-3
    per_block_s: float = 2e-5
    ahead_requests: int = 8

    def __post_init__(self) -> None:
        _need(self.per_load_s, 0, "$.store.per_load_s")
        _need(self.per_block_s, 0, "$.store.per_block_s")
        _need(self.ahead_requests, 1, "$.store.ahead_requests")
        if self.overlap is Overlap.BOTH_ENDS:
            raise ConfigError(
                "both_ends is not simulated",
                path="$.store.overlap",
                remedy="take none or layerwise",
            )


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """Links of one node, bytes a second each way; None for what the device catalogue says.

    The host link and the NIC are full duplex: their two directions do not slow each other.
    """

    host_bytes_per_s: float | None = None
    nic_bytes_per_s: float | None = None
    ssd_read_bytes_per_s: float = 6.5e9
    ssd_write_bytes_per_s: float = 3e9
    host_latency_s: float = 1e-5
    nic_latency_s: float = 3e-5
    ssd_latency_s: float = 1e-4

    def __post_init__(self) -> None:
        for name in ("host_bytes_per_s", "nic_bytes_per_s"):
            value = getattr(self, name)
            if value is not None:
                _above_zero(value, f"$.links.{name}")
        for name in ("ssd_read_bytes_per_s", "ssd_write_bytes_per_s"):
            _above_zero(getattr(self, name), f"$.links.{name}")
        for name in ("host_latency_s", "nic_latency_s", "ssd_latency_s"):
            _need(getattr(self, name), 0, f"$.links.{name}")


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must meet: `ttft_s`, and `tbt_s` for the mean of its longest 10 % of gaps."""

    ttft_s: float = 30.0
    tbt_s: float = 0.1

    def __post_init__(self) -> None:
        _above_zero(self.ttft_s, "$.slo.ttft_s")
        _above_zero(self.tbt_s, "$.slo.tbt_s")


@dataclass(frozen=True, slots=True)
class ArrivalSpec:
    """How a trace's requests arrive.

    Attributes:
        spread: whether requests of one timestamp are spread over the time to the next one: traces
            are binned, and without it the queue is an artefact.
        jitter_s: each request comes up to so much later, in the trace's time, by seed: what seeds
            differ in where times are exact.
        rate_scale: 2 plays the trace twice as fast.
        limit: takes only the first requests; None for all.
        output_tokens: output length of requests that carry none.
    """

    spread: bool = True
    jitter_s: float = 0.0
    rate_scale: float = 1.0
    limit: int | None = None
    output_tokens: int = 128

    def __post_init__(self) -> None:
        _need(self.jitter_s, 0, "$.arrivals.jitter_s")
        _above_zero(self.rate_scale, "$.arrivals.rate_scale")
        _need(self.output_tokens, 1, "$.arrivals.output_tokens")
        if self.limit is not None:
            _need(self.limit, 1, "$.arrivals.limit")


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong on `node` from `start_s` until `end_s` after the first arrival.

    A lost node forgets all it holds; its requests go to other nodes, or fail where there are
    none. `factor` is the share of its bandwidth that a slow disk or a degraded NIC keeps.
    """

    kind: FaultKind
    node: int
    start_s: float
    end_s: float = math.inf
    factor: float = 0.1

    def __post_init__(self) -> None:
        _need(self.node, 0, "$.faults.node")
        _need(self.start_s, 0, "$.faults.start_s")
        if not self.end_s > self.start_s:
            raise ConfigError(f"must be after {self.start_s} s", path="$.faults.end_s")
        if not 0 < self.factor <= 1:
            raise ConfigError(f"must be in (0, 1], not {self.factor}", path="$.faults.factor")


@dataclass(frozen=True, slots=True)
class RandomFaults:
    """How many faults of each kind befall random nodes at random times of the trace, by seed."""

    lost_nodes: int = 0
    slow_disks: int = 0
    degraded_links: int = 0
    lasting_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("lost_nodes", "slow_disks", "degraded_links"):
            _need(getattr(self, name), 0, f"$.random_faults.{name}")
        _above_zero(self.lasting_s, "$.random_faults.lasting_s")


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """A whole cluster: every node is one replica of `model` on `hardware`.

    Attributes:
        roles: one entry a node; `(Role.MIXED,) * 16`, or prefill and decode nodes.

    Raises:
        ConfigError: the nodes cannot serve: nobody prefills or decodes, or the model does not fit.
    """

    model: ModelShape
    hardware: Hardware
    roles: tuple[Role, ...] = (Role.MIXED,)
    engine: EngineSpec = field(default_factory=EngineSpec)
    store: StoreSpec = field(default_factory=StoreSpec)
    links: LinkSpec = field(default_factory=LinkSpec)
    router: RouterKind = RouterKind.LEAST_LOADED
    admission: AdmissionKind = AdmissionKind.NONE
    routing: RoutingSpec = field(default_factory=RoutingSpec)
    slo: Slo = field(default_factory=Slo)
    arrivals: ArrivalSpec = field(default_factory=ArrivalSpec)
    faults: tuple[Fault, ...] = ()
    random_faults: RandomFaults = field(default_factory=RandomFaults)

    def __post_init__(self) -> None:
        self.routing.check(self.admission)
        kinds = set(self.roles)
        if not kinds & {Role.MIXED, Role.PREFILL} or not kinds & {Role.MIXED, Role.DECODE}:
            raise ConfigError(
                "no node prefills, or none decodes",
                path="$.nodes",
                remedy="give mixed nodes, or both prefill and decode nodes",
            )
        for number, fault in enumerate(self.faults):
            if fault.node >= len(self.roles):
                raise ConfigError(
                    f"there is no node {fault.node}",
                    path=f"$.faults[{number}].node",
                    remedy=f"nodes are 0 to {len(self.roles) - 1}",
                )
        if self.hbm_tokens() < 1:
            raise ConfigError(
                f"{self.model.name} does not fit {self.hardware.count} x "
                f"{self.hardware.device.name}",
                path="$.hardware.count",
                remedy="take more devices, or set engine.hbm_tokens",
            )

    def hbm_tokens(self) -> int:
        """Tokens of KV that one node's HBM holds."""
        if self.engine.hbm_tokens is not None:
            return self.engine.hbm_tokens
        count, device = self.hardware.count, self.hardware.device
        left = device.hbm_bytes * _HBM_RATIO - self.model.weight_bytes / count
        return int(left // max(1, self.model.rank_token_bytes(count)))

    def prefill(self) -> PrefillCoefficients:
        """Prefill times of one node."""
        seed = self.engine.prefill or prefill_seed(self.model, self.hardware)
        return seed.scaled(self.engine.time_scale)

    def decode(self) -> DecodeCoefficients:
        """Decode times of one node."""
        seed = self.engine.decode or decode_seed(self.model, self.hardware)
        return seed.scaled(self.engine.time_scale)

    def host_bytes_per_s(self) -> float:
        """Host to device and back, each way, of one node."""
        given = self.links.host_bytes_per_s
        chips = self.hardware
        return chips.device.host_bytes_per_s * chips.count if given is None else given

    def nic_bytes_per_s(self) -> float:
        """NICs of one node together, each way."""
        given = self.links.nic_bytes_per_s
        chips = self.hardware
        return chips.device.nic_bytes_per_s * chips.count if given is None else given
