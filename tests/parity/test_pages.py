"""`move_pages`: both implementations against plain numpy models of engine layouts."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_doubles import (
    Engine,
    addresses,
    empty_blocks,
    expected,
    shuffled_engine,
)

from kvist.native.pagemap import Direction, PageMap


@settings(max_examples=60, deadline=None)
@given(
    unit_bytes=st.sampled_from([1, 2, 4, 8, 16, 32, 48, 64, 112]),
    units=st.integers(1, 40),
    kinds=st.integers(1, 2),
    heads=st.integers(1, 3),
    first_head=st.integers(0, 2),
    columns=st.integers(1, 3),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_gather_is_the_formula_and_scatter_its_inverse(
    native: ModuleType,
    unit_bytes: int,
    units: int,
    kinds: int,
    heads: int,
    first_head: int,
    columns: int,
    threads: int,
    seed: int,
) -> None:
    engine = shuffled_engine(
        kinds=kinds,
        heads=heads,
        units=units,
        unit_bytes=unit_bytes,
        page_count=8,
        seed=seed,
        first_head=first_head,
        block_heads=first_head + heads + 1,
    )
    rng = np.random.default_rng(seed)
    pages = rng.permutation(8)[: 2 * columns].reshape(2, columns).astype(np.int64)
    pages[rng.random(pages.shape) < 0.2] = -1
    blocks = empty_blocks(engine.page_map, 2, columns)
    want = expected(engine, pages, blocks)
    native.move_pages(Direction.GATHER, addresses(blocks), pages, engine.page_map, threads=threads)
    assert (blocks == want).all()

    before = engine.memory.copy()
    moved = [int(p) for p in pages.ravel() if p >= 0]
    payload = kinds * heads * units * unit_bytes
    engine.memory[:, moved, :payload] = 0
    native.move_pages(Direction.SCATTER, addresses(blocks), pages, engine.page_map, threads)
    assert (engine.memory == before).all()


def test_two_ranks_fill_one_block(native: ModuleType) -> None:
    left = shuffled_engine(units=16, unit_bytes=2, block_heads=4, first_head=0, seed=1)
    right = shuffled_engine(units=16, unit_bytes=2, block_heads=4, first_head=2, seed=2)
    pages = np.array([[0, 3], [4, 1]], np.int64)
    blocks = empty_blocks(left.page_map, 2, 2)
    want = expected(right, pages, expected(left, pages, blocks))
    for rank in (left, right):
        native.move_pages(Direction.GATHER, addresses(blocks), pages, rank.page_map)
    assert (blocks == want).all()


def test_one_sub_page_at_a_time_completes_a_block(native: ModuleType) -> None:
    engine = shuffled_engine(units=8, unit_bytes=4)
    blocks = empty_blocks(engine.page_map, 1, 2)
    for pages in ([[2, -1]], [[-1, 0]]):
        native.move_pages(
            Direction.GATHER, addresses(blocks), np.array(pages, np.int64), engine.page_map
        )
    both = np.array([[2, 0]], np.int64)
    assert (blocks == expected(engine, both, blocks)).all()


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_strided_layouts_match_a_transpose(native: ModuleType, order: str) -> None:
    """vLLM's (2, pages, tokens, heads, dim) or (2, pages, heads, tokens, dim), u16 elements."""
    pages_n, tokens, heads, dim, layers = 6, 4, 3, 16, 2
    shape = (tokens, heads, dim) if order == "NHD" else (heads, tokens, dim)
    rng = np.random.default_rng(5)
    cache = rng.integers(0, 2**16, (layers, 2, pages_n, *shape), np.uint16)
    page_bytes = tokens * heads * dim * 2
    token_stride, head_stride = (heads * dim, dim) if order == "NHD" else (dim, tokens * dim)
    page_map = PageMap(
        layers=np.array([layer.ctypes.data for layer in cache], np.uint64),
        page_stride_bytes=page_bytes,
        tables=np.tile(np.arange(tokens, dtype=np.uint32) * token_stride * 2, (2, 1)),
        head_offsets=np.array(
            [
                [k * pages_n * page_bytes + h * head_stride * 2 for h in range(heads)]
                for k in (0, 1)
            ],
            np.int64,
        ),
        unit_bytes=dim * 2,
        block_heads=heads,
        first_head=0,
        page_tokens=tokens,
    )
    ids = np.array([[5, 0], [2, 3]], np.int64)
    blocks = empty_blocks(page_map, 2, 2)
    native.move_pages(Direction.GATHER, addresses(blocks), ids, page_map, threads=2)
    got = blocks.view(np.uint16).reshape(2, layers, 2, heads, 2 * tokens, dim)
    for i in range(2):
        picked = cache[:, :, ids[i]]  # (layers, kinds, columns, *shape)
        if order == "NHD":
            picked = picked.transpose(0, 1, 4, 2, 3, 5)
        else:
            picked = picked.transpose(0, 1, 3, 2, 4, 5)
        assert (got[i] == picked.reshape(layers, 2, heads, 2 * tokens, dim)).all()


def test_runs_that_are_not_a_power_of_two_are_joined_rightly(native: ModuleType) -> None:
    """Twelve units in runs of three in one kind and six in the other."""
    engine = shuffled_engine(units=12, unit_bytes=2)
    threes = [18, 20, 22, 0, 2, 4, 12, 14, 16, 6, 8, 10]
    sixes = [12, 14, 16, 18, 20, 22, 0, 2, 4, 6, 8, 10]
    m = engine.page_map
    page_map = PageMap(
        m.layers,
        m.page_stride_bytes,
        np.array([threes, sixes], np.uint32),
        m.head_offsets,
        2,
        2,
        0,
        1,
    )
    joined = Engine(engine.memory, page_map)
    pages = np.array([[1], [4]], np.int64)
    blocks = empty_blocks(page_map, 2, 1)
    want = expected(joined, pages, blocks)
    native.move_pages(Direction.GATHER, addresses(blocks), pages, page_map)
    assert (blocks == want).all()


def test_nothing_to_move_is_no_error(native: ModuleType) -> None:
    engine = shuffled_engine(units=4, unit_bytes=2)
    none = np.empty((0,), np.uint64)
    native.move_pages(Direction.GATHER, none, np.empty((0, 2), np.int64), engine.page_map)


def test_bad_calls_are_refused_before_anything_moves(native: ModuleType) -> None:
    engine = shuffled_engine(units=4, unit_bytes=2)
    blocks = empty_blocks(engine.page_map, 1, 1)
    slots, pages = addresses(blocks), np.zeros((1, 1), np.int64)
    with pytest.raises(ValueError, match="threads"):
        native.move_pages(Direction.GATHER, slots, pages, engine.page_map, threads=0)
    with pytest.raises(ValueError, match="length"):
        native.move_pages(Direction.GATHER, slots, np.zeros((2, 1), np.int64), engine.page_map)
    with pytest.raises(ValueError, match="below -1"):
        native.move_pages(Direction.GATHER, slots, pages - 2, engine.page_map)
    for bad_slots, bad_pages in (
        (slots.astype(np.int64), pages),
        (slots, pages.astype(np.int32)),
        (slots, pages[0]),
        (slots, np.zeros((1, 2, 1), np.int64)),
        (slots, np.zeros((1, 4), np.int64)[:, ::2]),
    ):
        with pytest.raises(TypeError):
            native.move_pages(Direction.GATHER, bad_slots, bad_pages, engine.page_map)
    assert (blocks == 0xEE).all()


GOOD = {
    "layers": np.array([4096], np.uint64),
    "page_stride_bytes": 64,
    "tables": np.zeros((2, 4), np.uint32),
    "head_offsets": np.zeros((2, 2), np.int64),
    "unit_bytes": 2,
    "block_heads": 2,
    "first_head": 0,
    "page_tokens": 4,
}


@pytest.mark.parametrize(
    "change",
    [
        {"layers": np.array([4096], np.int64)},
        {"layers": np.empty(0, np.uint64)},
        {"tables": np.zeros(4, np.uint32)},
        {"tables": np.zeros((4, 2), np.uint32).T},
        {"head_offsets": np.zeros((1, 2), np.int64)},
        {"head_offsets": np.zeros((2, 2), np.int32)},
        {"unit_bytes": 0},
        {"unit_bytes": 3},
        {"unit_bytes": 24},
        {"first_head": 1},
        {"first_head": -1},
        {"page_tokens": 3},
        {"page_tokens": 0},
    ],
    ids=str,
)
def test_page_map_refuses_a_contradiction(change: dict[str, object]) -> None:
    PageMap(**GOOD)
    with pytest.raises(ValueError, match=next(iter(change)).split("_")[0]):
        PageMap(**{**GOOD, **change})
