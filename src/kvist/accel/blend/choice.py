"""Which spans a prompt is built from, once it is known which of them were loaded.

Candidates overlap: the same text is stored in several places, and neighbours meet in the middle.
Choosing before the load would leave a hole wherever the choice is gone by then, so the choice is
made after it: prefix first, then the span that saves most, then what it leaves of the others.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Container, Iterable, Iterator

from kvist.accel.blend.spans import FoundSpan
from kvist.core.keys import Key

LEAST_TOKENS = 16


def loaded_parts(span: FoundSpan, loaded: Container[Key]) -> Iterator[FoundSpan]:
    """The parts of a span whose blocks were loaded, in order; one is as long as it can be.

    Args:
        span: a candidate.
        loaded: keys of the blocks that are there, their checksums proven.
    """
    size = span.block_tokens
    begin: int | None = None
    for i, key in enumerate(span.keys):
        at = max(span.start, span.start - span.first_row + i * size)
        if key in loaded:
            begin = at if begin is None else begin
        elif begin is not None:
            yield span.part(begin, at)
            begin = None
    if begin is not None:
        yield span.part(begin, span.stop)


def choose(
    spans: Iterable[FoundSpan], *, prefix_tokens: int = 0, least_tokens: int = LEAST_TOKENS
) -> list[FoundSpan]:
    """Disjoint spans, in order of the prompt: longest first, then what is left of the others.

    Of equally long ones the earlier in the prompt, then the one that moves least, is taken; so the
    same candidates give the same choice in whatever order they come.

    Args:
        spans: what was loaded; may overlap.
        prefix_tokens: the first tokens of the prompt need no span.
        least_tokens: shorter spans, and shorter remainders of trimmed ones, are not used.
    """
    least_tokens = max(1, least_tokens)
    queue: list[tuple[int, int, int, int, tuple[Key, ...], int, FoundSpan]] = []
    number = itertools.count()  # what is equal in all else is the same span

    def offer(span: FoundSpan, start: int, stop: int) -> None:
        if stop - start >= least_tokens:
            part = span.part(start, stop)
            shift = abs(part.shift_tokens)
            rank = (-part.tokens, part.start, shift, part.source_start, part.keys, next(number))
            heapq.heappush(queue, (*rank, part))

    for span in spans:
        offer(span, max(span.start, prefix_tokens), span.stop)
    chosen: list[FoundSpan] = []  # disjoint, in order
    while queue:
        span = heapq.heappop(queue)[-1]
        at = bisect.bisect_right(chosen, span.start, key=lambda each: each.stop)
        start, disjoint = span.start, True
        while at < len(chosen) and chosen[at].start < span.stop:
            offer(span, start, chosen[at].start)
            start, disjoint = chosen[at].stop, False
            at += 1
        if disjoint:
            chosen.insert(at, span)
        else:
            offer(span, start, span.stop)
    return chosen
