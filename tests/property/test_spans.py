"""The span index against brute force: nothing wrong is found, nothing that is there is missed."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.accel.blend.cutting import Cutter
from kvist.accel.blend.spans import FoundSpan, SpanIndex
from kvist.native import chain_keys, digest

CUTTER = Cutter(4, 5)  # certain from 8 tokens on
PASSAGES = [np.random.default_rng(n).integers(0, 1000, 12 + n).tolist() for n in range(9)]

# Texts of a few passages, whole or cut, with other tokens between; some repeat themselves.
PIECES = st.one_of(
    st.sampled_from(PASSAGES),
    st.tuples(st.sampled_from(PASSAGES), st.integers(0, 8)).map(lambda two: two[0][two[1] :]),
    st.lists(st.integers(0, 3), max_size=12),
    st.lists(st.integers(0, 1000), max_size=5),
)
TEXTS = st.lists(PIECES, max_size=8).map(lambda parts: [t for part in parts for t in part])


BLOCKS = st.sampled_from([3, 4, 16])  # shorter than a window, as long, longer


class Model:
    """Stored sequences as they are; what is cached of them, and what a prompt shares with it."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.texts: list[tuple[bytes, list[int], list[bytes]]] = []
        self.gone: set[bytes] = set()

    def add(self, scope: bytes, tokens: list[int]) -> list[bytes]:
        keys = chain_keys(digest(scope), tokens, self.block_tokens)
        self.texts.append((scope, tokens[: len(keys) * self.block_tokens], keys))
        self.gone -= set(keys)
        return keys

    def rows(self, scope: bytes, span: FoundSpan) -> list[int]:
        """The tokens that a span claims to be stored where it says; fails where they are not."""
        for where, tokens, keys in self.texts:
            first = span.source_start // self.block_tokens
            if where == scope and tuple(keys[first : first + len(span.keys)]) == span.keys:
                assert not set(span.keys) & self.gone, "a forgotten block is given"
                return tokens[span.source_start : span.source_start + span.tokens]
        raise AssertionError("no sequence of this scope holds these blocks at that place")

    def shared(self, scope: bytes, prompt: list[int], least: int) -> set[tuple[int, int]]:
        """(start, stop) of every longest common run, by comparing everything with everything."""
        found = set()
        for where, tokens, keys in self.texts:
            if where != scope:
                continue
            alive = [keys[i // self.block_tokens] not in self.gone for i in range(len(tokens))]
            for shift in range(-len(prompt), len(tokens)):
                run = 0
                for at in range(len(prompt) + 1):
                    source = at + shift
                    same = (
                        at < len(prompt)
                        and 0 <= source < len(tokens)
                        and alive[source]
                        and tokens[source] == prompt[at]
                    )
                    if same:
                        run += 1
                        continue
                    if run >= least:
                        found.add((at - run, at))
                    run = 0
        return found


@settings(max_examples=150)
@given(
    stored=st.lists(st.tuples(st.sampled_from([b"a", b"b"]), TEXTS), max_size=6),
    forgotten=st.sets(st.integers(0, 200), max_size=10),
    prompt=TEXTS,
    skip=st.integers(0, 10),
    block=BLOCKS,
)
def test_found_spans_are_exactly_what_is_shared(
    stored: list[tuple[bytes, list[int]]],
    forgotten: set[int],
    prompt: list[int],
    skip: int,
    block: int,
) -> None:
    spans = SpanIndex(cutter=CUTTER, owners=10_000, secret=b"s")
    model, keys = Model(block), []
    for scope, tokens in stored:
        held = model.add(scope, tokens)
        spans.store(held, tokens, block, scope=scope)
        keys += held
    gone = {keys[n] for n in forgotten if n < len(keys)}
    model.gone = gone
    assert spans.forget(gone) == len(gone)
    for scope in (b"a", b"b"):
        found = spans.find(prompt, scope=scope, skip_tokens=skip)
        assert [s.start for s in found] == sorted(s.start for s in found)
        for span in found:
            assert span.start >= skip
            assert model.rows(scope, span) == prompt[span.start : span.stop]
        covered = {at for s in found for at in range(s.start, s.stop)}
        for start, stop in model.shared(scope, prompt[skip:], spans.certain_tokens):
            assert set(range(start + skip, stop + skip)) <= covered


@settings(max_examples=150)
@given(
    order=st.permutations(range(9)),
    extra=st.lists(st.integers(0, 1000), max_size=7),
    block=BLOCKS,
)
def test_permuted_passages_are_found_wherever_they_stand(
    order: list[int], extra: list[int], block: int
) -> None:
    spans = SpanIndex(cutter=CUTTER, secret=b"s")
    stored = [token for passage in PASSAGES for token in passage]
    spans.store(Model(block).add(b"a", stored), stored, block, scope=b"a")
    prompt, places = [], []
    for n in order:
        prompt += extra
        places.append((len(prompt), len(prompt) + len(PASSAGES[n])))
        prompt += PASSAGES[n]
    found = spans.find(prompt, scope=b"a")
    covered = {at for s in found for at in range(s.start, s.stop)}
    cached = len(stored) // block * block
    for n, (start, stop) in zip(order, places, strict=True):
        begin = sum(map(len, PASSAGES[:n]))
        stop = min(stop, start + cached - begin)  # the last block is not whole
        assert set(range(start, stop)) <= covered


@settings(max_examples=100)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["store", "forget", "find"]), TEXTS, st.integers(0, 30)),
        max_size=25,
    ),
    block=BLOCKS,
)
def test_the_cap_is_respected_and_no_answer_is_wrong_whatever_happens(
    steps: list[tuple[str, list[int], int]], block: int
) -> None:
    spans = SpanIndex(cutter=CUTTER, most_tokens=20 * block, owners=2, secret=b"s")
    model, alive = Model(block), set()
    for what, tokens, n in steps:
        if what == "store":
            keys = model.add(b"a", tokens)
            spans.store(keys, tokens, block, scope=b"a")
            alive |= set(keys)
        elif what == "forget" and alive:
            key = sorted(alive)[n % len(alive)]
            spans.forget([key])
            alive.discard(key)
            model.gone.add(key)
        for span in spans.find(tokens, scope=b"a"):
            assert model.rows(b"a", span) == tokens[span.start : span.stop]
        stats = spans.stats()
        assert stats.tokens <= 20 * block
        if not stats.blocks:
            assert stats.marks == 0
