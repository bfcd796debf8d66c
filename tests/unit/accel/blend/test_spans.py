"""The index of cached text: what is found, what is forgotten, what never mixes."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvist.accel.blend.cutting import Cutter, Marks
from kvist.accel.blend.spans import FoundSpan, SpanIndex
from kvist.native import chain_keys, digest

BLOCK = 16
SCOPE = b"model"


def words(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50_000, count).tolist()


def keys_of(tokens: list[int], scope: bytes = SCOPE) -> list[bytes]:
    return chain_keys(digest(scope), tokens, BLOCK)


def index(**options: object) -> SpanIndex:
    return SpanIndex(secret=b"test", **options)  # type: ignore[arg-type]


def put(spans: SpanIndex, tokens: list[int], scope: bytes = SCOPE) -> list[bytes]:
    keys = keys_of(tokens, scope)
    spans.store(keys, tokens, BLOCK, scope=scope)
    return keys


def rows(span: FoundSpan, held: dict[bytes, list[int]]) -> list[int]:
    """The tokens that the span says it is made of."""
    text = [token for key in span.keys for token in held[key]]
    return text[span.first_row : span.first_row + span.tokens]


def held_by(keys: list[bytes], tokens: list[int]) -> dict[bytes, list[int]]:
    return {key: tokens[i * BLOCK : (i + 1) * BLOCK] for i, key in enumerate(keys)}


def test_a_passage_is_found_behind_other_text_with_its_place_and_its_blocks() -> None:
    spans, stored, passage = index(), words(1, 400), words(1, 400)[100:300]
    keys = put(spans, stored)
    prompt = [*words(2, 77), *passage, *words(3, 50)]
    (found,) = spans.find(prompt, scope=SCOPE)
    assert (found.start, found.stop, found.source_start) == (77, 277, 100)
    assert found.shift_tokens == -23
    assert found.keys == tuple(keys[100 // BLOCK : -(-300 // BLOCK)])
    assert rows(found, held_by(keys, stored)) == passage


def test_every_occurrence_in_the_prompt_is_found() -> None:
    spans, passage = index(), words(1, 96)
    put(spans, passage)
    prompt = [*passage, *words(2, 5), *passage, *words(3, 40), *passage]
    found = spans.find(prompt, scope=SCOPE)
    assert [(s.start, s.stop, s.source_start) for s in found] == [
        (0, 96, 0),
        (101, 197, 0),
        (237, 333, 0),
    ]


def test_a_piece_stored_in_several_places_keeps_several_owners() -> None:
    spans, passage = index(), words(1, 96)
    first = put(spans, [*words(2, 32), *passage])
    second = put(spans, [*words(3, 48), *passage])
    found = spans.find(passage, scope=SCOPE)
    assert {s.source_start for s in found} == {32, 48}
    assert spans.forget(first) == len(first)
    (left,) = spans.find(passage, scope=SCOPE)
    assert (left.source_start, left.keys) == (48, tuple(second[3:]))


def test_owners_are_bounded_and_the_newest_stay() -> None:
    spans, passage = index(owners=2), words(1, 64)
    stored = [put(spans, [*words(n, 16), *passage]) for n in range(2, 6)]
    found = spans.find(passage, scope=SCOPE)
    assert {s.keys[0] for s in found} == {stored[2][1], stored[3][1]}
    assert spans.stats().crowded_marks > 0


def test_what_is_forgotten_is_not_found_and_the_rest_is() -> None:
    spans, stored = index(), words(1, 320)
    keys = put(spans, stored)
    assert spans.forget([keys[10], b"\0" * 32]) == 1
    found = spans.find(stored, scope=SCOPE)
    assert [(s.start, s.stop) for s in found] == [(0, 160), (176, 320)]
    put(spans, stored)  # it comes back, and is whole again
    assert [(s.start, s.stop) for s in spans.find(stored, scope=SCOPE)] == [(0, 320)]
    spans.clear()
    assert spans.find(stored, scope=SCOPE) == []
    assert spans.stats().marks == spans.stats().blocks == 0


def test_scopes_do_not_mix_even_with_equal_tokens() -> None:
    spans, passage = index(), words(1, 96)
    put(spans, passage, b"tenant a")
    assert spans.find(passage, scope=b"tenant b") == []
    put(spans, passage, b"tenant b")
    (found,) = spans.find(passage, scope=b"tenant b")
    assert found.keys == tuple(keys_of(passage, b"tenant b"))


def colliding(tokens: np.ndarray, seed: int) -> Marks:
    """Every position, and all fingerprints the same, whatever the scope."""
    ends = np.arange(15, len(tokens))
    return Marks(ends, np.full(len(ends), 7, np.uint64))


def test_colliding_fingerprints_never_give_a_false_match() -> None:
    spans, stored = index(cut=colliding, owners=1000), words(1, 160)
    keys = put(spans, stored)
    put(spans, words(9, 160), b"other")
    assert spans.find(words(2, 400), scope=SCOPE) == []
    prompt = [*words(2, 33), *stored[8:100], *words(3, 9)]
    for found in spans.find(prompt, scope=SCOPE):
        assert rows(found, held_by(keys, stored)) == prompt[found.start : found.stop]
    assert (33, 125) in [(s.start, s.stop) for s in spans.find(prompt, scope=SCOPE)]


def test_colliding_fingerprints_never_show_another_scope() -> None:
    """Equal fingerprints *and* equal tokens: only the scope is another."""
    spans, passage = index(cut=colliding, owners=1000), words(1, 96)
    put(spans, passage, b"tenant a")
    assert spans.find(passage, scope=b"tenant b") == []
    keys = put(spans, passage, b"tenant b")
    found = spans.find(passage, scope=b"tenant b")
    assert found
    assert {key for span in found for key in span.keys} == set(keys)


def test_a_parent_of_another_scope_is_not_joined() -> None:
    spans, stored = index(), words(1, 160)
    mine, other = keys_of(stored), put(spans, stored, b"other")
    spans.store(mine[5:], stored[80:], BLOCK, scope=SCOPE, first_block=5, parent=other[4])
    (found,) = spans.find(stored, scope=SCOPE)
    assert (found.start, found.stop, found.keys) == (80, 160, tuple(mine[5:]))


def test_a_parent_that_is_not_the_block_before_is_not_joined() -> None:
    spans, stored = index(), words(1, 160)
    keys = put(spans, stored[:64])
    moved = keys_of(words(2, 16))
    spans.store(moved, stored[64:80], BLOCK, scope=SCOPE, first_block=7, parent=keys[3])
    found = spans.find(stored, scope=SCOPE)
    assert [(s.start, s.stop, s.source_start) for s in found] == [(0, 64, 0), (64, 80, 112)]


def test_what_stands_behind_a_different_token_of_the_same_block_is_found() -> None:
    spans, stored = index(), words(1, 512)
    spans.store(chain_keys(digest(b"s"), stored, 256), stored, 256, scope=SCOPE)
    prompt = list(stored)
    for at in (100, 200, 300, 400):
        prompt[at] += 1
    found = [(s.start, s.stop) for s in spans.find(prompt, scope=SCOPE)]
    assert found == [(0, 100), (101, 200), (201, 300), (301, 400), (401, 512)]


def test_a_shorter_span_that_alone_reaches_further_is_given() -> None:
    """Its beginning is stored so often that more places of that are not worth giving."""
    spans, passage, more = index(), words(1, 128), words(2, 64)
    for n in range(6):
        put(spans, [*words(100 + n, 16), *passage])
    put(spans, [*words(50, 16), *passage[64:], *more])
    prompt = [*passage, *more[:40], *words(3, 60)]
    found = spans.find(prompt, scope=SCOPE)
    assert (64, 168) in [(s.start, s.stop) for s in found]


def test_one_different_token_ends_a_span() -> None:
    spans, stored = index(), words(1, 160)
    put(spans, stored)
    prompt = list(stored)
    prompt[70] += 1
    assert [(s.start, s.stop) for s in spans.find(prompt, scope=SCOPE)] == [(0, 70), (71, 160)]


def test_a_span_runs_on_through_whatever_branch_the_prompt_takes() -> None:
    """Forty continuations of one system prompt: more than are tried behind a block."""
    spans, system = index(), words(1, 64)
    tails = [words(100 + n, 64) for n in range(40)]
    for tail in tails:
        put(spans, [*system, *tail])
    for tail in tails:
        prompt = [*words(2, 11), *system, *tail]
        assert (11, 139, 0) in [
            (s.start, s.stop, s.source_start) for s in spans.find(prompt, scope=SCOPE)
        ]


def test_a_sequence_stored_step_by_step_is_found_as_if_stored_at_once() -> None:
    stored = words(1, 480)
    keys = keys_of(stored)
    whole, steps = index(), index()
    put(whole, stored)
    for first in range(0, len(keys), 3):
        steps.store(
            keys[first : first + 3],
            stored[first * BLOCK : (first + 3) * BLOCK],
            BLOCK,
            scope=SCOPE,
            first_block=first,
            parent=keys[first - 1] if first else None,
        )
    assert whole.stats().blocks == steps.stats().blocks == 30
    for start in range(0, 400, 7):
        part = stored[start : start + whole.certain_tokens]
        prompt = [*words(2, 5), *part, *words(3, 20)]
        assert spans_of(whole, prompt) == spans_of(steps, prompt) == [(5, 5 + len(part), start)]


def spans_of(spans: SpanIndex, prompt: list[int]) -> list[tuple[int, int, int]]:
    return [(s.start, s.stop, s.source_start) for s in spans.find(prompt, scope=SCOPE)]


def test_a_longer_sequence_may_be_stored_whole_again() -> None:
    spans, stored = index(), words(1, 320)
    put(spans, stored[:160])
    keys = keys_of(stored)
    assert spans.store(keys, stored, BLOCK, scope=SCOPE) == 10
    assert spans.store(keys, stored, BLOCK, scope=SCOPE) == 0
    for start in range(100, 200, 3):
        part = stored[start : start + spans.certain_tokens]
        assert spans_of(spans, part) == [(0, len(part), start)]


def test_the_cap_evicts_what_was_stored_longest_ago() -> None:
    spans = index(most_tokens=10 * BLOCK)
    old, middle, new = (words(n, 4 * BLOCK) for n in (1, 2, 3))
    put(spans, old)
    put(spans, middle)
    put(spans, old)  # stored again, so it is young now
    put(spans, new)
    stats = spans.stats()
    assert (stats.blocks, stats.tokens, stats.evicted_blocks) == (10, 160, 2)
    assert spans_of(spans, old) == [(0, 64, 0)]
    assert spans_of(spans, new) == [(0, 64, 0)]
    assert spans_of(spans, middle) == [(32, 64, 32)]
    put(spans, words(4, 400))  # more than fits at all: its beginning stays
    assert spans.stats().blocks == 10
    assert spans_of(spans, words(4, 400)) == [(0, 160, 0)]


def test_skipped_tokens_are_not_found_again() -> None:
    spans, stored = index(), words(1, 320)
    put(spans, stored)
    (found,) = spans.find(stored, scope=SCOPE, skip_tokens=100)
    assert (found.start, found.stop, found.source_start) == (100, 320, 100)
    assert spans.find(stored, scope=SCOPE, skip_tokens=320) == []
    assert spans.find(stored, scope=SCOPE, skip_tokens=1000) == []


def test_of_text_stored_often_only_a_few_places_are_given() -> None:
    spans, passage = index(owners=64), words(1, 64)
    for n in range(40):
        put(spans, [*words(100 + n, 16), *passage])
    assert len(spans.find(passage, scope=SCOPE)) == 4


def test_text_that_repeats_itself_ends_within_the_budget() -> None:
    """The worst a prompt can do: every window equal to every stored one."""
    spans = index()
    put(spans, [7] * 20_000)
    found = spans.find([7] * 20_000, scope=SCOPE)
    assert found
    assert all(s.tokens >= 16 for s in found)
    assert spans.stats().curtailed_lookups == 1
    assert spans.stats().marks <= 8


def test_a_block_that_comes_back_alone_is_joined_to_what_follows_it() -> None:
    """Its successor stayed, with marks of its own; those across the seam have to come back."""
    spans, stored = index(), words(1, 96)
    keys = put(spans, stored)
    spans.forget(keys[2:3])
    put(spans, stored[:48])
    put(spans, stored)
    for start in range(96 - spans.certain_tokens):
        part = stored[start : start + spans.certain_tokens]
        assert spans_of(spans, part) == [(0, len(part), start)]


def test_a_replaced_block_is_found_with_its_new_tokens_only() -> None:
    """A key says what its tokens are; if it ever lied, the last word counts."""
    spans, one, two = index(), words(1, 96), words(2, 96)
    keys = put(spans, one)
    spans.store(keys, two, BLOCK, scope=SCOPE)
    assert spans.find(one, scope=SCOPE) == []
    assert spans_of(spans, two) == [(0, 96, 0)]
    assert spans.stats().blocks == len(keys)


def test_calls_that_make_no_sense_are_refused() -> None:
    spans, stored = index(), words(1, 64)
    keys = put(spans, stored)
    with pytest.raises(ValueError, match="blocks of 32"):
        spans.store(keys, stored, 32, scope=SCOPE)
    with pytest.raises(ValueError, match="32 bytes"):
        spans.store([b"short"], stored, BLOCK, scope=SCOPE)
    with pytest.raises(ValueError, match="comes twice"):
        spans.store([keys[0]] * 4, [5] * 64, BLOCK, scope=SCOPE)
    with pytest.raises(ValueError, match="at least 1 token"):
        spans.store(keys, stored, 0, scope=SCOPE)
    with pytest.raises(OverflowError):
        spans.store(keys, [-1] * 64, BLOCK, scope=SCOPE)
    with pytest.raises(OverflowError):
        spans.find([2**32], scope=SCOPE)
    assert spans.store([], [], BLOCK, scope=SCOPE) == 0
    assert spans.store(keys, stored[:15], BLOCK, scope=SCOPE) == 0


def test_an_index_without_blocks_answers() -> None:
    spans = index()
    assert spans.find(words(1, 64), scope=SCOPE) == []
    assert spans.forget([b"\0" * 32]) == 0
    spans.clear()
    assert spans.stats().blocks == 0


def test_threads_may_store_find_and_forget_at_once() -> None:
    spans, faults = index(most_tokens=2000), []

    def work(seed: int) -> None:
        try:
            for n in range(60):
                stored = words(seed * 7 + n % 9, 200)
                keys = put(spans, stored)
                for found in spans.find(stored, scope=SCOPE):
                    assert set(found.keys) <= set(keys)
                spans.forget(keys[::2])
        except AssertionError as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert faults == []
    assert spans.stats().tokens <= 2000


def test_a_part_of_a_span_keeps_the_blocks_that_hold_it() -> None:
    spans, stored = index(), words(1, 320)
    keys = put(spans, stored)
    (found,) = spans.find([*words(2, 3), *stored[5:300]], scope=SCOPE)
    held = held_by(keys, stored)
    for start, stop in ((3, 298), (4, 14), (14, 30), (13, 15), (297, 298)):
        part = found.part(start, stop)
        assert rows(part, held) == stored[start + 2 : stop + 2]
        assert len(part.keys) == (part.first_row + part.tokens + BLOCK - 1) // BLOCK
    for bad in ((2, 10), (10, 10), (12, 11), (3, 299)):
        with pytest.raises(ValueError, match="no part"):
            found.part(*bad)


def test_the_promise_of_the_cutter_is_the_promise_of_the_index() -> None:
    assert index().certain_tokens == 48
    assert index(cutter=Cutter(8, 9)).certain_tokens == 16
    assert index(cutter=Cutter(8, 9), least_tokens=40).certain_tokens == 40
