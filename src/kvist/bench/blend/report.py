"""Means over prompts, and what they say."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

import msgspec

from kvist.bench.blend.quality import Measured, PromptRow

NAIVE = "0"
_RESAMPLES = 2000
_SEED = 7


class RatioRow(msgspec.Struct, frozen=True):
    """All prompts at one ratio. `removed_ratio`: of the naive concatenation's KL, with an interval
    that 95 % of resampled sets of prompts fall into."""

    ratio: str
    kl_last: float
    kl_question: float
    agree_ratio: float
    removed_last_ratio: float
    removed_question_ratio: float
    removed_question_low: float
    removed_question_high: float
    time_ratio: float  # of the pass that computes everything; medians, in the same run


class Curve(msgspec.Struct, frozen=True):
    """The curve, and whether KL falls along it."""

    prompts: int
    tokens: float
    cached_tokens: float
    prefix_tokens: float  # what reuse of a prefix alone would find: the introduction
    rows: list[RatioRow]
    falls_last: bool
    falls_question: bool


def curve(rows: Sequence[PromptRow]) -> Curve:
    """Means over prompts at each ratio, from the least."""
    ratios = sorted(rows[0].ratios, key=float)
    # Full prefill itself also gives the logits of every token, for which nobody asks.
    full_s = median(row.ratios[ratios[-1]].pass_s for row in rows)
    out = []
    for ratio in ratios:
        here = [row.ratios[ratio] for row in rows]
        naive = [row.ratios[NAIVE] for row in rows] if NAIVE in rows[0].ratios else here
        low, high = _interval(here, naive)
        out.append(
            RatioRow(
                ratio=ratio,
                kl_last=fmean(m.kl_last for m in here),
                kl_question=fmean(m.kl_question for m in here),
                agree_ratio=fmean(m.agrees for m in here),
                removed_last_ratio=_removed(here, naive, lambda m: m.kl_last),
                removed_question_ratio=_removed(here, naive, _of_question),
                removed_question_low=low,
                removed_question_high=high,
                time_ratio=median(m.pass_s for m in here) / full_s,
            )
        )
    return Curve(
        prompts=len(rows),
        tokens=fmean(row.tokens for row in rows),
        cached_tokens=fmean(row.cached_tokens for row in rows),
        prefix_tokens=fmean(r.tokens - r.cached_tokens - r.question_tokens for r in rows),
        rows=out,
        falls_last=_falls([r.kl_last for r in out]),
        falls_question=_falls([r.kl_question for r in out]),
    )


def table(found: Curve) -> str:
    """The curve as a Markdown table."""
    lines = [
        "| computed again | KL after the question | ... removed | KL over the question "
        "| ... removed (95 %) | same next token | time ÷ most |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found.rows:
        name = "nothing (naive)" if row.ratio == NAIVE else f"{float(row.ratio):.0%}"
        lines.append(
            f"| {name} | {row.kl_last:.4f} | {row.removed_last_ratio:.0%} "
            f"| {row.kl_question:.4f} | {row.removed_question_ratio:.0%} "
            f"({row.removed_question_low:.0%} to {row.removed_question_high:.0%}) "
            f"| {row.agree_ratio:.0%} | {row.time_ratio:.2f} |"
        )
    lines.append(
        f"\n{found.prompts} prompts of {found.tokens:.0f} tokens on average, "
        f"{found.cached_tokens / found.tokens:.0%} of them cached. Reuse of a prefix alone finds "
        f"{found.prefix_tokens / found.tokens:.0%} of them, has a KL of 0, and computes the rest."
    )
    return "\n".join(lines)


def _of_question(measured: Measured) -> float:
    return measured.kl_question


def _removed(
    here: Sequence[Measured], naive: Sequence[Measured], of: Callable[[Measured], float]
) -> float:
    worst = sum(map(of, naive))
    return 1 - sum(map(of, here)) / worst if worst else 0.0


def _interval(here: Sequence[Measured], naive: Sequence[Measured]) -> tuple[float, float]:
    rng = random.Random(_SEED)
    pairs: list[Any] = list(zip(here, naive, strict=True))
    found = sorted(
        _removed([a for a, _ in drawn], [b for _, b in drawn], _of_question)
        for _ in range(_RESAMPLES)
        for drawn in [rng.choices(pairs, k=len(pairs))]
    )
    return found[int(0.025 * _RESAMPLES)], found[int(0.975 * _RESAMPLES)]


def _falls(numbers: Sequence[float]) -> bool:
    return all(a >= b for a, b in itertools.pairwise(numbers))
