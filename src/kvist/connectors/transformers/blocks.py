"""Canonical blocks to and from a Transformers `DynamicCache`.

A block is `[layer][k|v][kv_head][token][head_dim]`; a cache layer holds K and V as
`[batch, kv_head, token, head_dim]`, so both keep a head's tokens together and the copy is a
transposition of whole `[token][head_dim]` regions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache

from kvist.core.errors import LayoutError
from kvist.core.layout import BlockLayout

_CHUNK_BLOCKS = 32  # blocks staged at once on the way out: bounds the extra memory of a save


class Staging:
    """Host memory for `blocks` canonical blocks, filled one by one and then read as tensors."""

    def __init__(self, layout: BlockLayout, blocks: int) -> None:
        self._layout = layout
        self._bytes = torch.empty((blocks, layout.block_bytes), dtype=torch.uint8)
        self._view = self._bytes.numpy()

    def fill(self, i: int, block: memoryview) -> None:
        """Copies the bytes of block i."""
        memoryview(self._view[i])[:] = block.cast("B")

    def to_cache(self, blocks: int, config: object, device: Any) -> DynamicCache:
        """A cache whose first `blocks × block_tokens` tokens are the blocks filled."""
        lay = self._layout
        shape = (blocks, lay.layers, lay.kinds, lay.kv_heads, lay.block_tokens, lay.head_dim)
        whole = self._bytes[:blocks].view(getattr(torch, lay.dtype)).view(shape)
        # [block, layer, kind, head, token, dim] -> [layer, kind, 1, head, block × token, dim]
        joined = whole.permute(1, 2, 3, 0, 4, 5).reshape(
            lay.layers, lay.kinds, 1, lay.kv_heads, blocks * lay.block_tokens, lay.head_dim
        )
        cache = DynamicCache(config=config)
        for layer in range(lay.layers):
            # One layer at a time crosses to the device; `update` keeps its own copy.
            cache.update(joined[layer, 0].to(device), joined[layer, 1].to(device), layer)
        return cache

    def rows(self, layer: int, blocks: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Rows of one layer: `rows[i]` of block `blocks[i]`; `[n, kinds, kv_heads, head_dim]`."""
        lay = self._layout
        shape = (-1, lay.layers, lay.kinds, lay.kv_heads, lay.block_tokens, lay.head_dim)
        whole = self._bytes.view(getattr(torch, lay.dtype)).view(shape)
        return whole[blocks, layer, :, :, rows]


def cached_tokens(cache: DynamicCache, layout: BlockLayout) -> int:
    """Tokens that every layer of `cache` holds.

    Raises:
        LayoutError: the cache is not the full attention cache, of one sequence, that the layout
            describes.
    """
    if len(cache.layers) != layout.layers:
        raise LayoutError(f"cache has {len(cache.layers)} layers, the model {layout.layers}")
    tokens = int(cache.get_seq_length())
    want = (1, layout.kv_heads, tokens, layout.head_dim)
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            if tokens and (tensor is None or tuple(tensor.shape) != want):
                got = None if tensor is None else tuple(tensor.shape)
                raise LayoutError(f"cache layer of shape {got}, expected {want}")
            if tokens and str(tensor.dtype) != f"torch.{layout.dtype}":
                raise LayoutError(f"cache of {tensor.dtype}, expected {layout.dtype}")
    return tokens


def canonical_blocks(
    cache: DynamicCache, layout: BlockLayout, first: int, last: int
) -> Iterator[tuple[int, memoryview]]:
    """`(i, bytes)` of blocks `[first, last)`; the bytes are valid until the next step."""
    bt = layout.block_tokens
    for start in range(first, last, _CHUNK_BLOCKS):
        stop = min(start + _CHUNK_BLOCKS, last)
        span = slice(start * bt, stop * bt)
        kv = torch.stack(
            [
                torch.stack((layer.keys[0, :, span], layer.values[0, :, span])).cpu()
                for layer in cache.layers
            ]
        )  # [layer, kind, head, token, dim]
        shape = (layout.layers, layout.kinds, layout.kv_heads, stop - start, bt, layout.head_dim)
        blocks = kv.view(shape).permute(3, 0, 1, 2, 4, 5).contiguous()
        raw = blocks.view(stop - start, -1).view(torch.uint8).numpy()
        for i in range(start, stop):
            yield i, memoryview(raw[i - start])
