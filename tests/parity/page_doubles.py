"""What the tests of `move_pages` share: engine caches of random bytes, and the formula."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvist.native.pagemap import PageMap

Bytes = npt.NDArray[np.uint8]


@dataclass
class Engine:
    """A cache of random bytes and the map of it; `memory` is (layers, pages, page bytes)."""

    memory: Bytes
    page_map: PageMap


def filled(shape: tuple[int, ...], seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def shuffled_engine(
    *,
    layers: int = 2,
    kinds: int = 2,
    heads: int = 2,
    units: int,
    unit_bytes: int,
    page_count: int = 5,
    block_heads: int | None = None,
    first_head: int = 0,
    seed: int = 0,
) -> Engine:
    """Each kind has its own random permutation of units, each head its own place in the page."""
    rng = np.random.default_rng(seed)
    region = units * unit_bytes
    tables = np.stack([rng.permutation(units) for _ in range(kinds)]) * unit_bytes
    offsets = rng.permutation(kinds * heads).reshape(kinds, heads) * region
    stride = kinds * heads * region + 24
    memory = filled((layers, page_count, stride), seed)
    bases = np.array([layer.ctypes.data for layer in memory], np.uint64)
    page_map = PageMap(
        bases,
        stride,
        tables.astype(np.uint32),
        offsets.astype(np.int64),
        unit_bytes,
        block_heads or heads,
        first_head,
        1,
    )
    return Engine(memory, page_map)


def addresses(blocks: Bytes) -> npt.NDArray[np.uint64]:
    return np.array([block.ctypes.data for block in blocks], np.uint64)


def empty_blocks(page_map: PageMap, count: int, columns: int, fill: int = 0xEE) -> Bytes:
    return np.full((count, page_map.block_bytes(columns)), fill, np.uint8)


def expected(engine: Engine, pages: npt.NDArray[np.int64], blocks: Bytes) -> Bytes:
    """What a gather makes of `blocks`, by the formula in `pagemap`, unit by unit."""
    m, out = engine.page_map, blocks.copy()
    columns = pages.shape[1]
    for i, layer, kind, head, j in np.ndindex(len(pages), len(m.layers), m.kinds, m.heads, columns):
        if pages[i, j] < 0:
            continue
        row = (layer * m.kinds + kind) * m.block_heads + m.first_head + head
        at = (row * columns + j) * m.region_bytes
        page = engine.memory[layer, pages[i, j]]
        for u in range(m.units):
            start = int(m.head_offsets[kind, head]) + int(m.tables[kind, u])
            out[i, at + u * m.unit_bytes : at + (u + 1) * m.unit_bytes] = page[
                start : start + m.unit_bytes
            ]
    return out
