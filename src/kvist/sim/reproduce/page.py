"""Writes outcomes as Markdown, for `docs/reproduce.md` and for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvist.sim.markdown import table
from kvist.sim.reproduce import published
from kvist.sim.reproduce.cluster import (
    EFFICIENCY,
    HBM_TOKENS,
    NIC_BYTES_PER_S,
    SEED,
    decode_coefficients,
    prefill_coefficients,
)
from kvist.sim.reproduce.outcome import Claim, Figure, Outcome, Unit, Verdict

_HEAD = """\
<!-- Written by `make reproduce` (`python -m kvist.sim.reproduce --page`). -->

# Mooncake's experiments, again

What the FAST'25 paper measured on 16 nodes of 8 A800, run in Kvist's simulator from the traces that
the authors published: the same prefill, decode and transfer times (`kvist.cost`) and the same
eviction orders (`kvist.policy`) that serve in production. Ratios and orders are the result; seconds
are context. "held to" is the range that our figure must lie in; where there is none it is reported
and nothing more.
"""


def write_page(outcomes: Sequence[Outcome], *, complete: bool, minutes: float) -> str:
    """The whole page."""
    parts = [_HEAD, _when(minutes, complete=complete), _summary(outcomes), _calibrated()]
    parts += [write_section(outcome) for outcome in outcomes]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def write_section(outcome: Outcome) -> str:
    """One experiment: what was run, the figures, the claims, where the model disagrees."""
    rows = [_row(figure) for figure in outcome.figures]
    lines = [f"## {outcome.title} ({outcome.source})", "", outcome.setting, ""]
    lines += table(("", "paper", "ours", "ours ÷ paper", "held to", ""), rows)
    if outcome.claims:
        lines += ["", *(_claim(claim) for claim in outcome.claims)]
    if outcome.disagreements:
        lines += ["", "Where the model disagrees or does not say:", ""]
        lines += [f"* {text}" for text in outcome.disagreements]
    return "\n".join(lines) + "\n"


def _when(minutes: float, *, complete: bool) -> str:
    ended = "" if complete else " It was broken off before the end: what follows is what was done."
    return f"The run took {minutes:.1f} minutes.{ended}"


def _summary(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for outcome in outcomes:
        held = [f for f in outcome.figures if f.verdict is not Verdict.NOT_HELD]
        within = sum(f.verdict is Verdict.WITHIN for f in held)
        borne_out = sum(c.holds for c in outcome.claims)
        rows.append(
            (
                f"{outcome.title} ({outcome.source})",
                f"{within} of {len(held)}" if held else "–",
                f"{borne_out} of {len(outcome.claims)}" if outcome.claims else "–",
                "yes" if outcome.holds else "**no**",
            )
        )
    return "\n".join(table(("experiment", "figures within", "claims borne out", "holds"), rows))


def _calibrated() -> str:
    prefill, decode = prefill_coefficients(1.0), decode_coefficients(1.0)
    given = {
        "efficiency s (**calibrated**)": f"{EFFICIENCY:.2f} x the times below",
        "prefill of n tokens, p cached": f"{prefill.a_s * 1e3:.1f} ms + {prefill.b_s * 1e3:.4f} ms "
        f"(n - p) + {prefill.c_s * 1e3:.2e} ms (n² - p²)",
        "decode step of B sequences": f"{decode.d0_s * 1e3:.0f} ms + {decode.d1_s * 1e3:.2f} ms B "
        f"+ {decode.d2_s * 1e3:.0e} ms a token of context",
        "KV in HBM": f"{HBM_TOKENS / 1e6:g} M tokens a node",
        "cache in DRAM": f"{published.POOL_TOKENS / 1e6:g} M tokens a node, leaf-first LRU",
        "between nodes": f"{NIC_BYTES_PER_S / 1e9:g} GB/s a node",
        "first token": "comes from the decode node, so TTFT has the way of the KV in it",
        "arrivals": f"as in the trace; those of one 3-second bin are spread over it; seed {SEED}",
    }
    lines = [
        "## What was calibrated",
        "",
        "One constant: the efficiency s, by which all times of an engine are longer than the "
        "fitted ones. It was set once, so that the conversation trace gives the paper's gain over "
        "vLLM, and is the same in every experiment; what 0.1 more or less does stands in the "
        "table of that experiment. All else is from the paper, from the fitted profile, or from "
        "measurements of others, and was not tuned. The paper does not say how its vLLM nodes "
        "were balanced: here a request goes to the node with the least prefill queued, of equal "
        "ones to that with the shortest decode step. Round robin would serve about a third more "
        "requests within 100 ms, and the gains would be lower.",
        "",
    ]
    return "\n".join([*lines, *table(("what", "value"), given.items())])


def _row(figure: Figure) -> tuple[str, ...]:
    over = figure.over_paper
    held = "–"
    if figure.held is not None:
        held = " … ".join(number(v, figure.unit) for v in figure.held)
    return (
        figure.what,
        "–" if figure.paper is None else number(figure.paper, figure.unit),
        _ours(figure),
        "–" if over is None or not math.isfinite(over) else f"{over:.2f}",
        held,
        figure.verdict.value,
    )


def _ours(figure: Figure) -> str:
    """With the least and the greatest, where several seeds were run."""
    ours = number(figure.ours, figure.unit)
    if not figure.by_seed:
        return ours
    ends = (number(end(figure.by_seed), figure.unit) for end in (min, max))
    return f"{ours} ({' … '.join(ends)})"


def number(value: float, unit: Unit) -> str:
    """A figure in its unit."""
    if not math.isfinite(value):
        return "∞"
    if unit is Unit.SHARE:
        return f"{value * 100:.1f} %"
    if unit is Unit.GAIN:
        return f"{value * 100:+.0f} %"
    if unit is Unit.SECONDS:
        return f"{value:.2f} s"
    if unit is Unit.RATE:
        return f"{value:.3f} /s"
    if unit is Unit.COUNT:
        return f"{value:,.0f}"
    return f"{value:.2f}" if unit is Unit.NUMBER else f"{value:.2f}x"


def _claim(claim: Claim) -> str:
    return f"* {'holds' if claim.holds else '**does not hold**'}: {claim.text}"
