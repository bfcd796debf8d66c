"""What `kvist advise` answers: frozen values that turn into JSON."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvist.sim.advise.question import Medium
from kvist.sim.des.report import Quantiles


class Verdict(Enum):
    """What to do, in a word."""

    DRAM = "dram"
    DRAM_SSD = "dram+ssd"
    NON_PREFIX = "non-prefix"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Traffic:
    """A trace in figures.

    Attributes:
        ideal_hit_ratio: of *tokens*, with a cache without end.
        repeated_tokens_ratio: tokens of parts that came before, at whatever place of a prompt;
            None where the trace does not say.
        reuse_gap_s: p50, p90, p99, by hit tokens, of the time since a request's deepest known
            block was used.
        ideal_saved_device_s: node seconds of prefill that a cache without end saves.
        prefill_device_s: node seconds of prefill without any cache.
    """

    name: str
    requests: int
    span_s: float
    rate_rps: float
    input_tokens: int
    output_tokens: int
    input_tokens_p50: float
    block_tokens: int
    accesses_blocks: int
    unique_blocks: int
    unique_bytes: int
    ideal_hit_ratio: float
    repeated_tokens_ratio: float | None
    reuse_gap_s: tuple[float, float, float]
    reused_prefix_tokens_p50: float
    ideal_saved_device_s: float
    prefill_device_s: float


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """What a policy does at a capacity, over the whole trace."""

    policy: str
    capacity_bytes: int
    token_hit_ratio: float
    saved_device_s: float
    written_bytes: float


@dataclass(frozen=True, slots=True)
class Sampling:
    """How much of the trace was replayed, and by how much its ideal hit ratio is off."""

    share_ratio: float
    requests: int
    ideal_error_ratio: float


@dataclass(frozen=True, slots=True)
class MarginalPoint:
    """Dollars an hour that one more GB of a tier below HBM earns, up to a capacity of it."""

    capacity_bytes: int
    dollars_per_gb_hour: float


@dataclass(frozen=True, slots=True)
class TierAdvice:
    """One medium: whether it is fast enough, how long to keep, how much to buy.

    Attributes:
        bytes_per_s: from the medium into the devices of a node.
        break_even_bytes_per_s: below this bandwidth computing the usual prefix is faster.
        break_even_tokens: from this length on loading is faster; None if it never is.
        keep_s: the five-minute rule: keep what is used again sooner.
        reuse_within_ratio: share of hit tokens that are used again within `keep_s`.
        worth_bytes: capacity over all nodes whose last GB earns what it costs, copies of what is
            above included; 0 for none.
        hit_ratio: of tokens, of everything down to this medium at that capacity.
        cost_per_hour: dollars for what of `worth_bytes` the hosts do not have anyway.
    """

    medium: Medium
    bytes_per_s: float
    break_even_bytes_per_s: float
    break_even_tokens: float | None
    pays: bool
    keep_s: float
    reuse_within_ratio: float
    worth_bytes: int
    hit_ratio: float
    price_gb_hour: float
    cost_per_hour: float


@dataclass(frozen=True, slots=True)
class Served:
    """One simulated cluster. `cdf` holds (seconds, share of requests whose TTFT is below)."""

    name: str
    nodes: int
    requests: int
    ttft_s: Quantiles
    itl_s: Quantiles
    goodput_rps: float
    effective_ratio: float
    token_hit_ratio: float
    prefill_utilisation: float
    cdf: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Savings:
    """What the recommended capacity saves and costs; dollars."""

    device_hours_per_day: float
    device_dollars_per_month: float
    memory_dollars_per_month: float
    wear_dollars_per_month: float
    net_dollars_per_month: float


@dataclass(frozen=True, slots=True)
class Wear:
    """Writes to SSD.

    Attributes:
        tb_per_day: over all nodes.
        drive_writes_per_day: at the advised capacity.
        lifetime_days: of drives of that capacity, made for `endurance_dwpd` over five years; None
            if nothing is written.
        dollars_per_month: of drives written off at that pace.
    """

    tb_per_day: float
    drive_writes_per_day: float
    endurance_dwpd: float
    lifetime_days: float | None
    dollars_per_month: float


@dataclass(frozen=True, slots=True)
class Rule:
    """One step to the verdict: a figure against its threshold."""

    name: str
    value: float | None
    threshold: float
    holds: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Assumption:
    """Something that was not measured: what was taken, and from where."""

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class Advice:
    """The whole answer.

    Attributes:
        nodes: replicas, and whether they were given or counted by us.
        hbm_bytes: KV that the HBM of all nodes keeps beside running requests.
        hbm_hit_ratio: of tokens, by the engine's own cache alone.
    """

    verdict: Verdict
    sentence: str
    rules: tuple[Rule, ...]
    traffic: Traffic
    model: str
    hardware: str
    nodes: int
    nodes_given: bool
    hbm_bytes: int
    hbm_hit_ratio: float
    curve: tuple[CurvePoint, ...]
    marginal: tuple[MarginalPoint, ...]
    sampling: Sampling
    tiers: tuple[TierAdvice, ...]
    served: tuple[Served, ...]
    savings: Savings
    wear: Wear
    assumptions: tuple[Assumption, ...]

    def tier(self, medium: Medium) -> TierAdvice:
        """The advice on one medium."""
        return next(tier for tier in self.tiers if tier.medium is medium)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; what is infinite becomes None."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
