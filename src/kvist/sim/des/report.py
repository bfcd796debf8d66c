"""What a simulation found: one frozen value that turns into JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvist.sim.des.spec import Slo


class End(Enum):
    """How a request ended; each ends exactly once."""

    FINISHED = "finished"
    REJECTED = "rejected"
    FAILED = "failed"


class Refusal(Enum):
    """Why a request was not served."""

    TTFT = "ttft"  # predicted to miss the SLO
    TBT = "tbt"
    TBT_LATE = "tbt_late"  # said when the prompt had been computed
    NO_NODE = "no_node"  # none is alive
    TOO_LONG = "too_long"  # larger than a node's HBM
    LOST = "lost"  # its nodes were lost too often


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Mean and quantiles; all 0 where there were no values."""

    mean: float
    p50: float
    p90: float
    p99: float

    @staticmethod
    def of(values: Sequence[float]) -> Quantiles:
        """Nearest-rank quantiles, so each is a value that occurred."""
        if not values:
            return Quantiles(0.0, 0.0, 0.0, 0.0)
        ordered = sorted(values)
        last = len(ordered)
        ranks = (ordered[max(0, math.ceil(q * last) - 1)] for q in (0.5, 0.9, 0.99))
        return Quantiles(math.fsum(ordered) / last, *ranks)


@dataclass(frozen=True, slots=True)
class Served:
    """One request: times in seconds, arrival counted from the first one.

    Attributes:
        ttft_s: arrival to first token; infinite if there was none.
        tbt_s: mean of the longest 10 % of its token gaps (Mooncake); 0 with fewer than two tokens.
        end_s: when it ended.
        cached_tokens: prompt tokens not computed at its first prefill, of any tier.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    end: End
    ttft_s: float
    tbt_s: float
    end_s: float
    cached_tokens: int
    refusal: Refusal | None = None

    def meets(self, slo: Slo) -> bool:
        """Whether it finished within the SLO."""
        return self.end is End.FINISHED and self.ttft_s <= slo.ttft_s and self.tbt_s <= slo.tbt_s


@dataclass(frozen=True, slots=True)
class LinkReport:
    """One kind of link over all nodes: `utilisation` is bytes over what it could have moved
    until the last byte, which may come after the last request."""

    moved_bytes: float
    utilisation: float
    busiest_utilisation: float  # of the busiest node's


@dataclass(frozen=True, slots=True)
class Report:
    """Measures of one run.

    Attributes:
        seed: of the run.
        duration_s: first arrival to the last end.
        finished, rejected, failed: how requests ended; they sum to `requests`.
        preempted: preemptions, each of which recomputes.
        rerouted: requests moved because their node was lost.
        ttft_s: of requests that had a first token.
        tbt_s: of finished requests with two tokens or more.
        itl_s: over all token gaps.
        goodput_rps: requests that finished within the SLO a second, over all of `duration_s`.
        effective_ratio: of all requests, those that finished within the SLO.
        hit_tokens: prompt tokens not computed at first prefill, by tier (`hbm`, `dram`, `ssd`,
            `remote`).
        input_tokens: of all requests that started.
        prefill_device_s: device-seconds of prefill passes (node seconds times devices).
        decode_device_s: likewise of decode steps without prefill in them.
        links: by kind: `h2d`, `d2h`, `nic_in`, `nic_out`, `ssd_read`, `ssd_write`.
        ssd_written_blocks: blocks that entered SSD tiers.
        load_reasons: decisions of loads by `cost.plan_load.Reason`.
        loads_cut_off: loads given up at their deadline.
        loads_failed: loads whose source was lost.
        saves_dropped: blocks not written because too much waited for the SSD.
        refusals: by reason.
        events: that the kernel ran: a measure of the simulation itself.
        served: every request, in order of arrival; left out of JSON.
    """

    seed: int
    slo: Slo
    requests: int
    duration_s: float
    finished: int
    rejected: int
    failed: int
    preempted: int
    rerouted: int
    ttft_s: Quantiles
    tbt_s: Quantiles
    itl_s: Quantiles
    goodput_rps: float
    effective_ratio: float
    hit_tokens: dict[str, int]
    input_tokens: int
    prefill_device_s: float
    decode_device_s: float
    links: dict[str, LinkReport]
    ssd_written_blocks: int
    load_reasons: dict[str, int]
    loads_cut_off: int
    loads_failed: int
    saves_dropped: int
    refusals: dict[str, int]
    events: int
    served: tuple[Served, ...] = field(default=(), repr=False)

    @property
    def hit_ratio(self) -> float:
        """Share of prompt *tokens* that were not computed."""
        return sum(self.hit_tokens.values()) / max(1, self.input_tokens)

    def effective(self, slo: Slo) -> float:
        """Share of all requests that finished within another SLO than the run's."""
        return sum(s.meets(slo) for s in self.served) / max(1, self.requests)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able: every measure and `token_hit_ratio`, without `served`."""
        bare = dataclasses.asdict(dataclasses.replace(self, served=()))
        del bare["served"]
        bare["token_hit_ratio"] = self.hit_ratio
        return bare
