"""Which part of a prompt is blended: a pure decision from what was loaded.

A prompt is: an exact prefix (the engine's own pages, then blocks of the store), then spans with
uncached tokens between them, then a suffix. The *region* ends at a page boundary: vLLM takes an
external prefix of whole pages, and at least one token is left for it to compute, whose logits it
needs. Tokens of the region that are in no span are computed with the repair.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvist.accel.blend.choice import LEAST_TOKENS, choose
from kvist.accel.blend.spans import FoundSpan


@dataclass(frozen=True, slots=True)
class BlendLimits:
    """When a prompt is blended at all: from `min_tokens` in spans, up to `max_tokens` in all."""

    min_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Region:
    """What the worker shall fill: tokens `[computed, stop)` of a prompt.

    Rows before `exact` hold the KV of an ordinary prefix; `spans` are disjoint, in order, and
    begin at or after it.
    """

    computed: int
    exact: int
    stop: int
    spans: tuple[FoundSpan, ...]

    @property
    def span_tokens(self) -> int:
        return sum(span.tokens for span in self.spans)


def plan_region(
    spans: Iterable[FoundSpan],
    *,
    prompt_tokens: int,
    computed_tokens: int,
    exact_tokens: int,
    page_tokens: int,
    limits: BlendLimits,
) -> Region | None:
    """The region of a prompt, or `None` if blending it would spare too little.

    Args:
        spans: candidates whose rows are there; they may overlap.
        prompt_tokens: of the whole prompt.
        computed_tokens: what the engine has already, in whole pages.
        exact_tokens: end of the prefix that needs no repair; not below `computed_tokens`.
        page_tokens: tokens of an engine's page.
        limits: what is worth it.
    """
    chosen = choose(spans, prefix_tokens=exact_tokens)
    last = min(prompt_tokens - 1, limits.max_tokens, chosen[-1].stop if chosen else 0)
    stop = last // page_tokens * page_tokens
    kept = [s.part(s.start, min(s.stop, stop)) for s in chosen if s.start + LEAST_TOKENS <= stop]
    region = Region(computed_tokens, exact_tokens, stop, tuple(kept))
    if stop <= exact_tokens or region.span_tokens < max(1, limits.min_tokens):
        return None
    return region
