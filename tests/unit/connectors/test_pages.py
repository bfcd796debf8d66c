"""Strided page maps against numpy: every known shape, through the mover itself."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvist.connectors.pages import (
    RegionMap,
    TensorView,
    check_bijective,
    longest_run,
    page_map,
    strided_map,
)
from kvist.core.errors import LayoutError
from kvist.core.layout import BlockLayout, HeadSlice
from kvist.native import Direction, move_pages

Floats = npt.NDArray[np.float32]

PAGES, HEADS, TOKENS, DIM, LAYERS = 5, 4, 8, 16, 3

# name → (shape, axes that bring it to [page, kind, head, token, dim] after `_split`)
SHAPES = {
    "HND, K and V side by side": ((PAGES, HEADS, TOKENS, 2 * DIM), "phtc"),
    "NHD, K and V side by side": ((PAGES, TOKENS, HEADS, 2 * DIM), "pthc"),
    "kind first, NHD": ((2, PAGES, TOKENS, HEADS, DIM), "kpthd"),
    "kind first, HND": ((2, PAGES, HEADS, TOKENS, DIM), "kphtd"),
    "page first, NHD": ((PAGES, 2, TOKENS, HEADS, DIM), "pkthd"),
    "page first, HND": ((PAGES, 2, HEADS, TOKENS, DIM), "pkhtd"),
}


def _logical(tensor: Floats, axes: str) -> Floats:
    """`[page, kind, head, token, dim]`: what the tensor means, by numpy alone."""
    if axes.endswith("c"):
        tensor = np.stack(np.split(tensor, 2, axis=-1), axis=-2)
        axes = axes[:-1] + "kd"
    return tensor.transpose([axes.index(a) for a in "pkhtd"])


def _view(tensor: Floats) -> TensorView:
    return TensorView(tensor.shape, tuple(s // tensor.itemsize for s in tensor.strides))


def _random(shape: tuple[int, ...], seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _move(
    direction: Direction,
    tensors: list[Floats],
    block: Floats,
    layout: BlockLayout,
    heads: HeadSlice,
    row: list[int],
    page_tokens: int = TOKENS,
) -> None:
    region = strided_map(_view(tensors[0]), layout, heads.count, page_tokens)
    found = page_map(region, [t.ctypes.data for t in tensors], layout, heads, page_tokens)
    slots = np.array([block.ctypes.data], np.uint64)
    move_pages(direction, slots, np.array([row], np.int64), found)


def _canonical(tensors: list[Floats], axes: str, row: list[int]) -> Floats:
    """`[layer, kind, head, token, dim]` of the block on the pages of `row`."""
    return np.stack([np.concatenate([_logical(t, axes)[p] for p in row], axis=2) for t in tensors])


@pytest.mark.parametrize("name", SHAPES)
def test_gather_gives_the_canonical_block_of_every_shape(name: str) -> None:
    shape, axes = SHAPES[name]
    tensors = [_random(shape, layer) for layer in range(LAYERS)]
    layout = BlockLayout(LAYERS, HEADS, DIM, 2 * TOKENS, "float32")
    block = np.zeros((LAYERS, 2, HEADS, 2 * TOKENS, DIM), np.float32)
    assert block.nbytes == layout.block_bytes
    _move(Direction.GATHER, tensors, block, layout, HeadSlice(0, HEADS), [3, 1])
    np.testing.assert_array_equal(block, _canonical(tensors, axes, [3, 1]))


@pytest.mark.parametrize("name", SHAPES)
def test_scatter_undoes_gather_and_touches_no_other_page(name: str) -> None:
    shape, axes = SHAPES[name]
    tensors = [_random(shape, layer) for layer in range(LAYERS)]
    before = [t.copy() for t in tensors]
    layout = BlockLayout(LAYERS, HEADS, DIM, 2 * TOKENS, "float32")
    block = _random((LAYERS, 2, HEADS, 2 * TOKENS, DIM), 99)
    _move(Direction.SCATTER, tensors, block, layout, HeadSlice(0, HEADS), [4, 0])
    np.testing.assert_array_equal(_canonical(tensors, axes, [4, 0]), block)
    for now, then in zip(tensors, before, strict=True):
        np.testing.assert_array_equal(_logical(now, axes)[1:4], _logical(then, axes)[1:4])


@pytest.mark.parametrize("name", ["HND, K and V side by side", "page first, NHD"])
def test_tensor_with_gaps_between_pages_is_followed_by_its_strides(name: str) -> None:
    shape, axes = SHAPES[name]
    wide = _random((shape[0] * 2, *shape[1:]))
    tensor = wide[::2]
    layout = BlockLayout(1, HEADS, DIM, TOKENS, "float32")
    block = np.zeros((1, 2, HEADS, TOKENS, DIM), np.float32)
    _move(Direction.GATHER, [tensor], block, layout, HeadSlice(0, HEADS), [2])
    np.testing.assert_array_equal(block[0], _logical(tensor, axes)[2])


def test_latent_of_mla_has_one_kind_and_no_head() -> None:
    tensor = _random((PAGES, TOKENS, 24))
    layout = BlockLayout(1, 1, 24, 2 * TOKENS, "float32", kinds=1)
    block = np.zeros((2 * TOKENS, 24), np.float32)
    _move(Direction.GATHER, [tensor], block, layout, HeadSlice(0, 1), [2, 4])
    np.testing.assert_array_equal(block, np.concatenate([tensor[2], tensor[4]]))


def test_two_ranks_fill_one_block_and_one_rank_reads_it() -> None:
    layout = BlockLayout(LAYERS, HEADS, DIM, TOKENS, "float32")
    block = np.zeros((LAYERS, 2, HEADS, TOKENS, DIM), np.float32)
    half = HEADS // 2
    parts = []
    for rank in range(2):
        tensors = [_random((PAGES, half, TOKENS, 2 * DIM), 10 * rank + n) for n in range(LAYERS)]
        _move(Direction.GATHER, tensors, block, layout, layout.head_slice(rank, 2), [rank + 1])
        parts.append(_canonical(tensors, "phtc", [rank + 1]))
    np.testing.assert_array_equal(block, np.concatenate(parts, axis=2))
    whole = [np.zeros((PAGES, TOKENS, HEADS, 2 * DIM), np.float32) for _ in range(LAYERS)]
    _move(Direction.SCATTER, whole, block, layout, HeadSlice(0, HEADS), [0])
    np.testing.assert_array_equal(_canonical(whole, "pthc", [0]), block)


@pytest.mark.parametrize("shape", [(PAGES, 3, 8, 32), (PAGES, 8), (3, 5, 8, 4, 16), (5, 4, 9, 32)])
def test_unknown_shape_is_refused_by_name(shape: tuple[int, ...]) -> None:
    layout = BlockLayout(1, HEADS, DIM, TOKENS, "float32")
    with pytest.raises(LayoutError, match="cannot read a KV tensor of shape"):
        strided_map(_view(_random(shape)), layout, HEADS, TOKENS)


def test_map_in_which_two_elements_share_a_place_is_refused() -> None:
    offsets = np.array([[0, 1, 2, 3], [4, 5, 6, 3]], np.int64)
    with pytest.raises(LayoutError, match="one-to-one"):
        check_bijective(RegionMap(offsets, np.zeros((2, 1), np.int64), 8))


@pytest.mark.parametrize(
    ("row", "run"),
    [(range(8), 8), ([0, 1, 4, 5, 2, 3, 6, 7], 2), ([0, 2, 1, 3, 4, 5, 6, 7], 1), (range(6), 2)],
)
def test_longest_run_is_what_every_unit_keeps_together(row: list[int], run: int) -> None:
    offsets = np.array([list(row), list(row)], np.int64)
    assert longest_run(offsets) == run


def test_head_region_is_one_run_where_the_engine_keeps_a_head_together() -> None:
    layout = BlockLayout(1, HEADS, DIM, TOKENS, "float32")
    apart = strided_map(_view(_random(SHAPES["kind first, HND"][0])), layout, HEADS, TOKENS)
    beside = strided_map(_view(_random(SHAPES["kind first, NHD"][0])), layout, HEADS, TOKENS)
    assert longest_run(apart.offsets) == TOKENS * DIM
    assert longest_run(beside.offsets) == DIM
