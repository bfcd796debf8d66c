"""The pure plan: geometry, key chains, spans and save cursors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.connectors.plan import (
    SKIP_PAGE,
    BlockGeometry,
    KeyChain,
    LoadSpan,
    SaveCursor,
    load_span,
)
from kvist.core.errors import UnsupportedError
from kvist.native import chain_keys

SEED = bytes(range(32))


@pytest.mark.parametrize(("block", "page"), [(32, 64), (48, 32), (32, 0)])
def test_block_that_is_no_multiple_of_the_page_is_refused(block: int, page: int) -> None:
    with pytest.raises(UnsupportedError, match="not a multiple"):
        BlockGeometry(block, page)


def test_page_row_names_every_page_of_a_block() -> None:
    geometry = BlockGeometry(128, 32)
    table = [7, 3, 9, 4, 20, 21, 22, 23]
    assert geometry.pages_per_block == 4
    assert geometry.page_row(0, table) == [7, 3, 9, 4]
    assert geometry.page_row(1, table) == [20, 21, 22, 23]


def test_page_row_skips_what_the_engine_has_and_what_it_has_not_allocated() -> None:
    geometry = BlockGeometry(128, 32)
    table = [7, 3, 9, 4, 20]
    assert geometry.page_row(0, table, from_token=64) == [SKIP_PAGE, SKIP_PAGE, 9, 4]
    assert geometry.page_row(1, table) == [20, SKIP_PAGE, SKIP_PAGE, SKIP_PAGE]
    # a page that is computed in part is loaded whole
    assert geometry.page_row(0, table, from_token=33) == [SKIP_PAGE, SKIP_PAGE, 9, 4]


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=200),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    block_tokens=st.sampled_from([1, 4, 16]),
    extras=st.dictionaries(st.integers(0, 12), st.binary(min_size=32, max_size=32), max_size=4),
)
def test_chain_that_grows_step_by_step_equals_the_whole(
    tokens: list[int], cuts: list[int], block_tokens: int, extras: dict[int, bytes]
) -> None:
    whole = chain_keys(SEED, tokens, block_tokens, extras)
    chain = KeyChain(SEED, block_tokens, chain_keys, extras)
    for cut in sorted(min(c, len(tokens)) for c in cuts):
        assert chain.extend(tokens[:cut]) == whole[: cut // block_tokens]
    assert chain.extend(tokens) == whole


def test_chain_hashes_each_block_once() -> None:
    seen: list[int] = []

    def counting(seed: bytes, tokens: list[int], block_tokens: int, extras: object) -> list[bytes]:
        seen.append(len(tokens) // block_tokens)
        return chain_keys(seed, tokens, block_tokens, None)

    chain = KeyChain(SEED, 4, counting)
    for length in (3, 4, 11, 12, 12, 20):
        chain.extend(list(range(length)))
    assert seen == [1, 1, 1, 2]


def test_parent_of_a_block_is_the_key_before_it() -> None:
    chain = KeyChain(SEED, 2, chain_keys)
    keys = chain.extend([1, 2, 3, 4])
    assert chain.parent(0) is None
    assert chain.parent(1) == keys[0]


@given(
    total=st.integers(0, 500),
    computed_pages=st.integers(0, 40),
    pages_per_block=st.integers(1, 4),
    leave=st.integers(0, 2),
)
def test_span_never_asks_for_what_is_computed_nor_for_what_must_be_left(
    total: int, computed_pages: int, pages_per_block: int, leave: int
) -> None:
    geometry = BlockGeometry(16 * pages_per_block, 16)
    computed = min(computed_pages * 16, total)
    span = load_span(total, computed, geometry, leave_tokens=leave)
    assert span.first * geometry.block_tokens <= computed
    assert span.last * geometry.block_tokens <= max(0, total - leave)
    assert span.blocks == 0 or (span.first + 1) * geometry.block_tokens > computed


def test_span_counts_only_tokens_beyond_those_computed() -> None:
    span = LoadSpan(first=1, last=4, computed_tokens=96)
    assert span.blocks == 3
    assert span.tokens(0, 64) == 0
    assert span.tokens(1, 64) == 32
    assert span.tokens(3, 64) == 160


def test_cursor_offers_each_full_block_once() -> None:
    cursor = SaveCursor()
    assert cursor.full_blocks(31, 100, 32) == range(0)
    assert cursor.full_blocks(70, 100, 32) == range(2)
    cursor.advance(2)
    assert cursor.full_blocks(70, 100, 32) == range(2, 2)
    assert cursor.full_blocks(96, 100, 32) == range(2, 3)


def test_cursor_never_counts_draft_tokens_that_may_be_rejected() -> None:
    """Four drafts are computed beyond the 62 tokens that are known: the block is not full yet."""
    cursor = SaveCursor()
    assert cursor.full_blocks(66, 62, 32) == range(1)
    assert cursor.full_blocks(66, 64, 32) == range(2)


def test_cursor_does_not_move_back_after_a_preemption() -> None:
    cursor = SaveCursor(next_block=3)
    assert len(cursor.full_blocks(32, 200, 32)) == 0
    cursor.advance(1)
    assert cursor.next_block == 3
