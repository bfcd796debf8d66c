"""Replays a trace whose requests say what they are made of, and finds what repeats anywhere.

The trace has no text, so every part gets tokens of its own, made from its number: equal parts are
equal text, different ones have nothing in common. Each prompt is looked up in the production index
(`kvist.accel.blend`), behind what a cache of that policy and size has of its beginning; then it is
stored, and what the policy evicts is forgotten by the index, too. Requests take no time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvist.accel.blend.choice import LEAST_TOKENS, choose
from kvist.accel.blend.cutting import Cutter
from kvist.accel.blend.spans import FoundSpan, SpanIndex
from kvist.core.errors import ConfigError
from kvist.core.keys import KEY_BYTES, Key
from kvist.native import digest
from kvist.policy.protocol import TakesHints
from kvist.sim.replay import Cache, Contender, collector_paused, hints_of, run_length
from kvist.sim.traces import Request, Trace

_VOCABULARY = 100_000
_SCOPE = b"replay"
_TICK = 50  # requests between two calls of `progress`
# splitmix64
_STEP = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


@dataclass(frozen=True, slots=True)
class SpanResult:
    """How many of a trace's input tokens a cache had when they were asked for.

    Attributes:
        policy: what chose the blocks to evict.
        capacity_blocks: most blocks of the cache.
        prefix_token_ratio: in whole blocks, from the beginning of the prompt on.
        span_token_ratio: those, and in spans behind them.
        ideal_token_ratio: in a part that came before, at whatever place, with room for everything.
        spans: how many were used.
        span_tokens_mean: their length.
        blocks_written: as many as entered the cache.
        index_blocks: blocks in the index at the end.
        index_bytes: its memory at the end.
    """

    policy: str
    capacity_blocks: int
    prefix_token_ratio: float
    span_token_ratio: float
    ideal_token_ratio: float
    spans: int
    span_tokens_mean: float
    blocks_written: int
    index_blocks: int
    index_bytes: int


def with_long_keys(trace: Trace) -> Trace:
    """The trace with keys of the length that real ones have.

    Raises:
        ConfigError: its requests do not say what they are made of.
    """
    if not any(request.parts for request in trace.requests):
        raise ConfigError(
            "the requests of this trace do not say of which parts they are made",
            path="--reuse",
            remedy="take a trace with components, such as RAGPulse's",
        )
    known: dict[Key, Key] = {}

    def long(key: Key) -> Key:
        found = known.get(key)
        if found is None:
            found = known[key] = key if len(key) == KEY_BYTES else digest(key)
        return found

    requests = tuple(
        dataclasses.replace(request, keys=tuple(long(key) for key in request.keys))
        for request in trace.requests
    )
    return dataclasses.replace(trace, requests=requests)


@collector_paused()
def replay_spans(
    trace: Trace,
    contender: Contender,
    capacity_blocks: int,
    *,
    cutter: Cutter | None = None,
    least_tokens: int = LEAST_TOKENS,
    progress: Callable[[int], None] | None = None,
) -> SpanResult:
    """Runs every request of `trace` past a cache and an index that start empty.

    Args:
        trace: its requests carry `parts`, and keys of full length (`with_long_keys`).
        contender: the policy; used up afterwards.
        capacity_blocks: most blocks at the end of each request.
        cutter: where texts are marked; None for the usual one.
        least_tokens: shorter spans are not used.
        progress: gets the number of requests done, every few dozen.
    """
    most_tokens = (capacity_blocks + 1) * trace.block_tokens + max(
        (request.input_tokens for request in trace.requests), default=0
    )
    shelf = _Shelf(
        contender,
        capacity_blocks,
        SpanIndex(most_tokens=most_tokens, cutter=cutter, secret=b"kvist replay"),
    )
    texts, seen = _Texts(), set[int]()
    prefix = spans = span_tokens = ideal = 0
    for number, request in enumerate(trace.requests):
        contender.clock.now_s = request.time_s
        if isinstance(contender.policy, TakesHints):
            contender.policy.begin(hints_of(request, trace.block_tokens))
        ideal += sum(tokens for part, tokens in request.parts if part in seen)
        seen.update(part for part, _ in request.parts)
        matched = run_length(request.keys, shelf.cache.resident) * trace.block_tokens
        skip = min(matched, request.input_tokens)
        text = texts.of(request.parts)
        found = shelf.index.find(text, scope=_SCOPE, skip_tokens=skip)
        chosen = choose(found, prefix_tokens=skip, least_tokens=least_tokens)
        prefix += skip
        spans += len(chosen)
        span_tokens += sum(span.tokens for span in chosen)
        shelf.use(chosen)
        shelf.store(request, text, trace.block_tokens)
        if progress is not None and number % _TICK == 0:
            progress(number)
    tokens_in_all = max(1, sum(request.input_tokens for request in trace.requests))
    stats = shelf.index.stats()
    return SpanResult(
        policy=contender.name,
        capacity_blocks=capacity_blocks,
        prefix_token_ratio=prefix / tokens_in_all,
        span_token_ratio=(prefix + span_tokens) / tokens_in_all,
        ideal_token_ratio=ideal / tokens_in_all,
        spans=spans,
        span_tokens_mean=span_tokens / max(1, spans),
        blocks_written=shelf.cache.written,
        index_blocks=stats.blocks,
        index_bytes=stats.memory_bytes,
    )


class _Shelf:
    """A cache, and the index of what is in it."""

    def __init__(self, contender: Contender, capacity_blocks: int, index: SpanIndex) -> None:
        self.index = index
        self._evicted: list[Key] = []
        self.cache = Cache(contender, capacity_blocks, self._evicted)
        self._serve = self.cache.serve_then_trim if contender.may_refuse else self.cache.serve

    def use(self, spans: Iterable[FoundSpan]) -> None:
        """The blocks of spans are read, so the policy hears of them."""
        for span in spans:
            for key in reversed(span.keys):
                self.cache.policy.touch(key)

    def store(self, request: Request, text: npt.NDArray[np.uint32], block_tokens: int) -> None:
        """Takes a request in; the index forgets whatever left, or did not even enter."""
        self._serve(request.keys)
        self.index.store(request.keys, text, block_tokens, scope=_SCOPE)
        resident = self.cache.resident
        gone = [key for key in self._evicted if key not in resident]
        gone += [key for key in request.keys if key not in resident]
        self.index.forget(gone)
        self._evicted.clear()


def part_tokens(part: int, tokens: int) -> npt.NDArray[np.uint32]:
    """Tokens of a part, `[tokens]`: always the same for the same part."""
    base = int.from_bytes(digest(b"part %d" % part)[:8], "little")
    values = np.arange(tokens, dtype=np.uint64) * np.uint64(_STEP) + np.uint64(base)
    for shift, factor in _MIX:
        values ^= values >> np.uint64(shift)
        values *= np.uint64(factor)
    return ((values >> np.uint64(33)) % np.uint64(_VOCABULARY)).astype(np.uint32)


class _Texts:
    """Prompts put together from parts."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], npt.NDArray[np.uint32]] = {}

    def of(self, parts: Iterable[tuple[int, int]]) -> npt.NDArray[np.uint32]:
        """The tokens of a prompt."""
        texts = []
        for part in parts:
            text = self._known.get(part)
            if text is None:
                text = self._known[part] = part_tokens(*part)
            texts.append(text)
        return np.concatenate(texts) if texts else np.empty(0, np.uint32)
