"""DRAM: Kvist's store between an engine's pages and its arena, and memcpy as the limit."""

from __future__ import annotations

import ctypes
import time
from enum import Enum

import numpy as np

from kvist.bench.store.contender import (
    BLOCK_TOKENS,
    Blocks,
    ContenderError,
    in_huge_pages,
    round_keys,
    share_out,
)
from kvist.connectors.pages import RegionMap, TensorView, page_map, strided_map
from kvist.core.layout import BlockLayout, HeadSlice
from kvist.core.outcome import BlockRef, Outcome
from kvist.native import Direction, PageMap, move_pages, move_pages_checksum
from kvist.policy import LeafLru
from kvist.store import TieredStore
from kvist.tiers.dram import Arena

# KV of Llama-3-8B, a common shape: 16 tokens are 2 MiB.
LAYOUT = BlockLayout(32, 8, 128, BLOCK_TOKENS, "bfloat16")
_PART_BLOCKS = 8  # as the vLLM connector cuts a save
_DEADLINE_S = 30.0


class Order(Enum):
    """How an engine lays out a page of one layer."""

    HEADS_APART = "heads apart"  # [kind, head, token, dim]
    TOKENS_APART = "tokens apart"  # [token, head, dim], keys and values in places of their own
    TRANSPOSED = "keys transposed"  # as vLLM's CPU attention: [head, dim, token] for keys


class Checksums(Enum):
    """Whether a move takes the payload's checksum as the bytes pass."""

    NONE = "none"
    TAKEN = "taken"


class EnginePages:
    """A KV cache like an engine's: one tensor a layer, its pages used in random order."""

    def __init__(self, memory: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], order: Order):
        """`memory`: (blocks, bytes of a block), contiguous; it is taken as the cache's bytes."""
        count = len(memory)
        layer_bytes = count * LAYOUT.block_bytes // LAYOUT.layers
        base = memory.ctypes.data
        self.map: PageMap = page_map(
            _region(order, count),
            [base + i * layer_bytes for i in range(LAYOUT.layers)],
            LAYOUT,
            HeadSlice(0, LAYOUT.kv_heads),
            BLOCK_TOKENS,
        )
        shuffled = np.random.default_rng(1).permutation(count)
        self.pages = np.ascontiguousarray(shuffled.reshape(count, 1).astype(np.int64))


def _region(order: Order, pages: int) -> RegionMap:
    heads, tokens, dim = LAYOUT.kv_heads, BLOCK_TOKENS, LAYOUT.head_dim
    if order is Order.TOKENS_APART:
        shape: tuple[int, ...] = (2, pages, tokens, heads, dim)
    else:  # any number of pages but two, which would be taken for keys and values
        shape = (3, 2, heads, tokens, dim)
    strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    region = strided_map(TensorView(shape, strides), LAYOUT, heads, tokens)
    if order is Order.TRANSPOSED:
        keys = np.arange(tokens * dim, dtype=np.int64).reshape(dim, tokens).T.reshape(-1)
        region.offsets[0] = keys
    return region


class Memcpy:
    """The limit: each block copied by memcpy to memory of its own, as every store has, and back."""

    def __init__(self, blocks: Blocks, *, threads: int) -> None:
        self._blocks, self._threads = blocks, threads
        self._kept = Arena(blocks.total_bytes, slot_bytes=blocks.block_bytes)
        in_huge_pages(self._kept.address, self._kept.size_bytes)

    def write(self, round_number: int) -> float:
        """Copies all blocks; seconds."""
        del round_number
        return self._copy(self._kept.address, self._blocks.source.ctypes.data)

    def read(self, round_number: int) -> float:
        """Copies them back; seconds."""
        del round_number
        self._blocks.forget()
        took_s = self._copy(self._blocks.target.ctypes.data, self._kept.address)
        self._blocks.prove("memcpy")
        return took_s

    def _copy(self, target: int, source: int) -> float:
        size = self._blocks.block_bytes

        def copy(i: int) -> None:
            ctypes.memmove(target + i * size, source + i * size, size)

        began = time.perf_counter()
        share_out(self._threads, self._blocks.count, copy)
        return time.perf_counter() - began

    def close(self) -> None:
        """Gives the memory back."""
        self._kept.close()


class KvistMemory:
    """Kvist as the vLLM connector uses it: reserve, gather, commit; lease, scatter, release."""

    def __init__(self, blocks: Blocks, order: Order, checksums: Checksums, *, threads: int) -> None:
        if blocks.block_bytes != LAYOUT.block_bytes:
            raise ContenderError(f"blocks of {blocks.block_bytes} bytes do not fit the layout")
        self._blocks, self._threads = blocks, threads
        self._from = EnginePages(blocks.source, order)
        self._to = EnginePages(blocks.target, order)
        self._move = move_pages if checksums is Checksums.NONE else move_pages_checksum
        arena = Arena(blocks.total_bytes, slot_bytes=blocks.block_bytes)
        in_huge_pages(arena.address, arena.size_bytes)  # as `Warmer` does
        self._store = TieredStore(arena, LeafLru(), None, raw_bytes=blocks.block_bytes)

    def write(self, round_number: int) -> float:
        """Gathers all blocks from pages; seconds."""
        keys = round_keys(round_number, self._blocks.count)
        refs = [BlockRef(k, p) for k, p in zip(keys, [None, *keys[:-1]], strict=True)]
        self._store.clear()
        began = time.perf_counter()
        base = np.uint64(self._store.arena.address)
        with self._store.write(refs) as lease:
            slots = np.array([lease.slot(i) for i in range(len(keys))], np.uint64) + base
            for i in range(0, len(keys), _PART_BLOCKS):
                part = slice(i, i + _PART_BLOCKS)
                self._move(
                    Direction.GATHER,
                    slots[part],
                    self._from.pages[part],
                    self._from.map,
                    self._threads,
                )
                for j in range(i, min(i + _PART_BLOCKS, len(keys))):
                    lease.commit(j)
        return time.perf_counter() - began

    def read(self, round_number: int) -> float:
        """Scatters all blocks to pages; seconds."""
        keys = round_keys(round_number, self._blocks.count)
        self._blocks.forget()
        began = time.perf_counter()
        base = np.uint64(self._store.arena.address)
        with self._store.read(keys, deadline_s=_DEADLINE_S) as lease:
            if any(lease.wait(i) is not Outcome.HIT for i in range(len(keys))):
                raise ContenderError("Kvist had not every block")
            slots = np.array([lease.slot(i) for i in range(len(keys))], np.uint64) + base
            self._move(Direction.SCATTER, slots, self._to.pages, self._to.map, self._threads)
        took_s = time.perf_counter() - began
        self._blocks.prove("Kvist")
        return took_s

    def close(self) -> None:
        """Closes the store."""
        self._store.close()
