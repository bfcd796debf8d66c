"""Planes of bytes, each coded with its own table: the specification of `cpp/planes.hpp`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvist.native.rans_twin import (
    SYMBOLS,
    Bytes,
    Decoder,
    Encoder,
    Frequencies,
    cost_bytes,
    count_symbols,
    normalise,
    pack_table,
    unpack_table,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

_RAW, _CONSTANT, _CODED = range(3)
_NOT_PLANES = "not the planes of such a block"


def encode_planes(block: Buffer, groups: int, width: int) -> bytes:
    """The body of a lossless payload; `cpp/planes.hpp` draws it.

    Args:
        block: `groups` × n × `width` bytes, n at least 1.
        groups: runs of values that get tables of their own.
        width: bytes of a value: 1, 2 or 4.

    Raises:
        ValueError: the block is not of such groups.
    """
    flat = np.frombuffer(memoryview(block).cast("B"), np.uint8)
    _check_shape(len(flat), groups, width)
    directory, raw = b"", b""
    coded: list[tuple[Frequencies, Bytes]] = []
    for group in flat.reshape(groups, -1):
        for plane in _split(group, width):
            stored, frequencies = _plan(plane)
            directory += bytes([stored])
            if stored == _CONSTANT:
                directory += plane[:1].tobytes()
            elif stored == _RAW:
                raw += plane.tobytes()
            else:
                directory += pack_table(frequencies)
                coded.append((frequencies, plane))
    if not coded:
        return directory + raw
    stream = Encoder()
    for frequencies, plane in reversed(coded):
        stream.run(frequencies, plane)
    return directory + raw + stream.finish()


def decode_planes(body: Buffer, out: Buffer, groups: int, width: int) -> None:
    """Fills `out` with the block whose body `body` is. On an error `out` is undefined.

    Args:
        body: what `encode_planes` gave.
        out: writable, of the block's size.
        groups, width: as they were for `encode_planes`.

    Raises:
        BufferError: `out` is read-only.
        ValueError: `out` is not of such groups, or `body` is not that of such a block.
    """
    view = memoryview(out).cast("B")
    if view.readonly:
        raise BufferError("out is read-only")
    _check_shape(len(view), groups, width)
    data = memoryview(body).cast("B").tobytes()
    count = len(view) // groups // width
    entries, at = _directory(data, groups * width)
    planes = [np.empty(0, np.uint8)] * len(entries)
    for i, (stored, what) in enumerate(entries):
        if stored == _RAW:
            planes[i] = np.frombuffer(data[at : at + count], np.uint8)
            at += count
        elif stored == _CONSTANT:
            planes[i] = np.full(count, data[what], np.uint8)
    coded = [(i, what) for i, (stored, what) in enumerate(entries) if stored == _CODED]
    if at > len(data) or (not coded and at != len(data)):
        raise ValueError(_NOT_PLANES)
    if coded:
        stream = Decoder(data[at:])
        for i, what in coded:
            planes[i] = stream.run(unpack_table(data[what:])[0], count)
        stream.end()
    blocks = [_join(planes[i : i + width]) for i in range(0, len(planes), width)]
    view[:] = b"".join(blocks)


def _check_shape(size_bytes: int, groups: int, width: int) -> None:
    if width not in (1, 2, 4):
        raise ValueError("a value has 1, 2 or 4 bytes")
    if groups < 1 or size_bytes < 1 or size_bytes % (groups * width):
        raise ValueError("the block is not of so many groups of values")


def _split(group: Bytes, width: int) -> list[Bytes]:
    """The planes of one group: each value rotated left by a bit, its top byte first."""
    if width == 1:
        return [group]
    values = _words(group, width)
    bits = np.uint64(8 * width)
    turned = values << np.uint64(1) | values >> (bits - np.uint64(1))
    shifts = np.arange(8 * (width - 1), -1, -8, dtype=np.uint64)
    return list((turned >> shifts[:, None]).astype(np.uint8))


def _join(planes: list[Bytes]) -> bytes:
    if len(planes) == 1:
        return planes[0].tobytes()
    turned = _words(np.stack(planes[::-1], 1).ravel(), len(planes))
    bits = np.uint64(8 * len(planes))
    values = turned >> np.uint64(1) | turned << (bits - np.uint64(1))
    return values.astype("<u2" if len(planes) == 2 else "<u4").tobytes()


def _words(data: Bytes, width: int) -> npt.NDArray[np.uint64]:
    return np.frombuffer(data.tobytes(), "<u2" if width == 2 else "<u4").astype(np.uint64)


def _plan(plane: Bytes) -> tuple[int, Frequencies]:
    """How a plane is stored, and with which table."""
    counts = count_symbols(plane)
    frequencies = np.zeros(SYMBOLS, np.int64)
    if counts[plane[0]] == len(plane):
        return _CONSTANT, frequencies
    frequencies = normalise(counts)
    coded = cost_bytes(counts, frequencies) + len(pack_table(frequencies))
    return (_RAW if coded + len(plane) // 64 >= len(plane) else _CODED), frequencies


def _directory(data: bytes, count: int) -> tuple[list[tuple[int, int]], int]:
    """How each plane is stored and where its byte or table is; where the directory ends."""
    entries, at = [], 0
    for _ in range(count):
        stored = data[at] if at < len(data) else 255
        if stored > _CODED:
            raise ValueError(_NOT_PLANES)
        at += 1
        entries.append((stored, at))
        if stored == _CODED:
            at += unpack_table(data[at:])[1]
        elif stored == _CONSTANT:
            at += 1
    if at > len(data):
        raise ValueError(_NOT_PLANES)
    return entries, at
