"""`move_pages` with checksums, past the caches and in tiles: the fast ways give the same bytes."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_doubles import (
    Engine,
    addresses,
    empty_blocks,
    expected,
    filled,
    shuffled_engine,
)

from kvist.native.pagemap import Direction, PageMap


@settings(max_examples=60, deadline=None)
@given(
    unit_bytes=st.sampled_from([1, 4, 16, 112, 256]),
    units=st.integers(1, 40),
    is_plain=st.booleans(),
    heads=st.integers(1, 3),
    other_heads=st.integers(0, 2),
    columns=st.integers(1, 3),
    direction=st.sampled_from(list(Direction)),
    seed=st.integers(0, 2**16),
)
def test_a_move_with_checksums_moves_the_same_and_sums_what_stands_in_the_slots(
    native: ModuleType,
    unit_bytes: int,
    units: int,
    is_plain: bool,
    heads: int,
    other_heads: int,
    columns: int,
    direction: Direction,
    seed: int,
) -> None:
    engine = shuffled_engine(
        heads=heads,
        units=units,
        unit_bytes=unit_bytes,
        page_count=8,
        seed=seed,
        first_head=other_heads // 2,
        block_heads=heads + other_heads,
    )
    if is_plain:
        engine.page_map.tables[:] = np.arange(units, dtype=np.uint32) * unit_bytes
    rng = np.random.default_rng(seed)
    pages = rng.permutation(8)[: 2 * columns].reshape(2, columns).astype(np.int64)
    pages[rng.random(pages.shape) < 0.1] = -1
    blocks = filled(empty_blocks(engine.page_map, 2, columns).shape, seed)
    plain_blocks, before = blocks.copy(), engine.memory.copy()
    native.move_pages(direction, addresses(plain_blocks), pages, engine.page_map)
    plain_memory = engine.memory.copy()
    engine.memory[:] = before
    sums = native.move_pages_checksum(direction, addresses(blocks), pages, engine.page_map, 2)
    assert (blocks == plain_blocks).all()
    assert (engine.memory == plain_memory).all()
    assert sums == [native.checksum(block) for block in blocks]


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("offset", [0, 24])
def test_large_heads_are_moved_and_summed_whether_aligned_or_not(
    native: ModuleType, direction: Direction, offset: int
) -> None:
    """Runs of whole cache lines go past the caches; others, and a place off a line, do not."""
    for region in (2048, 2560, 4096, 4160):
        memory = filled((6 * region + 128,), region)
        start = -memory.ctypes.data % 64 + offset
        page_map = PageMap(
            np.array([memory.ctypes.data + start], np.uint64),
            2 * region,
            np.zeros((2, 1), np.uint32),
            np.array([[0], [region]], np.int64),
            region,
            1,
            0,
            1,
        )
        blocks = filled((1, page_map.block_bytes(3) + 64), 3)
        slots = addresses(blocks) + np.uint64(-int(addresses(blocks)[0]) % 64)
        pages = np.array([[2, 0, 1]], np.int64)
        [got] = native.move_pages_checksum(direction, slots, pages, page_map, 1)
        at = int(slots[0]) - blocks.ctypes.data
        block = blocks[0, at : at + page_map.block_bytes(3)]
        engine = memory[start : start + 6 * region].reshape(3, 2, region)
        assert (block.reshape(2, 3, region) == engine[[2, 0, 1]].transpose(1, 0, 2)).all()
        assert got == native.checksum(block)


def test_a_move_with_checksums_refuses_what_a_move_refuses(native: ModuleType) -> None:
    engine = shuffled_engine(units=8, unit_bytes=4)
    slots = addresses(empty_blocks(engine.page_map, 2, 1))
    with pytest.raises(ValueError, match="length"):
        native.move_pages_checksum(
            Direction.GATHER, slots, np.zeros((1, 1), np.int64), engine.page_map
        )
    with pytest.raises(TypeError):
        native.move_pages_checksum(
            Direction.GATHER, slots, np.zeros((2, 1), np.int32), engine.page_map
        )
    none = np.zeros((0, 1), np.int64)
    sums = native.move_pages_checksum(Direction.GATHER, slots[:0], none, engine.page_map)
    assert sums == []


def packed_table(shape: str, tokens: int, dim: int) -> npt.NDArray[np.uint32]:
    """Byte offsets of 2-byte elements `[token][dim]` in the packings of vLLM's CPU attention."""
    token, d = np.meshgrid(np.arange(tokens), np.arange(dim), indexing="ij")
    if shape == "turned":
        at = d * tokens + token
    elif shape == "turned-pairs":  # groups of 16 tokens, pairs of dimensions
        at = token // 16 * (16 * dim) + d // 2 * 32 + token % 16 * 2 + d % 2
    else:
        at = token // 2 * (2 * dim) + d * 2 + token % 2
    return (at.reshape(1, -1) * 2).astype(np.uint32)


@pytest.mark.parametrize("shape", ["turned", "turned-pairs", "woven"])
@pytest.mark.parametrize(("tokens", "dim"), [(16, 8), (32, 24), (16, 128), (16, 6), (48, 64)])
def test_packed_pages_are_moved_as_their_table_says(
    native: ModuleType, shape: str, tokens: int, dim: int
) -> None:
    table, region = packed_table(shape, tokens, dim), 2 * tokens * dim
    engine = shuffled_engine(kinds=1, units=tokens * dim, unit_bytes=2)
    m = engine.page_map
    tables = np.ascontiguousarray(table)
    page_map = PageMap(
        m.layers, m.page_stride_bytes, tables, m.head_offsets, 2, m.block_heads, 0, tokens
    )
    assert page_map.region_bytes == region
    engine = Engine(engine.memory, page_map)
    pages = np.array([[3, 1]], np.int64)
    blocks = empty_blocks(page_map, 1, 2)
    want = expected(engine, pages, blocks)
    sums = native.move_pages_checksum(Direction.GATHER, addresses(blocks), pages, page_map)
    assert (blocks == want).all()
    assert sums == [native.checksum(want[0])]
    before = engine.memory.copy()
    engine.memory[:, [3, 1], : 2 * region] = 0
    native.move_pages(Direction.SCATTER, addresses(blocks), pages, page_map)
    assert (engine.memory == before).all()


def test_one_unit_out_of_place_is_not_taken_for_a_tile(native: ModuleType) -> None:
    for shape in ("turned", "turned-pairs", "woven"):
        table = packed_table(shape, 16, 16)
        table[0, [77, 201]] = table[0, [201, 77]]
        engine = shuffled_engine(kinds=1, heads=1, units=256, unit_bytes=2)
        m = engine.page_map
        page_map = PageMap(m.layers, m.page_stride_bytes, table, m.head_offsets, 2, 1, 0, 16)
        engine = Engine(engine.memory, page_map)
        pages = np.array([[2]], np.int64)
        blocks = empty_blocks(page_map, 1, 1)
        native.move_pages(Direction.GATHER, addresses(blocks), pages, page_map)
        assert (blocks == expected(engine, pages, empty_blocks(page_map, 1, 1))).all()
