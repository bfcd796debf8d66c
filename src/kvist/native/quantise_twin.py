"""Values in few bits with scales by group: the specification of `cpp/quantise.hpp`.

All arithmetic is in float32 and in the order of the C++ code, so that both give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvist.native.quantshape import Number, QuantShape, Scheme

if TYPE_CHECKING:
    from typing_extensions import Buffer

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]

RAW_SCALE = 0x7FFF
_MOST_SCALE = 0x7F7F
_MOST = {Scheme.INT8: np.float32(127), Scheme.FP8: np.float32(448), Scheme.INT4: np.float32(15)}
_STORED = {Number.BFLOAT16: "<u2", Number.FLOAT16: "<u2", Number.FLOAT32: "<u4"}
_NOT_CODES = "not the codes of such a block"


def encode_quantised(block: Buffer, shape: QuantShape) -> bytes:
    """The body of a quantised payload; `cpp/quantise.hpp` draws it.

    Args:
        block: raw bytes of a canonical block of `shape`.
        shape: its sizes, numbers, groups and scheme.

    Raises:
        ValueError: the block is not of this shape.
    """
    scales, zeros, codes, raw = [], [], [], []
    with np.errstate(all="ignore"):
        for bits, kind in _heads(_values(block, shape), shape):
            x = to_float(bits, shape.number)
            spans = _spans(shape, kind)
            groups = [_measure(x[rows, columns], shape, kind) for rows, columns in spans]
            axis = 0 if shape.by_channel(kind) else 1
            scale = np.stack([g[0] for g in groups], axis)
            zero = np.stack([g[1] for g in groups], axis)
            inverse = np.stack([g[2] for g in groups], axis)
            scales.append(scale.astype("<u2").tobytes())
            if shape.scheme is Scheme.INT4:
                zeros.append(from_float(zero, shape.number).tobytes())
            raw += [bits[region].tobytes() for region in _raw_regions(scale, shape, kind)]
            x = np.where(_spread(scale == RAW_SCALE, shape, kind), np.float32(0), x)
            code = _codes(x, _spread(zero, shape, kind), _spread(inverse, shape, kind), shape)
            codes.append(code.tobytes())
    return b"".join([*scales, *zeros, *codes, *raw])


def decode_quantised(body: Buffer, out: Buffer, shape: QuantShape) -> None:
    """Fills `out` with what the codes of `body` mean. On an error `out` is undefined.

    Args:
        body: what `encode_quantised` gave.
        out: writable, of the block's size.
        shape: as it was for `encode_quantised`.

    Raises:
        BufferError: `out` is read-only.
        ValueError: `out` is not of this shape, or `body` is not that of such a block.
    """
    if memoryview(out).readonly:
        raise BufferError("out is read-only")
    blocks = _values(out, shape)
    data = memoryview(body).cast("B")
    if len(data) < shape.least_bytes:
        raise ValueError(_NOT_CODES)
    zero_bytes = shape.number.width if shape.scheme is Scheme.INT4 else 0
    codes_at = (2 + zero_bytes) * shape.all_groups
    raw_at, done = shape.least_bytes, 0
    for bits, kind in _heads(blocks, shape):
        scale, zero = _read_groups(data, done, shape, kind)
        done += shape.groups(kind)
        rows = np.frombuffer(data, np.uint8, shape.tokens * shape.row_bytes, codes_at)
        codes_at += rows.size
        wide = np.where(scale == RAW_SCALE, np.float32(0), to_float(scale, Number.BFLOAT16))
        with np.errstate(all="ignore"):
            meaning = _meaning(rows.reshape(shape.tokens, -1), shape)
            value = meaning * _spread(wide, shape, kind)
            if zero_bytes:
                value = _spread(zero, shape, kind) + value
            bits[...] = from_float(value, shape.number)
        for region in _raw_regions(scale, shape, kind):
            size = bits[region].size
            if raw_at + size * shape.number.width > len(data):
                raise ValueError(_NOT_CODES)
            bits[region] = np.frombuffer(data, bits.dtype, size, raw_at).reshape(bits[region].shape)
            raw_at += size * shape.number.width
    if raw_at != len(data):
        raise ValueError(_NOT_CODES)


def _read_groups(data: memoryview, done: int, shape: QuantShape, kind: int) -> tuple[Words, Floats]:
    """Scales (bfloat16 bits) and zeros of a head, `done` groups being before it."""
    lines = (-1, shape.dim) if shape.by_channel(kind) else (shape.tokens, -1)
    count = shape.groups(kind)
    scale = np.frombuffer(data, "<u2", count, 2 * done).reshape(lines)
    if ((scale > _MOST_SCALE) & (scale != RAW_SCALE)).any():
        raise ValueError(_NOT_CODES)
    if shape.scheme is not Scheme.INT4:
        return scale, np.zeros(scale.shape, np.float32)
    at = 2 * shape.all_groups + shape.number.width * done
    stored = np.frombuffer(data, _STORED[shape.number], count, at)
    return scale, to_float(stored.reshape(lines), shape.number)


def to_float(bits: npt.NDArray[Any], number: Number) -> Floats:
    """The values that bit patterns of `number` stand for."""
    if number is Number.BFLOAT16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view("<f2" if number is Number.FLOAT16 else "<f4").astype(np.float32)


def from_float(values: Floats, number: Number) -> npt.NDArray[Any]:
    """Bit patterns of `number`, rounded to nearest, ties to even; what is too large: infinity."""
    if number is Number.FLOAT32:
        return values.astype("<f4").view("<u4")
    if number is Number.FLOAT16:
        return values.astype("<f2").view("<u2")
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype("<u2")


def _values(block: Buffer, shape: QuantShape) -> npt.NDArray[Any]:
    """A view of the block's bit patterns: [layers, kinds, heads, tokens, dim]."""
    view = memoryview(block).cast("B")
    if len(view) != shape.block_bytes:
        raise ValueError("the block is not of this shape")
    sizes = (shape.layers, shape.kinds, shape.heads, shape.tokens, shape.dim)
    return np.frombuffer(view, _STORED[shape.number]).reshape(sizes)


def _heads(values: npt.NDArray[Any], shape: QuantShape) -> Iterator[tuple[npt.NDArray[Any], int]]:
    """Each head, [tokens, dim], in the order of the block, and of which kind it is."""
    for layer, kind, head in np.ndindex(values.shape[:3]):
        yield values[layer, kind, head], kind


def _spans(shape: QuantShape, kind: int) -> list[tuple[slice, slice]]:
    """Slices of tokens (of channels for V) that hold one group of each channel (token)."""
    by_channel = shape.by_channel(kind)
    length = shape.tokens if by_channel else shape.dim
    parts = [slice(i, i + shape.group) for i in range(0, length, shape.group)]
    whole = slice(None)
    return [(part, whole) if by_channel else (whole, part) for part in parts]


def _spread(groups: npt.NDArray[Any], shape: QuantShape, kind: int) -> npt.NDArray[Any]:
    """What belongs to a group, for each of its values: [tokens, dim]."""
    axis, length = (0, shape.tokens) if shape.by_channel(kind) else (1, shape.dim)
    return np.take(np.repeat(groups, shape.group, axis), np.arange(length), axis)


def _raw_regions(scale: Words, shape: QuantShape, kind: int) -> list[tuple[slice, slice]]:
    """Where the values of each group are that is stored raw."""
    out = []
    by_channel = shape.by_channel(kind)
    for i, j in zip(*np.nonzero(scale == RAW_SCALE), strict=True):
        rows, columns = (i * shape.group, j) if by_channel else (i, j * shape.group)
        height, width = (shape.group, 1) if by_channel else (1, shape.group)
        out.append((slice(rows, rows + height), slice(columns, columns + width)))
    return out


def _measure(x: Floats, shape: QuantShape, kind: int) -> tuple[Words, Floats, Floats]:
    """Scale (bfloat16 bits), zero and 1 / scale of one span's groups."""
    axis = 0 if shape.by_channel(kind) else 1
    low, high = np.min(x, axis=axis), np.max(x, axis=axis)
    most = _MOST[shape.scheme]
    if shape.scheme is Scheme.INT4:
        base = low + np.float32(0)
        reach = high - base
    else:
        base = np.zeros_like(low)
        reach = np.maximum(np.abs(low), np.abs(high))
    scale = np.where(reach == 0, 0, _bf16_above(reach / most)).astype(np.uint16)
    wide = to_float(scale, Number.BFLOAT16)
    largest = to_float(from_float(base + wide * most, shape.number), shape.number)
    good = np.isfinite(low) & np.isfinite(high) & np.isfinite(reach) & np.isfinite(largest)
    good &= scale <= _MOST_SCALE
    inverse = np.where(good & (scale > 0), np.float32(1) / wide, np.float32(0))
    return (
        np.where(good, scale, RAW_SCALE).astype(np.uint16),
        np.where(good, base, np.float32(0)),
        inverse.astype(np.float32),
    )


def _bf16_above(values: Floats) -> Words:
    """The least bfloat16 that is at least each value, but no subnormal one."""
    bits = values.astype(np.float32).view(np.uint32)
    up = (bits >> 16) + (bits & 0xFFFF != 0)
    above: Words = np.maximum(up, 0x80).astype(np.uint16)
    return above


def _codes(x: Floats, zero: Floats, inverse: Floats, shape: QuantShape) -> Codes:
    """Codes of a head as they are stored: [tokens, row_bytes]."""
    if shape.scheme is Scheme.FP8:
        return to_e4m3(x * inverse)
    if shape.scheme is Scheme.INT8:
        steps: Codes = np.clip(np.rint(x * inverse), -127, 127).astype(np.int8).view(np.uint8)
        return steps
    code = np.clip(np.rint((x - zero) * inverse), 0, 15).astype(np.uint8)
    half = (shape.dim + 1) // 2
    packed: Codes = code[:, :half].copy()
    packed[:, : shape.dim - half] |= code[:, half:] << 4
    return packed


def _meaning(rows: Codes, shape: QuantShape) -> Floats:
    """What the codes of a head mean in units of the scale: [tokens, dim]."""
    if shape.scheme is Scheme.FP8:
        return from_e4m3(rows)
    if shape.scheme is Scheme.INT8:
        return rows.view(np.int8).astype(np.float32)
    halves: Codes = np.concatenate([rows & 15, rows >> 4], 1)[:, : shape.dim]
    return halves.astype(np.float32)


def to_e4m3(values: Floats) -> Codes:
    """e4m3 without infinities, rounded to nearest, ties to even; what is above 448 becomes 448."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + (magnitude >> 20 & 1)) >> 20) - np.uint32(120 << 3)
    small = np.rint(np.abs(values) * np.float32(512)).astype(np.uint32)
    code = np.where(magnitude < 0x3C800000, small, normal)
    code = np.where(magnitude >= 0x43E00000, 0x7E, code)
    out: Codes = (code | (bits >> 24 & 0x80)).astype(np.uint8)
    return out


def from_e4m3(codes: Codes) -> Floats:
    """What e4m3 codes mean; 0x7F and 0xFF are NaN."""
    magnitude = (codes & 0x7F).astype(np.uint32)
    normal = ((magnitude << 20) + np.uint32(120 << 23)).view(np.float32)
    small = magnitude.astype(np.float32) * np.float32(2**-9)
    value = np.where(magnitude < 8, small, normal)
    value = np.where(magnitude == 0x7F, np.float32(np.nan), value)
    out: Floats = np.where(codes & 0x80, -value, value).astype(np.float32)
    return out
