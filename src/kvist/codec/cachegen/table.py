"""The table of a model: what `kvist codec profile` writes and every `cachegen` payload names.

File, version 1; little-endian:

    offset  bytes  field
         0      8  magic `KVISTCGT`
         8      2  version, 1
        10      2  zeros
        12     20  layers, kinds, KV heads, head size, frequencies of RoPE: u32 each
        32      4  gauge, i32: the finest level's step is 2^(gauge / 4)
        36      4  strange, f32: from where a token is not coded
        40         inv_freq f64, mean f32, weight f32, delta_step f32, basis i8,
                   row_exponent i16, row_shape u8, delta_exponent i16, delta_shape u8,
                   frequencies u16: each in C order, one after another
      last      8  XXH3-64 of all before

A table's id is the first 16 bytes of the BLAKE3 of the file. A payload of another table is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvist.core.errors import ChecksumError, ConfigError, FormatError, VersionError
from kvist.core.layout import BlockLayout
from kvist.native import checksum, digest
from kvist.native.rans_twin import SCALE

TABLE_VERSION = 1
TABLE_ID_BYTES = 16
MAX_TABLE_BYTES = 1 << 30
SCALES = 33  # spreads of a class, in quarter octaves: from 2^-4 to 2^4 steps
SCALE_ZERO = 16  # the class of a spread of one step
SHAPES = 4
CLASSES = SCALES * SHAPES

_MAGIC = b"KVISTCGT"
_HEAD = struct.Struct("<8sHH5Iif")
_U64 = struct.Struct("<Q")
_MAX_DIM = 4096


@dataclass(frozen=True, slots=True)
class TableShape:
    """Of which model's KV a table speaks, tokens and dtype apart."""

    layers: int
    kinds: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, layout: BlockLayout) -> TableShape:
        """The shape of a layout."""
        return cls(layout.layers, layout.kinds, layout.kv_heads, layout.head_dim)

    @property
    def regions(self) -> int:
        """Heads of all layers and kinds."""
        return self.layers * self.kinds * self.kv_heads

    @property
    def rows(self) -> int:
        """Values of one token."""
        return self.regions * self.head_dim


@dataclass(frozen=True, eq=False)
class ProfileTable:
    """What a profile found. R regions (heads of all layers and kinds) of D channels each.

    Attributes:
        gauge: the finest level's step in a region's basis is 2^(gauge / 4).
        strange: a token whose parts have a mean square above it, in units of their spread, is
            unlike what was profiled.
        inv_freq: the model's inverse frequencies, if keys are to be turned back; else empty.
        mean: `[R, D]`, of keys that were turned back.
        weight: `[R, D]`, how much an error in a channel costs: the square root of its Fisher
            information.
        basis: `[R, D, D]` int8: row j is direction j, times 127, in weighted channels.
        row_exponent: `[R, D]`: the spread of direction j is 2^(row_exponent / 4).
        row_shape: `[R, D]`: 0 (like a Gaussian) to SHAPES - 1 (a sharp peak and long tails).
        delta_step: `[layers, kinds]`: spread of deltas to an anchor, the paper family's unit.
        delta_exponent: `[R, D]`: of deltas, in quarter octaves of that unit.
        delta_shape: `[R, D]`.
        frequencies: `[CLASSES, 256]`, each row adding up to 4096; class = shape * SCALES + scale;
            symbol 0 escapes, symbol s is the value s - 128.
    """

    shape: TableShape
    gauge: int
    strange: float
    inv_freq: npt.NDArray[np.float64]
    mean: npt.NDArray[np.float32]
    weight: npt.NDArray[np.float32]
    delta_step: npt.NDArray[np.float32]
    basis: npt.NDArray[np.int8]
    row_exponent: npt.NDArray[np.int16]
    row_shape: npt.NDArray[np.uint8]
    delta_exponent: npt.NDArray[np.int16]
    delta_shape: npt.NDArray[np.uint8]
    frequencies: npt.NDArray[np.uint16]

    @cached_property
    def file_bytes(self) -> bytes:
        """The whole file."""
        shape = self.shape
        head = _HEAD.pack(
            _MAGIC, TABLE_VERSION, 0, shape.layers, shape.kinds, shape.kv_heads, shape.head_dim,
            len(self.inv_freq), self.gauge, self.strange,
        )  # fmt: skip
        body = head + b"".join(
            np.ascontiguousarray(getattr(self, name), dtype).tobytes()
            for name, dtype, _ in _arrays(shape, len(self.inv_freq))
        )
        return body + _U64.pack(checksum(body))

    @cached_property
    def id(self) -> bytes:
        """16 bytes that name this table."""
        return digest(self.file_bytes)[:TABLE_ID_BYTES]

    @classmethod
    def parse(cls, data: bytes) -> ProfileTable:
        """Reads a file's bytes.

        Raises:
            FormatError: not a table, or values that no profile writes.
            ChecksumError: it was damaged.
            VersionError: written by a newer Kvist.
        """
        if len(data) < _HEAD.size + _U64.size or data[:8] != _MAGIC:
            raise FormatError("not a table of cachegen")
        if _U64.unpack_from(data, len(data) - 8)[0] != checksum(memoryview(data)[:-8]):
            raise ChecksumError("the checksum of a cachegen table does not match")
        _, version, zero, layers, kinds, heads, dim, count, gauge, strange = _HEAD.unpack_from(data)
        if version != TABLE_VERSION:
            raise VersionError(f"cachegen table version {version}; this Kvist reads 1")
        shape = TableShape(layers, kinds, heads, dim)
        sane = 0 < dim <= _MAX_DIM and 0 < kinds <= 2 and count <= dim // 2 and layers and heads
        if zero or not sane:
            raise FormatError("a cachegen table of an impossible shape")
        size = sum(
            int(np.prod(dims)) * np.dtype(t).itemsize for _, t, dims in _arrays(shape, count)
        )
        if size != len(data) - _HEAD.size - _U64.size:
            raise FormatError(f"a cachegen table of {len(data)} bytes for {shape}")
        found: dict[str, Any] = {}
        at = _HEAD.size
        for name, dtype, dims in _arrays(shape, count):
            length = int(np.prod(dims))
            found[name] = np.frombuffer(data, dtype, length, at).reshape(dims)
            at += length * np.dtype(dtype).itemsize
        table = cls(shape=shape, gauge=gauge, strange=strange, **found)
        table.check()
        return table

    def check(self) -> None:
        """Proves what coding relies on.

        Raises:
            FormatError: values that no profile writes.
        """
        table = self.frequencies.astype(np.int64)
        good = bool((table.sum(1) == SCALE).all() and (table < SCALE).all())
        good &= bool((table[:, 0] > 0).all())
        good &= bool((self.row_shape < SHAPES).all() and (self.delta_shape < SHAPES).all())
        for field in fields(self):
            values = getattr(self, field.name)
            if isinstance(values, np.ndarray) and values.dtype.kind == "f":
                good &= bool(np.isfinite(values).all())
        good &= bool((self.weight > 0).all() and (self.delta_step > 0).all())
        if not good or abs(self.gauge) > 400 or not 0 < self.strange < 1e9:
            raise FormatError("a cachegen table with values that no profile writes")


def read_table(path: str | Path) -> ProfileTable:
    """The table in a file.

    Raises:
        ConfigError: there is none, or it is not one that this Kvist reads.
    """
    where = "$.store.ssd.table"
    remedy = "make one: kvist codec profile MODEL --out FILE"
    if not path:
        raise ConfigError("cachegen needs a table of the model", path=where, remedy=remedy)
    try:
        file = Path(path)
        if file.stat().st_size > MAX_TABLE_BYTES:
            raise FormatError(f"{path} is too large for a table")
        return ProfileTable.parse(file.read_bytes())
    except OSError as exc:
        raise ConfigError(
            f"cannot read {path}: {exc.strerror or exc}", path=where, remedy=remedy
        ) from exc
    except FormatError as exc:
        raise ConfigError(f"{path}: {exc}", path=where, remedy=remedy) from exc


def _arrays(shape: TableShape, frequencies: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and dimensions of each array, in the order of the file."""
    rows = (shape.regions, shape.head_dim)
    yield "inv_freq", "<f8", (frequencies,)
    yield "mean", "<f4", rows
    yield "weight", "<f4", rows
    yield "delta_step", "<f4", (shape.layers, shape.kinds)
    yield "basis", "<i1", (*rows, shape.head_dim)
    yield "row_exponent", "<i2", rows
    yield "row_shape", "<u1", rows
    yield "delta_exponent", "<i2", rows
    yield "delta_shape", "<u1", rows
    yield "frequencies", "<u2", (CLASSES, 256)
