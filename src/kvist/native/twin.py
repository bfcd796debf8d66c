"""The hot paths in Python: the specification of `_core`, and its stand-in where it is missing."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import blake3
import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from kvist.core.keys import KEY_BYTES
from kvist.native.pagemap import Direction, PageMap

if TYPE_CHECKING:
    from typing_extensions import Buffer

_U32_MAX = 2**32 - 1


def digest(data: Buffer) -> bytes:
    """BLAKE3-256 of a contiguous buffer: 32 bytes."""
    return blake3.blake3(_flat(data)).digest()


def checksum(data: Buffer) -> int:
    """XXH3-64 with seed 0 of a contiguous buffer."""
    return xxhash.xxh3_64_intdigest(_flat(data))


def copy_checksum(dst: Buffer, src: Buffer) -> int:
    """Copies src to dst and returns `checksum(src)`.

    Raises:
        BufferError: dst is read-only.
        ValueError: dst and src differ in length, or overlap.
    """
    if memoryview(dst).readonly:
        raise BufferError("dst is read-only")
    to = np.frombuffer(_flat(dst), np.uint8)
    source = np.frombuffer(_flat(src), np.uint8)
    if len(to) != len(source):
        raise ValueError("dst and src differ in length")
    if np.may_share_memory(to, source):
        raise ValueError("dst and src overlap")
    to[:] = source
    return checksum(src)


def _flat(data: Buffer) -> memoryview:
    """The bytes of a contiguous buffer of any shape; `memoryview.cast` refuses an empty one."""
    view = memoryview(data)
    if not view.c_contiguous:
        raise BufferError("the buffer is not C-contiguous")
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def chain_keys(
    seed: bytes,
    tokens: Sequence[int] | npt.NDArray[np.uint32],
    block_tokens: int,
    extras: Mapping[int, bytes] | None = None,
) -> list[bytes]:
    """The keys of a prompt's full blocks, first to last; a tail shorter than a block is not read.

    Args:
        seed: 32 bytes, key -1 of the chain.
        tokens: token ids, each in the range of u32.
        block_tokens: tokens in a block.
        extras: bytes hashed after the tokens of block i; indices without a full block are ignored.

    Raises:
        OverflowError: a token is not in the range of u32.
        ValueError: seed is not 32 bytes, or block_tokens is below 1.
    """
    if len(seed) != KEY_BYTES:
        raise ValueError("seed is not 32 bytes")
    if block_tokens < 1:
        raise ValueError("block_tokens is below 1")
    extras = extras or {}
    keys: list[bytes] = []
    key = seed
    for i in range(len(tokens) // block_tokens):
        block = tokens[i * block_tokens : (i + 1) * block_tokens]
        key = digest(key + _token_bytes(block) + extras.get(i, b""))
        keys.append(key)
    return keys


def _token_bytes(tokens: Sequence[int] | npt.NDArray[np.uint32]) -> bytes:
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.uint32:
        return tokens.astype("<u4").tobytes()
    values = [operator.index(token) for token in tokens]
    if any(not 0 <= value <= _U32_MAX for value in values):
        raise OverflowError("a token is not in the range of u32")
    return np.array(values, "<u4").tobytes()


def unpack_tokens(packed: Buffer) -> bytes:
    """The tokens of a KV event as little-endian u32, from a MessagePack array of integers.

    Raises:
        ValueError: it is something else, or a token is not in the range of u32.
    """
    try:
        tokens = msgspec.msgpack.decode(packed, type=list[int])
        return _token_bytes(tokens)
    except (msgspec.DecodeError, OverflowError) as error:
        raise ValueError("not a MessagePack array of u32") from error


def block_keys(hashes: list[bytes | int]) -> tuple[bytes, ...]:
    """The keys of blocks as indexes know them, of what an engine calls them.

    Each is 16 bytes or more, and well mixed at the front: a number is its lowest 64 bits,
    big-endian; what is shorter ends in zeros.

    Raises:
        TypeError: a hash is neither bytes nor int.
    """
    return tuple(map(_block_key, hashes))


def _block_key(block_hash: bytes | int) -> bytes:
    if isinstance(block_hash, int):
        block_hash = (block_hash & 2**64 - 1).to_bytes(8, "big")
    elif not isinstance(block_hash, bytes):
        raise TypeError("a block hash is bytes or int")
    return block_hash.ljust(16, b"\0")


def move_pages(
    direction: Direction,
    slots: npt.NDArray[np.uint64],
    pages: npt.NDArray[np.int64],
    page_map: PageMap,
    threads: int = 1,
) -> None:
    """Moves KV between engine pages and canonical blocks; `pagemap` gives both addresses.

    Args:
        direction: GATHER fills slots from pages, SCATTER pages from slots.
        slots: (blocks,) absolute addresses of canonical blocks.
        pages: (blocks, m) engine page of each sub-page; -1 leaves that sub-page alone.
        page_map: the engine's layout. The caller answers for every address in it.
        threads: how many threads `_core` may use, at most 64; the twin uses one.

    Raises:
        TypeError: an array has another dtype or dimension, or is not C-contiguous.
        ValueError: lengths differ, a page id is below -1, or threads is below 1.
    """
    _check_move(slots, pages, threads)
    columns = pages.shape[1]
    region = page_map.region_bytes
    # (kinds, region): the byte of a head's region in the engine, for each canonical byte.
    steps = np.arange(page_map.unit_bytes, dtype=np.int64)
    index = (page_map.tables.astype(np.int64)[:, :, None] + steps).reshape(page_map.kinds, region)
    spans = [int(row.max()) + 1 for row in index]
    for layer in range(len(page_map.layers)):
        for slot, page_row in zip(slots.tolist(), pages.tolist(), strict=True):
            for kind, head, j in np.ndindex(page_map.kinds, page_map.heads, columns):
                if page_row[j] < 0:
                    continue
                row = (layer * page_map.kinds + kind) * page_map.block_heads
                row += page_map.first_head + head
                canonical = _memory(slot + (row * columns + j) * region, region)
                start = int(page_map.layers[layer]) + page_row[j] * page_map.page_stride_bytes
                start += int(page_map.head_offsets[kind, head])
                engine = _memory(start, spans[kind])
                if direction is Direction.GATHER:
                    canonical[:] = engine[index[kind]]
                else:
                    engine[index[kind]] = canonical


def move_pages_checksum(
    direction: Direction,
    slots: npt.NDArray[np.uint64],
    pages: npt.NDArray[np.int64],
    page_map: PageMap,
    threads: int = 1,
) -> list[int]:
    """Does what `move_pages` does and gives the `checksum` of each slot's block, as it then stands.

    `_core` takes it of the bytes as they pass. Where a sub-page is left alone, or other ranks fill
    the other heads, what stands there already counts: only a whole block's checksum is worth much.

    Args:
        direction, slots, pages, page_map, threads: as in `move_pages`; a block, of
            `page_map.block_bytes(m)` bytes, is moved by one thread.

    Raises:
        TypeError: as `move_pages`.
        ValueError: as `move_pages`.
    """
    move_pages(direction, slots, pages, page_map, threads)
    size_bytes = page_map.block_bytes(pages.shape[1])
    return [checksum(_memory(slot, size_bytes).data) for slot in slots.tolist()]


def _check_move(slots: npt.NDArray[np.uint64], pages: npt.NDArray[np.int64], threads: int) -> None:
    for name, array, dtype, ndim in (("slots", slots, np.uint64, 1), ("pages", pages, np.int64, 2)):
        if array.dtype != dtype or array.ndim != ndim or not array.flags.c_contiguous:
            raise TypeError(f"{name} is {array.dtype}{array.shape}")
    if threads < 1:
        raise ValueError("threads is below 1")
    if len(slots) != len(pages):
        raise ValueError("slots and pages differ in length")
    if (pages < -1).any():
        raise ValueError("a page id is below -1")


def _memory(address: int, length_bytes: int) -> npt.NDArray[np.uint8]:
    """The bytes at an absolute address, as a writable array."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * length_bytes).from_address(address))
