"""Questions and figures that the tests of this folder share."""

from __future__ import annotations

from dataclasses import replace

from kvist.cost.catalogue import model
from kvist.cost.device import Hardware, device
from kvist.sim.advise.advice import Savings, TierAdvice, Traffic, Wear
from kvist.sim.advise.question import Effort, Market, Medium, Question
from kvist.sim.advise.worth import Worth

TINY = Effort(replay_accesses=20_000, capacities=4, simulated_requests=60)


def question(**changes: object) -> Question:
    """Llama-3.1-70B on eight H100."""
    asked = Question(model("llama-3.1-70b"), Hardware(device("h100"), 8), Market(2.5), effort=TINY)
    return replace(asked, **changes)  # type: ignore[arg-type]


def facts(**changes: object) -> Traffic:
    """A hundred requests of 1,000 tokens, one a second."""
    found = Traffic(
        name="t",
        requests=100,
        span_s=100.0,
        rate_rps=1.0,
        input_tokens=100_000,
        output_tokens=10_000,
        input_tokens_p50=1_000.0,
        block_tokens=100,
        accesses_blocks=1_000,
        unique_blocks=500,
        unique_bytes=500 * 100 * 327_680,
        ideal_hit_ratio=0.6,
        repeated_tokens_ratio=None,
        reuse_gap_s=(10.0, 20.0, 30.0),
        reused_prefix_tokens_p50=600.0,
        ideal_saved_device_s=2.3,
        prefill_device_s=4.5,
    )
    return replace(found, **changes)  # type: ignore[arg-type]


def bought(
    *,
    dram_bytes: int = 10**12,
    ssd_bytes: int = 10**13,
    dram_hit: float = 0.3,
    ssd_hit: float = 0.55,
    lifetime_days: float | None = None,
) -> Worth:
    """Tiers of these sizes and hit ratios."""
    tier = TierAdvice(
        Medium.DRAM, 4e11, 9e9, 10.0, True, 600.0, 0.5, dram_bytes, dram_hit, 0.005, 5.0
    )
    ssd = replace(
        tier, medium=Medium.SSD, bytes_per_s=26e9, worth_bytes=ssd_bytes, hit_ratio=ssd_hit
    )
    return Worth(
        (tier, ssd), (), Savings(1.0, 1.0, 1.0, 0.0, 0.0), Wear(1.0, 0.1, 1.0, lifetime_days, 5.0)
    )
