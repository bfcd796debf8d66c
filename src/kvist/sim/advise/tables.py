"""The report's tables as text, shared by the terminal and the page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvist.sim.advise.advice import Advice
from kvist.sim.advise.curve import ENGINE_POLICY, KVIST_POLICY


@dataclass(frozen=True, slots=True)
class Grid:
    """A table: title, names of columns (all but the first are figures unless `prose`), rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    prose: bool = False


def grids(advice: Advice) -> Iterator[Grid]:
    """Every table of the report, in the order of reading."""
    yield _traffic(advice)
    yield _curve(advice)
    yield _tiers(advice)
    yield _latency(advice)
    yield _money(advice)
    yield _rules(advice)
    yield Grid(
        "Assumptions",
        ("what", "taken", "from"),
        tuple((a.name, a.value, a.source) for a in advice.assumptions),
        prose=True,
    )


def size(size_bytes: float) -> str:
    """Bytes for people, in powers of 1000 as media are sold."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:,.3g} {unit}"
    return f"{size_bytes:,.0f} B"


def seconds(time_s: float) -> str:
    """A time for people."""
    if time_s < 1:
        return f"{time_s * 1e3:.3g} ms"
    for unit, factor in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if time_s >= 2 * factor:
            return f"{time_s / factor:.3g} {unit}"
    return f"{time_s:.3g} s"


def _traffic(advice: Advice) -> Grid:
    facts = advice.traffic
    p50, p90, p99 = (seconds(gap) for gap in facts.reuse_gap_s)
    repeated = facts.repeated_tokens_ratio
    rows = (
        ("requests", f"{facts.requests:,} in {seconds(facts.span_s)} ({facts.rate_rps:.3g}/s)"),
        ("prompt tokens", f"{facts.input_tokens / facts.requests:,.0f} mean, "
         f"{facts.input_tokens_p50:,.0f} median"),
        ("output tokens", f"{facts.output_tokens / facts.requests:,.0f} mean"),
        ("different blocks", f"{facts.unique_blocks:,} of {facts.block_tokens} tokens, "
         f"{size(facts.unique_bytes)}"),
        ("ideal hit ratio", f"{facts.ideal_hit_ratio:.1%} of tokens, with a cache without end"),
        ("repeated anywhere", "not known" if repeated is None else f"{repeated:.1%} of tokens"),
        ("time to reuse", f"{p50} median, {p90} p90, {p99} p99"),
        ("replicas", f"{advice.nodes} of {advice.hardware} ({advice.model})"),
        ("engine's own cache", f"{size(advice.hbm_bytes)} of HBM, hits {advice.hbm_hit_ratio:.1%}"),
    )  # fmt: skip
    return Grid("Traffic", ("", ""), rows, prose=True)


def _curve(advice: Advice) -> Grid:
    by_policy = {
        policy: {p.capacity_bytes: p for p in advice.curve if p.policy == policy}
        for policy in (ENGINE_POLICY, KVIST_POLICY)
    }
    rows = []
    for capacity in sorted(by_policy[ENGINE_POLICY]):
        engine, kvist = (by_policy[p][capacity] for p in (ENGINE_POLICY, KVIST_POLICY))
        rows.append(
            (
                size(capacity),
                f"{engine.token_hit_ratio:.1%}",
                f"{kvist.token_hit_ratio:.1%}",
                bar(kvist.token_hit_ratio),
            )
        )
    ideal = advice.traffic.ideal_hit_ratio
    rows.append(("without end", f"{ideal:.1%}", f"{ideal:.1%}", bar(ideal)))
    columns = ("capacity", ENGINE_POLICY, KVIST_POLICY, "token hit ratio")
    return Grid("Hit ratio of tokens by capacity", columns, tuple(rows))


def bar(ratio: float, width: int = 24) -> str:
    """A bar of eighths of a character."""
    eighths = round(max(0.0, min(1.0, ratio)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + ("▏▎▍▌▋▊▉"[rest - 1] if rest else "")).ljust(width)


def _tiers(advice: Advice) -> Grid:
    columns = (
        "tier", "worth buying", "hit ratio with it", "bandwidth", "break-even", "from length",
        "keep for", "reuse within", "cost",
    )  # fmt: skip
    rows = []
    for tier in advice.tiers:
        length = tier.break_even_tokens
        rows.append(
            (
                tier.medium.value,
                size(tier.worth_bytes) if tier.worth_bytes else "none",
                f"{tier.hit_ratio:.1%}",
                f"{tier.bytes_per_s / 1e9:.3g} GB/s",
                f"{tier.break_even_bytes_per_s / 1e9:.3g} GB/s",
                "never" if length is None else f"{length:,.0f} tokens",
                seconds(tier.keep_s),
                f"{tier.reuse_within_ratio:.0%}",
                f"${tier.cost_per_hour:,.2f}/h",
            )
        )
    return Grid("Tiers (over all nodes; bandwidths of one)", columns, tuple(rows))


def _latency(advice: Advice) -> Grid:
    columns = (
        "", "TTFT p50", "p90", "p99", "ITL p50", "goodput", "inside SLO", "hit ratio",
        "prefill busy",
    )  # fmt: skip
    rows = tuple(
        (
            run.name,
            *(seconds(v) for v in (run.ttft_s.p50, run.ttft_s.p90, run.ttft_s.p99, run.itl_s.p50)),
            f"{run.goodput_rps:.3g}/s",
            f"{run.effective_ratio:.1%}",
            f"{run.token_hit_ratio:.1%}",
            f"{run.prefill_utilisation:.0%}",
        )
        for run in advice.served
    )
    return Grid("Simulated at the trace's rate", columns, rows)


def _money(advice: Advice) -> Grid:
    saved, wear = advice.savings, advice.wear
    life = wear.lifetime_days
    rows = (
        ("prefill device hours saved a day", f"{saved.device_hours_per_day:,.1f}"),
        ("worth a month", f"${saved.device_dollars_per_month:,.0f}"),
        ("DRAM and SSD a month", f"${saved.memory_dollars_per_month:,.0f}"),
        ("SSD wear a month", f"${saved.wear_dollars_per_month:,.0f}"),
        ("net a month", f"${saved.net_dollars_per_month:,.0f}"),
        ("SSD writes a day", f"{wear.tb_per_day:,.1f} TB"),
        (
            "drive writes a day",
            f"{wear.drive_writes_per_day:.3g} (made for {wear.endurance_dwpd:g})",
        ),
        ("drives last", "for ever" if life is None else f"{life:,.0f} days"),
    )
    return Grid("Savings and wear", ("", "figure"), rows)


def _rules(advice: Advice) -> Grid:
    rows = tuple(
        (
            rule.name,
            "unknown" if rule.value is None else f"{rule.value:.3g}",
            f"{rule.threshold:.3g}",
            "yes" if rule.holds else "no",
            rule.reason,
        )
        for rule in advice.rules
    )
    return Grid(
        f"Why: {advice.verdict.value}", ("rule", "value", "threshold", "holds", "reason"), rows,
        prose=True,
    )  # fmt: skip
