"""Where an engine keeps each unit of KV, in the terms that `move_pages` needs.

A *canonical block* holds, for m pages of an engine, layer after layer, kind after kind (keys,
values), head after head, the m pages in order of tokens, each as `[token][head_dim]`. That region
of one head and page is cut in *units*: runs of `unit_bytes` that the engine keeps together.

    engine    = layers[l] + p * page_stride_bytes + head_offsets[k, h] + tables[k, u]
    canonical = slot + ((l * kinds + k) * block_heads + first_head + h) * (m * region_bytes)
                     + j * region_bytes + u * unit_bytes

for layer l, kind k, local head h, page id p in column j, and unit u.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


class Direction(enum.Enum):
    """Which way bytes go: GATHER from engine pages to slots, SCATTER from slots to pages."""

    GATHER = "gather"
    SCATTER = "scatter"


@dataclass(frozen=True, slots=True, eq=False)
class PageMap:
    """One rank's layout of one group of layers; arrays are C-contiguous and must not change.

    Attributes:
        layers: (layers,) absolute base address of each layer's cache.
        page_stride_bytes: from one page to the next in a layer.
        tables: (kinds, units) byte offset of canonical unit u from its head's base.
        head_offsets: (kinds, heads) byte offset of a local head from its page's base.
        unit_bytes: 1, 2, 4, 8 or a multiple of 16.
        block_heads: KV heads in the canonical block, over all ranks.
        first_head: the block's head that is this rank's head 0.
        page_tokens: tokens in an engine page.

    Raises:
        ValueError: a shape, dtype or number is not as above; the message names it.
    """

    layers: npt.NDArray[np.uint64]
    page_stride_bytes: int
    tables: npt.NDArray[np.uint32]
    head_offsets: npt.NDArray[np.int64]
    unit_bytes: int
    block_heads: int
    first_head: int
    page_tokens: int

    def __post_init__(self) -> None:
        _check_array("layers", self.layers, np.dtype(np.uint64), 1)
        _check_array("tables", self.tables, np.dtype(np.uint32), 2)
        _check_array("head_offsets", self.head_offsets, np.dtype(np.int64), 2)
        if self.head_offsets.shape[0] != self.kinds:
            raise ValueError(
                f"head_offsets has {self.head_offsets.shape[0]} kinds, tables {self.kinds}"
            )
        if self.unit_bytes not in (1, 2, 4, 8) and (self.unit_bytes < 16 or self.unit_bytes % 16):
            raise ValueError(f"unit_bytes is {self.unit_bytes}: not 1, 2, 4, 8 or a multiple of 16")
        if self.first_head < 0 or self.first_head + self.heads > self.block_heads:
            raise ValueError(
                f"first_head {self.first_head} with {self.heads} heads is not within the"
                f" block's {self.block_heads}"
            )
        if self.page_tokens < 1 or self.region_bytes % self.page_tokens:
            raise ValueError(f"page_tokens {self.page_tokens} does not divide {self.region_bytes}")

    @property
    def kinds(self) -> int:
        """2 for keys and values, 1 where the engine keeps one latent."""
        return int(self.tables.shape[0])

    @property
    def units(self) -> int:
        """Units in one head of one page."""
        return int(self.tables.shape[1])

    @property
    def heads(self) -> int:
        """KV heads of this rank."""
        return int(self.head_offsets.shape[1])

    @property
    def region_bytes(self) -> int:
        """Bytes of one head of one page, of one kind and layer."""
        return self.units * self.unit_bytes

    def block_bytes(self, pages: int) -> int:
        """Bytes of the canonical block that `pages` engine pages fill, over all ranks."""
        return len(self.layers) * self.kinds * self.block_heads * pages * self.region_bytes


def _check_array(
    name: str, array: npt.NDArray[np.generic], dtype: np.dtype[np.generic], ndim: int
) -> None:
    """Raises ValueError unless `array` is C-contiguous, not empty, of `dtype` and `ndim`."""
    if array.dtype != dtype or array.ndim != ndim or not array.flags.c_contiguous or not array.size:
        raise ValueError(
            f"{name} is {array.dtype}{array.shape}: not a C-contiguous, filled,"
            f" {ndim}-dimensional array of {dtype}"
        )
