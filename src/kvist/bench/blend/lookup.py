"""`python -m kvist.bench.blend.lookup`: finding cached text in a long prompt among a million spans.

The index is filled with sequences of passages, new ones and ones that were stored before; words are
as frequent as in a language (by Zipf's law). Each prompt is another one: passages from anywhere in
the index, some of them twice, and as many new tokens between them. What was put into a prompt is
known, so it is also known whether all of it was found. Times are of single calls in this process.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np
from rich.table import Table

from kvist.accel.blend.choice import choose
from kvist.accel.blend.cutting import Tokens
from kvist.accel.blend.spans import FoundSpan, SpanIndex
from kvist.bench import samples
from kvist.bench.machine import describe_machine, load
from kvist.bench.screen import screen
from kvist.core.keys import Key
from kvist.native import IMPLEMENTATION, chain_keys, digest

BLOCK_TOKENS = 16
SPANS = 1_000_000
PROMPT_TOKENS = 32_768
PROMPTS = 60
TARGET_S = 0.020

_SCOPE = b"bench"
_VOCABULARY = 50_000
_SEQUENCE_PASSAGES = 20
_PASSAGE_TOKENS = (100, 700)
_AGAIN = 0.3  # share of a sequence's passages that were stored before
_TWICE = 0.2  # share of a prompt's passages that come once more


@dataclass(frozen=True, slots=True)
class Filled:
    """The index as it was measured, and what filling it took.

    Attributes:
        spans: pieces of text between two marks, each with an owner.
        memory_bytes: of the index as it counts itself.
        resident_bytes: by how much the process grew; it holds nothing else of the texts.
        store_s: seconds to store one sequence, median and maximum.
        forget_s: seconds to forget one sequence, median.
    """

    spans: int
    blocks: int
    tokens: int
    memory_bytes: int
    resident_bytes: int
    store_s: float
    store_max_s: float
    forget_s: float


@dataclass(frozen=True, slots=True)
class Looked:
    """The lookups of one kind of prompt.

    Attributes:
        cached_ratio: share of a prompt's tokens that is in the index.
        median_s: of the lookup with the choice; of the slowest: `max_s`.
        found: candidates of a prompt, median; and how many of them were chosen.
        planted_tokens: of passages long enough to be found for certain, over all prompts.
        missed_tokens: of those, not covered by what was chosen.
    """

    prompt: str
    prompts: int
    prompt_tokens: int
    cached_ratio: float
    median_s: float
    max_s: float
    find_median_s: float
    found: float
    chosen: float
    planted_tokens: int
    missed_tokens: int


class Texts:
    """Passages, made again from their numbers so that nothing has to be kept."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        weights = 1.0 / np.arange(1, _VOCABULARY + 1)
        self._cumulative = np.cumsum(weights / weights.sum())

    def words(self, rng: np.random.Generator, count: int) -> Tokens:
        """New tokens, `[count]`."""
        return np.searchsorted(self._cumulative, rng.random(count)).astype(np.uint32)

    def passage(self, number: int) -> Tokens:
        """A passage, always the same for its number."""
        rng = np.random.default_rng((self._seed, 1, number))
        return self.words(rng, int(rng.integers(*_PASSAGE_TOKENS)))

    def sequence(self, number: int) -> tuple[list[int], Tokens]:
        """The passages of a stored sequence, and its tokens."""
        rng = np.random.default_rng((self._seed, 2, number))
        first = number * _SEQUENCE_PASSAGES
        passages = [
            int(rng.integers(first)) if first and rng.random() < _AGAIN else first + i
            for i in range(_SEQUENCE_PASSAGES)
        ]
        return passages, np.concatenate([self.passage(each) for each in passages])


def _keys(tokens: Tokens) -> list[Key]:
    return chain_keys(digest(_SCOPE), tokens, BLOCK_TOKENS)


def _resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


def fill(index: SpanIndex, texts: Texts, spans: int) -> tuple[Filled, int]:
    """Stores sequences until the index has so many spans; returns how many those were, too."""
    gc.collect()
    before, took_s, number = _resident_bytes(), [], 0
    while index.stats().marks < spans:
        _, tokens = texts.sequence(number)
        keys = _keys(tokens)
        began = time.perf_counter()
        index.store(keys, tokens, BLOCK_TOKENS, scope=_SCOPE)
        took_s.append(time.perf_counter() - began)
        number += 1
    stats, grown = index.stats(), _resident_bytes() - before
    forgotten_s = []
    for again in range(0, number, max(1, number // 20)):
        _, tokens = texts.sequence(again)
        keys = _keys(tokens)
        began = time.perf_counter()
        index.forget(keys)
        forgotten_s.append(time.perf_counter() - began)
        index.store(keys, tokens, BLOCK_TOKENS, scope=_SCOPE)
    filled = Filled(
        spans=stats.marks,
        blocks=stats.blocks,
        tokens=stats.tokens,
        memory_bytes=stats.memory_bytes,
        resident_bytes=grown,
        store_s=statistics.median(took_s),
        store_max_s=max(took_s),
        forget_s=statistics.median(forgotten_s),
    )
    return filled, number


def prompt_of(
    texts: Texts, sequences: int, rng: np.random.Generator, *, tokens: int, cached_ratio: float
) -> tuple[Tokens, list[tuple[int, int]]]:
    """A prompt, and where in it cached passages stand."""
    parts: list[Tokens] = []
    places: list[tuple[int, int]] = []
    length = 0
    while length < tokens:
        passages, _ = texts.sequence(int(rng.integers(sequences)))
        # Not the last one of a sequence: its end is in no whole block.
        text = texts.passage(passages[int(rng.integers(_SEQUENCE_PASSAGES - 1))])
        for _ in range(2 if rng.random() < _TWICE else 1):
            new = texts.words(rng, int(len(text) * (1 / cached_ratio - 1)))
            parts += [new, text]
            places.append((length + len(new), length + len(new) + len(text)))
            length += len(new) + len(text)
    cut = [(start, min(stop, tokens)) for start, stop in places if start < tokens]
    return np.concatenate(parts)[:tokens], cut


def missed(chosen: Sequence[FoundSpan], places: Sequence[tuple[int, int]], least: int) -> int:
    """How many tokens of cached passages of at least `least` tokens no chosen span covers."""
    covered = np.zeros(max((stop for _, stop in places), default=0) + 1, bool)
    for span in chosen:
        covered[span.start : span.stop] = True
    return sum(int((~covered[start:stop]).sum()) for start, stop in places if stop - start >= least)


def look_up(
    index: SpanIndex,
    texts: Texts,
    sequences: int,
    *,
    name: str,
    prompts: int,
    tokens: int,
    cached_ratio: float,
) -> Looked:
    """Looks up other prompts of one kind, each once."""
    whole_s, find_s, found, used = [], [], [], []
    planted = lost = cached = 0
    for number in range(prompts):
        rng = np.random.default_rng((number, int(cached_ratio * 1000)))
        prompt, places = prompt_of(texts, sequences, rng, tokens=tokens, cached_ratio=cached_ratio)
        asked = prompt.tolist()  # as engines hand it over
        began = time.perf_counter()
        candidates = index.find(asked, scope=_SCOPE)
        between = time.perf_counter()
        chosen = choose(candidates, least_tokens=1)
        ended = time.perf_counter()
        whole_s.append(ended - began)
        find_s.append(between - began)
        found.append(len(candidates))
        used.append(len(chosen))
        least = index.certain_tokens
        planted += sum(stop - start for start, stop in places if stop - start >= least)
        cached += sum(stop - start for start, stop in places)
        lost += missed(chosen, places, least)
    return Looked(
        prompt=name,
        prompts=prompts,
        prompt_tokens=tokens,
        cached_ratio=cached / (prompts * tokens),
        median_s=statistics.median(whole_s),
        max_s=max(whole_s),
        find_median_s=statistics.median(find_s),
        found=statistics.median(found),
        chosen=statistics.median(used),
        planted_tokens=planted,
        missed_tokens=lost,
    )


def measure(*, spans: int, tokens: int, prompts: int, seed: int = 0) -> tuple[Filled, list[Looked]]:
    """Fills an index and looks prompts up in it, half cached and wholly cached ones."""
    texts = Texts(seed)
    index = SpanIndex(most_tokens=1 << 40, secret=b"bench")
    filled, sequences = fill(index, texts, spans)
    looked = [
        look_up(
            index,
            texts,
            sequences,
            name=name,
            prompts=prompts,
            tokens=tokens,
            cached_ratio=ratio,
        )
        for name, ratio in (("half cached", 0.5), ("all cached", 1.0))
    ]
    return filled, looked


def _print(filled: Filled, looked: Sequence[Looked]) -> None:
    out = screen()
    out.print(
        f"{filled.spans:,} spans in {filled.blocks:,} blocks ({filled.tokens:,} tokens): "
        f"{filled.memory_bytes / filled.spans:.0f} bytes a span "
        f"({filled.resident_bytes / filled.spans:.0f} by the growth of the process); "
        f"storing a sequence {filled.store_s * 1e3:.2f} ms (at most "
        f"{filled.store_max_s * 1e3:.1f}), forgetting it {filled.forget_s * 1e3:.2f} ms"
    )
    grid = Table("prompt", "tokens", "cached", "median", "max", "found", "chosen", "missed")
    for each in looked:
        grid.add_row(
            each.prompt,
            f"{each.prompt_tokens:,}",
            f"{each.cached_ratio:.0%}",
            f"{each.median_s * 1e3:.1f} ms",
            f"{each.max_s * 1e3:.1f} ms",
            f"{each.found:,.0f}",
            f"{each.chosen:,.0f}",
            f"{each.missed_tokens:,}",
        )
    out.print(grid)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; 1 if the half-cached prompts miss the target or a token."""
    parser = argparse.ArgumentParser(prog="python -m kvist.bench.blend.lookup", description=__doc__)
    parser.add_argument("--spans", type=int, default=SPANS, help="in the index")
    parser.add_argument("--tokens", type=int, default=PROMPT_TOKENS, help="of a prompt")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="of each kind")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there")
    args = parser.parse_args(argv)
    machine = describe_machine()
    filled, looked = measure(spans=args.spans, tokens=args.tokens, prompts=args.prompts)
    _print(filled, looked)
    met = looked[0].median_s <= TARGET_S and not any(each.missed_tokens for each in looked)
    if args.json is not None:
        document = {
            "machine": msgspec.to_builtins(samples.after(machine, load())),
            "native": IMPLEMENTATION,
            "target_s": TARGET_S,
            "met": met,
            "index": asdict(filled),
            "lookups": [asdict(each) for each in looked],
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{'met' if met else 'NOT met'}: median at most {TARGET_S * 1e3:.0f} ms, nothing missed")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
