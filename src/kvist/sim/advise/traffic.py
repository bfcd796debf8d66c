"""A trace in figures: lengths, what an endless cache would save, how long blocks wait for use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvist.core.keys import Key
from kvist.cost.prefill import PrefillCoefficients
from kvist.sim.advise.advice import Traffic
from kvist.sim.advise.question import Question
from kvist.sim.traces import Request, Trace

USUAL_OUTPUT_TOKENS = 128  # of requests that carry none


@dataclass(frozen=True, slots=True)
class Ideal:
    """What a cache without end would do: per request, in the order of the trace.

    Attributes:
        hit_tokens: of each request.
        gaps: of each request with a known block, (seconds since its deepest one was used, tokens
            that hit): a shared system prompt is used all the time and says little.
    """

    hit_tokens: tuple[int, ...]
    gaps: tuple[tuple[float, int], ...]

    def gap_quantiles_s(self, *shares: float) -> tuple[float, ...]:
        """Times within which these shares of hit tokens are used again; 0 where nothing is."""
        if not self.gaps:
            return (0.0,) * len(shares)
        gaps, tokens = np.array(sorted(self.gaps), dtype=np.float64).T
        sums = np.cumsum(tokens)
        places = np.searchsorted(sums, np.array(shares) * sums[-1])
        return tuple(float(gaps[min(place, len(gaps) - 1)]) for place in places)

    def reused_within(self, seconds: float) -> float:
        """Share of hit tokens that are used again within so long."""
        total = sum(tokens for _, tokens in self.gaps)
        return sum(tokens for gap, tokens in self.gaps if gap <= seconds) / max(1, total)


def ideal(requests: Iterable[Request], block_tokens: int) -> Ideal:
    """Replays past a cache without end."""
    used_s: dict[Key, float] = {}
    hit_tokens, gaps = [], []
    for request in requests:
        hits = 0
        for key in request.keys:
            if key not in used_s:
                break
            hits += 1
        tokens = min(hits * block_tokens, request.input_tokens)
        if hits:
            gaps.append((request.time_s - used_s[request.keys[hits - 1]], tokens))
        for key in request.keys:
            used_s[key] = request.time_s
        hit_tokens.append(tokens)
    return Ideal(tuple(hit_tokens), tuple(gaps))


def saved_s(prefill: PrefillCoefficients, hit_tokens: float, hit_squares: float) -> float:
    """Node seconds that hits save: of each, `prefill_s(n, 0) - prefill_s(n - p, p)`.

    Args:
        hit_tokens: sum of the cached prefixes.
        hit_squares: sum of their squares.
    """
    return prefill.b_s * hit_tokens + prefill.c_s * hit_squares


def traffic(trace: Trace, known: Ideal, question: Question) -> Traffic:
    """The figures of `trace` on the hardware asked about."""
    requests = trace.requests
    inputs = np.array([r.input_tokens for r in requests], dtype=np.float64)
    hits = np.array(known.hit_tokens, dtype=np.float64)
    span_s = max(requests[-1].time_s - requests[0].time_s, 1e-3)
    p50, p90, p99 = known.gap_quantiles_s(0.5, 0.9, 0.99)
    prefill = question.prefill
    outputs = sum(
        USUAL_OUTPUT_TOKENS if r.output_tokens is None else r.output_tokens for r in requests
    )
    return Traffic(
        name=trace.name,
        requests=len(requests),
        span_s=span_s,
        rate_rps=len(requests) / span_s,
        input_tokens=int(inputs.sum()),
        output_tokens=outputs,
        input_tokens_p50=float(np.median(inputs)),
        block_tokens=trace.block_tokens,
        accesses_blocks=trace.accesses_blocks,
        unique_blocks=trace.unique_blocks,
        unique_bytes=trace.unique_blocks * trace.block_tokens * question.model.token_bytes,
        ideal_hit_ratio=float(hits.sum() / max(1.0, inputs.sum())),
        repeated_tokens_ratio=trace.repeated_tokens_ratio,
        reuse_gap_s=(p50, p90, p99),
        reused_prefix_tokens_p50=float(np.median(hits[hits > 0])) if (hits > 0).any() else 0.0,
        ideal_saved_device_s=saved_s(prefill, float(hits.sum()), float((hits**2).sum())),
        prefill_device_s=sum(prefill.prefill_s(r.input_tokens, 0) for r in requests),
    )
