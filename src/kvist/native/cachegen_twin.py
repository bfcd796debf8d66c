"""Coding of blocks by `cachegen`: the specification of `cpp/cachegen.hpp`.

A block is R regions of `[token][D]` values. A *row* is one direction of a region's basis over the
tokens that are coded: row = region * D + direction. Rows are coded in runs of one class: first, for
each class from the lowest, the rows of that class; then, for each shift from the lowest, the low
bits of the rows of that shift. A row's value q is `(symbol - 128) << shift | low`, or, where that
cannot be said, symbol 0 and q itself in the list of escapes, in the order of coding.

Encoding is float32, each sum in the order of its index and no product fused with a sum; decoding
sums whole numbers modulo 2^32: so C++ and numpy give the same bytes, whatever the machine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvist.native.rans_twin import SCALE, SYMBOLS, Decoder, Encoder

Buffer = bytes | bytearray | memoryview | npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

DTYPES = ("bfloat16", "float16", "float32")
MAX_SHIFT = 7
_MAX_VALUE = float(1 << 24)  # up to here float32 holds every integer
_MIDDLE = 128
_LARGEST = {"bfloat16": 0x7F7F0000, "float16": 0x477FE000, "float32": 0x7F7FFFFF}
_NOT_ROWS = "the stream is not one of such rows"


class RowCoder:
    """Rows of integers ↔ a rANS stream and a list of escapes."""

    def __init__(self, frequencies: Buffer, row_class: Buffer, row_shift: Buffer) -> None:
        """Takes the tables.

        Args:
            frequencies: u16 `[classes, 256]`; each adds up to 4096, symbol 0 occurs.
            row_class: u8, one a row.
            row_shift: u8, one a row: low bits, at most `MAX_SHIFT`.

        Raises:
            ValueError: they do not fit each other.
        """
        self._frequencies = np.frombuffer(frequencies, "<u2").astype(np.int64).reshape(-1, SYMBOLS)
        classes = np.frombuffer(row_class, np.uint8).astype(np.int64)
        self._shift = np.frombuffer(row_shift, np.uint8).astype(np.int64)
        table = self._frequencies
        if (table.sum(1) != SCALE).any() or (table >= SCALE).any() or (table[:, 0] == 0).any():
            raise ValueError("frequencies of a class do not add up")
        if len(classes) != len(self._shift) or not len(classes):
            raise ValueError("classes and shifts are of different rows")
        if classes.max() >= len(table) or self._shift.max() > MAX_SHIFT:
            raise ValueError("a row's class or shift is out of range")
        self.rows = len(classes)
        self._high = [(c, np.flatnonzero(classes == c)) for c in np.unique(classes)]
        self._low = [(s, np.flatnonzero(self._shift == s)) for s in np.unique(self._shift) if s]

    def encode_rows(self, values: Buffer) -> tuple[bytes, bytes]:
        """The stream and the escapes (i32) of `[rows, tokens]` i32 values."""
        q = np.frombuffer(values, "<i4").reshape(self.rows, -1).astype(np.int64)
        coder, escapes = Encoder(), []
        low = q & ((1 << self._shift[:, None]) - 1)
        symbols = np.clip((q >> self._shift[:, None]) + _MIDDLE, -1, SYMBOLS)
        for cls, rows in self._high:
            said = (symbols[rows] > 0) & (symbols[rows] < SYMBOLS)
            said &= self._frequencies[cls][np.clip(symbols[rows], 0, SYMBOLS - 1)] > 0
            escapes.append(q[rows][~said])
            symbols[rows] = np.where(said, symbols[rows], 0)
            low[rows] = np.where(said, low[rows], 0)
        for shift, rows in reversed(self._low):
            coder.run(_uniform(int(shift)), low[rows].astype(np.uint8).ravel())
        for cls, rows in reversed(self._high):
            coder.run(self._frequencies[cls], symbols[rows].astype(np.uint8).ravel())
        return coder.finish(), np.concatenate(escapes).astype("<i4").tobytes()

    def decode_rows(self, stream: Buffer, escapes: Buffer, tokens: int) -> bytes:
        """`[rows, tokens]` i32 values.

        Raises:
            ValueError: the stream or the escapes are not those of such rows.
        """
        return self._decode(stream, escapes, tokens).astype("<i4").tobytes()

    def _decode(self, stream: Buffer, escapes: Buffer, tokens: int) -> Ints:
        coder = Decoder(bytes(stream))
        high = np.zeros((self.rows, tokens), np.int64)
        low = np.zeros((self.rows, tokens), np.int64)
        for cls, rows in self._high:
            got = coder.run(self._frequencies[cls], len(rows) * tokens)
            high[rows] = got.reshape(len(rows), tokens)
        for shift, rows in self._low:
            got = coder.run(_uniform(int(shift)), len(rows) * tokens)
            low[rows] = got.reshape(len(rows), tokens)
        coder.end()
        q = (high - _MIDDLE) << self._shift[:, None] | low
        given = np.frombuffer(bytes(escapes), "<i4") if len(escapes) % 4 == 0 else np.zeros(0)
        order = np.concatenate([rows for _, rows in self._high])
        escaped = high[order] == 0
        if len(given) != int(escaped.sum()) or len(escapes) % 4:
            raise ValueError(_NOT_ROWS)
        ordered = q[order]
        ordered[escaped] = given
        q[order] = ordered
        return q.astype(np.int32)


class CachegenPlan(RowCoder):
    """All that one table, level and dtype say of a block, ready for coding. Immutable."""

    def __init__(
        self,
        frequencies: Buffer,
        row_class: Buffer,
        row_shift: Buffer,
        *,
        dim: int,
        dtype: str,
        analysis: Buffer,
        basis: Buffer,
        scale: Buffer,
        mean: Buffer,
        inverse_spread: Buffer,
        turned: Buffer,
        pairs: int,
        limit: float,
    ) -> None:
        """Takes the arrays.

        Args:
            dim: channels of a region, D.
            dtype: one of `DTYPES`.
            analysis: f32 `[regions, D channels, D directions]`: values less their mean → q.
            basis: i8 `[regions, D directions, D channels]`: q → channels in units of `scale`.
            scale: f32 `[regions, D]`.
            mean: f32 `[regions, D]`.
            inverse_spread: f32 `[rows]`: q times it has a spread of about 1.
            turned: u8 `[regions]`: 1 where RoPE turns the values.
            pairs: channels i and i + pairs are turned together, for i < pairs.
            limit: a token whose mean square of q * inverse_spread is above it is not coded.

        Raises:
            ValueError: they do not fit each other.
        """
        super().__init__(frequencies, row_class, row_shift)
        if dtype not in DTYPES or dim < 1 or self.rows % dim or not 0 <= 2 * pairs <= dim:
            raise ValueError("no such plan")
        self._dim, self._dtype, self._pairs, self._limit = dim, dtype, pairs, limit
        regions = self.rows // dim
        self._analysis = _floats(analysis, regions, dim, dim)
        directions = np.frombuffer(basis, np.int8)
        if len(directions) != regions * dim * dim:
            raise ValueError("the basis is of other regions")
        self._basis = directions.reshape(regions, dim, dim).astype(np.int32)
        self._scale = _floats(scale, regions, dim)
        self._mean = _floats(mean, regions, dim)
        self._inverse = _floats(inverse_spread, self.rows)
        self._turned = np.frombuffer(turned, np.uint8)
        if len(self._turned) != regions:
            raise ValueError("turned is not of such regions")

    def encode(self, block: Buffer, cosine: Buffer, sine: Buffer) -> tuple[bytes, bytes, bytes]:
        """The tokens left out (u32), the stream, and the escapes (i32).

        Args:
            block: `[regions][tokens][D]` values of the dtype.
            cosine, sine: f32 `[tokens, pairs]` of the angles that keys were turned by.

        Raises:
            ValueError: a buffer's size does not fit.
        """
        x = to_float(block, self._dtype)
        size = self.rows // self._dim * self._dim
        tokens = len(x) // max(1, size)
        if not tokens or len(x) != size * tokens:
            raise ValueError("the block is not of so many regions")
        x = x.reshape(-1, tokens, self._dim)
        with np.errstate(all="ignore"):
            x = self._turn(x, *self._angles(cosine, sine, tokens), -1) - self._mean[:, None]
            y = np.zeros((len(x), self._dim, tokens), np.float32)
            for channel in range(self._dim):
                y += self._analysis[:, channel, :, None] * x[:, None, :, channel]
            parts: Floats = y.reshape(self.rows, tokens)
            strange = np.zeros(tokens, np.float32)
            for row in range(self.rows):
                part = parts[row] * self._inverse[row]
                strange += part * part
            fits = (np.abs(parts) < _MAX_VALUE).all(0)
            kept = fits & (strange <= np.float32(self._limit) * np.float32(self.rows))
            q = np.rint(parts[:, kept]).astype(np.int32)
        stream, escapes = self.encode_rows(q.tobytes()) if kept.any() else (b"", b"")
        return np.flatnonzero(~kept).astype("<u4").tobytes(), stream, escapes

    def decode(
        self,
        stream: Buffer,
        escapes: Buffer,
        left_out: Buffer,
        out: Buffer,
        cosine: Buffer,
        sine: Buffer,
    ) -> None:
        """Fills `out` but for the tokens that were left out.

        Args:
            stream, escapes: as `encode` gives them.
            left_out: u32, rising.
            out: `[regions][tokens][D]`; on an error its bytes are undefined.
            cosine, sine: as for `encode`.

        Raises:
            ValueError: not what `encode` gives for such a block.
        """
        whole = np.frombuffer(out, _WORDS[self._dtype])
        tokens = len(whole) // self.rows
        missing = np.frombuffer(bytes(left_out), "<u4").astype(np.int64)
        rising = (np.diff(missing) > 0).all() and (missing < tokens).all()
        if not tokens or len(whole) != tokens * self.rows or not rising:
            raise ValueError(_NOT_ROWS)
        kept = np.setdiff1d(np.arange(tokens), missing)
        q = self._decode(stream, escapes, len(kept)).reshape(-1, self._dim, len(kept))
        with np.errstate(all="ignore"):
            sums = np.zeros((len(q), len(kept), self._dim), np.int32)
            for direction in range(self._dim):
                sums += q[:, direction, :, None] * self._basis[:, direction, None, :]
            x = sums.astype(np.float32) * self._scale[:, None] + self._mean[:, None]
            cos, sin = self._angles(cosine, sine, tokens)
            x = self._turn(x, cos[kept], sin[kept], 1)
            whole.reshape(-1, tokens, self._dim)[:, kept] = from_float(x, self._dtype)

    def _angles(self, cosine: Buffer, sine: Buffer, tokens: int) -> tuple[Floats, Floats]:
        return _floats(cosine, tokens, self._pairs), _floats(sine, tokens, self._pairs)

    def _turn(self, x: Floats, cos: Floats, sin: Floats, sign: int) -> Floats:
        """Turns the regions that RoPE turns, by the angles (1) or back (-1)."""
        turned = self._turned == 1
        a, b = x[turned, :, : self._pairs], x[turned, :, self._pairs : 2 * self._pairs]
        sin = sin if sign > 0 else -sin
        new = x.copy()
        new[turned, :, : self._pairs] = a * cos - b * sin
        new[turned, :, self._pairs : 2 * self._pairs] = b * cos + a * sin
        return new


_WORDS = {"bfloat16": "<u2", "float16": "<u2", "float32": "<u4"}


def to_float(block: Buffer, dtype: str) -> Floats:
    """The values of a block, flat."""
    words: npt.NDArray[Any] = np.frombuffer(block, _WORDS[dtype])
    if dtype == "bfloat16":
        words = words.astype(np.uint32) << np.uint32(16)
    elif dtype == "float16":
        words = words.view(np.float16).astype(np.float32)
    out: Floats = words.view(np.float32)
    return out


def from_float(x: Floats, dtype: str) -> npt.NDArray[Any]:
    """The nearest value of the dtype, and its largest in place of what is beyond."""
    largest = np.uint32(_LARGEST[dtype]).view(np.float32)
    x = np.fmin(np.fmax(x, -largest), largest)
    if dtype == "float16":
        return x.astype(np.float16).view(np.uint16)
    bits = x.view(np.uint32)
    if dtype == "float32":
        return bits
    even = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + even) >> np.uint32(16)).astype(np.uint16)


def _floats(data: Buffer, *shape: int) -> Floats:
    values = np.frombuffer(data, "<f4")
    if len(values) != int(np.prod(shape)):
        raise ValueError(f"{len(values)} numbers in place of {shape}")
    return values.reshape(shape)


def _uniform(bits: int) -> npt.NDArray[np.int64]:
    """Frequencies of `2 ** bits` symbols that are all as likely."""
    out = np.zeros(SYMBOLS, np.int64)
    out[: 1 << bits] = SCALE >> bits
    return out
