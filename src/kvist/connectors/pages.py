"""How an engine's pages map to the canonical block: from tensor shapes, or learned by writing.

A layout is described per head region: for each kind (K, V) and head, where in a page each run of
canonical elements `[token][head_dim]` lies. Strided layouts (NHD, HND, one tensor or K and V
apart, MLA latents) follow from shape and strides. Packed layouts (vLLM's CPU attention permutes K
and V by instruction set and dtype) are learned: known values are written through the engine's own
operation and found again in the bytes. Either way the result is one `native.PageMap`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvist.core.errors import LayoutError
from kvist.core.layout import BlockLayout, HeadSlice
from kvist.native import PageMap


@dataclass(frozen=True, slots=True)
class RegionMap:
    """Element offsets inside a page.

    `offsets[kind, token * head_dim + dim]` is the element offset within a head region and
    `heads[kind, head]` the region's element offset within the page; both count elements.
    """

    offsets: NDArray[np.int64]
    heads: NDArray[np.int64]
    page_stride: int


@dataclass(frozen=True, slots=True)
class TensorView:
    """Shape and strides (in elements) of one layer's KV tensor, as the engine gives it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


def strided_map(view: TensorView, layout: BlockLayout, heads: int, page_tokens: int) -> RegionMap:
    """The map of a tensor whose elements lie where its strides say.

    Known shapes, P pages, H heads, N tokens a page, D head size:
    `[P, H, N, 2D]` and `[P, N, H, 2D]` (K and V side by side), `[2, P, N, H, D]`,
    `[2, P, H, N, D]`, `[P, 2, N, H, D]`, `[P, 2, H, N, D]`, and `[P, N, C]` (MLA latent).

    Raises:
        LayoutError: the shape is none of these for this model.
    """
    page, kind, head, token, dim = _axes(view, layout, heads, page_tokens)
    tokens = np.arange(page_tokens, dtype=np.int64)[:, None] * token
    dims = np.arange(layout.head_dim, dtype=np.int64)[None, :] * dim
    region = (tokens + dims).reshape(-1)
    offsets = np.repeat(region[None, :], layout.kinds, axis=0)
    first = (
        np.arange(layout.kinds, dtype=np.int64)[:, None] * kind
        + np.arange(heads, dtype=np.int64)[None, :] * head
    )
    return RegionMap(offsets, first, page)


def _axes(
    view: TensorView, layout: BlockLayout, heads: int, page_tokens: int
) -> tuple[int, int, int, int, int]:
    """Strides of (page, kind, head, token, dim)."""
    shape, s, d = view.shape, view.strides, layout.head_dim
    if layout.kinds == 1:
        if shape[1:] == (page_tokens, d):
            return s[0], 0, 0, s[1], s[2]
    elif shape[1:] == (heads, page_tokens, 2 * d):
        return s[0], d * s[3], s[1], s[2], s[3]
    elif shape[1:] == (page_tokens, heads, 2 * d):
        return s[0], d * s[3], s[2], s[1], s[3]
    elif len(shape) == 5 and shape[0] == 2:
        if shape[2:] == (page_tokens, heads, d):
            return s[1], s[0], s[3], s[2], s[4]
        if shape[2:] == (heads, page_tokens, d):
            return s[1], s[0], s[2], s[3], s[4]
    elif len(shape) == 5 and shape[1] == 2:
        if shape[2:] == (page_tokens, heads, d):
            return s[0], s[1], s[3], s[2], s[4]
        if shape[2:] == (heads, page_tokens, d):
            return s[0], s[1], s[2], s[3], s[4]
    raise LayoutError(
        f"cannot read a KV tensor of shape {list(shape)} as pages of {page_tokens} tokens, "
        f"{heads} heads of size {d}"
    )


def longest_run(offsets: NDArray[np.int64]) -> int:
    """Elements, a power of two, that every region keeps together in canonical order."""
    unit, limit = 1, offsets.shape[1]
    while limit % (unit * 2) == 0:
        run = offsets.reshape(offsets.shape[0], -1, unit * 2)
        if not np.array_equal(run, run[:, :, :1] + np.arange(unit * 2, dtype=np.int64)):
            break
        unit *= 2
    return unit


def check_bijective(region: RegionMap) -> None:
    """Proves that no two canonical elements share a place in the page.

    Raises:
        LayoutError: they do, or one lies outside its page.
    """
    places = (region.heads[:, :, None] + region.offsets[:, None, :]).reshape(-1)
    if len(np.unique(places)) != len(places):
        raise LayoutError("page map is not one-to-one")


def page_map(
    region: RegionMap,
    layer_addresses: Sequence[int],
    layout: BlockLayout,
    heads: HeadSlice,
    page_tokens: int,
) -> PageMap:
    """Turns a region map into the native mover's map, in bytes and in the largest unit."""
    check_bijective(region)
    item = layout.itemsize
    unit = longest_run(region.offsets)
    tables = region.offsets[:, ::unit] * item
    if tables.min() < 0 or tables.max() >= 2**32:
        raise LayoutError("page region is larger than 4 GiB")
    return PageMap(
        layers=np.asarray(layer_addresses, dtype=np.uint64),
        page_stride_bytes=region.page_stride * item,
        tables=np.ascontiguousarray(tables.astype(np.uint32)),
        head_offsets=np.ascontiguousarray(region.heads * item),
        unit_bytes=unit * item,
        block_heads=layout.kv_heads,
        first_head=heads.start,
        page_tokens=page_tokens,
    )
