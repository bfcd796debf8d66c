"""The whole of `kvist advise`: figures, hit curve, tiers, simulation, verdict."""

from __future__ import annotations

from collections.abc import Callable

from kvist.core.errors import ConfigError
from kvist.sim.advise.advice import Advice, Assumption, Sampling
from kvist.sim.advise.curve import ENGINE_POLICY, KVIST_POLICY, Curve, measure
from kvist.sim.advise.latency import LEAST_DRAM_BYTES, compare
from kvist.sim.advise.question import Medium, Question
from kvist.sim.advise.replicas import MOST_BUSY_RATIO, Fleet, fleet
from kvist.sim.advise.sample import Sample, sample
from kvist.sim.advise.traffic import USUAL_OUTPUT_TOKENS, ideal, traffic
from kvist.sim.advise.verdict import judge
from kvist.sim.advise.worth import worth
from kvist.sim.traces import Trace

Progress = Callable[[str, float], None]


def advise(trace: Trace, question: Question, progress: Progress | None = None) -> Advice:
    """Judges what a cache would do for `trace`.

    Args:
        progress: gets the stage (`replay`, `simulate`) and the share of it that is done.

    Raises:
        ConfigError: the trace holds no blocks, or its requests do not fit the devices.
    """
    if not trace.accesses_blocks or not trace.requests:
        raise ConfigError("no request has a block", path=trace.name)
    tell = progress if progress is not None else lambda stage, share: None
    known = ideal(trace.requests, trace.block_tokens)
    facts = traffic(trace, known, question)
    part = sample(trace, known, question.effort.replay_accesses, question.seed)
    points = measure(part, facts, question, lambda share: tell("replay", share))
    engine, kvist = Curve.of(points, ENGINE_POLICY), Curve.of(points, KVIST_POLICY)
    own = fleet(engine, facts, question)
    bought = worth(engine, kvist, known, facts, question, own)
    hbm_hit_ratio = engine.hit_ratio(own.cache_bytes)
    served = compare(
        trace, known, facts, question, own, bought.tiers, lambda share: tell("simulate", share)
    )
    verdict, sentence, rules = judge(facts, bought, hbm_hit_ratio)
    hardware = question.hardware
    return Advice(
        verdict=verdict,
        sentence=sentence,
        rules=rules,
        traffic=facts,
        model=question.model.name,
        hardware=f"{hardware.count} x {hardware.device.name}",
        nodes=own.nodes,
        nodes_given=question.nodes is not None,
        hbm_bytes=own.cache_bytes,
        hbm_hit_ratio=hbm_hit_ratio,
        curve=points,
        marginal=bought.marginal,
        sampling=Sampling(part.share_ratio, len(part.trace.requests), part.ideal_error_ratio),
        tiers=bought.tiers,
        served=served,
        savings=bought.savings,
        wear=bought.wear,
        assumptions=_assumptions(trace, question, own, part, served[0].requests),
    )


def _assumptions(
    trace: Trace, question: Question, own: Fleet, part: Sample, simulated: int
) -> tuple[Assumption, ...]:
    market, disks, hardware = question.market, question.disks, question.hardware
    device = hardware.device
    prefill, decode = question.prefill, question.decode
    fewest = f"fewest that keep the engine below {MOST_BUSY_RATIO:.0%} busy"
    nodes = "given" if question.nodes else fewest
    whole = part.share_ratio >= 1
    rows = (
        ("device", f"{device.flops_per_s / 1e12:g} TFLOPS, {device.hbm_bytes / 2**30:g} GiB",
         device.source),
        ("share of peak reached", f"{device.compute_ratio:g} compute, {device.memory_ratio:g} HBM",
         "cost model's seed; an engine's own times are learned at run time"),
        ("prefill", f"{prefill.a_s * 1e3:.1f} ms + {prefill.b_s * 1e6:.1f} us a token "
         f"+ {prefill.c_s * 1e12:.0f} ps a token squared", "cost model"),
        ("decode step", f"{decode.d0_s * 1e3:.1f} ms + {decode.d1_s * 1e6:.0f} us a sequence "
         f"+ {decode.d2_s * 1e9:.1f} ns a token of context", "cost model"),
        ("KV", f"{question.model.token_bytes / 1024:.1f} KiB a token", question.model.name),
        ("nodes", str(own.nodes), nodes),
        ("HBM for cache", f"{own.cache_bytes / 1e9:,.0f} GB over all nodes",
         "90 % of HBM less weights and running requests"),
        ("price of a device", f"${market.device_per_hour:g} an hour", "--device-price"),
        ("DRAM of hosts", f"{question.host_dram_bytes / 1e9:,.0f} GB a node, free",
         "given" if question.dram_bytes is not None else "as much as HBM; --host-dram"),
        ("price of more DRAM", f"${market.dram_gb_per_hour:g} a GB and hour", "--dram-price"),
        ("price of SSD", f"${market.ssd_gb_per_hour:g} a GB and hour", "--ssd-price"),
        ("DRAM to devices", f"{question.path(Medium.DRAM).bytes_per_s / 1e9:g} GB/s a node",
         "host link of the device catalogue"),
        ("SSD", f"read {disks.read_bytes_per_s / 1e9:g}, write {disks.write_bytes_per_s / 1e9:g} "
         f"GB/s a node, {disks.endurance_dwpd:g} DWPD", "--ssd-bandwidth, --ssd-endurance"),
        ("SSD, new", f"${disks.dollars_per_tb:g} a TB, worn off by writes over five years",
         "--drive-price"),
        ("SLO", f"TTFT {question.slo.ttft_s:g} s, longest tenth of token gaps "
         f"{question.slo.tbt_s * 1e3:g} ms", "--ttft-slo, --itl-slo"),
        ("requests without output length", f"{USUAL_OUTPUT_TOKENS} tokens", "assumed"),
        ("hit curve", "all requests" if whole else
         f"{part.share_ratio:.0%} of accesses by session; ideal off by "
         f"{part.ideal_error_ratio:+.1%}", "requests take no time in it"),
        ("simulation", f"{simulated:,} requests, seed {question.seed}; at least "
         f"{LEAST_DRAM_BYTES / 2**30:g} GiB of DRAM a node with Kvist",
         "a conversation stays on its node, with and without"),
        ("span", f"{(trace.requests[-1].time_s - trace.requests[0].time_s) / 3600:.2f} h",
         "reuse after the trace's end is not seen"),
    )  # fmt: skip
    return tuple(Assumption(*row) for row in rows)
