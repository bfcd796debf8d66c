"""A table and payloads of `cachegen`, byte for byte: a stored cache must stay readable.

`python tests/golden/test_cachegen_golden.py` writes what is not there; what is there is a promise.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from kvist.codec.cachegen.codec import Cachegen
from kvist.codec.cachegen.levels import LEVELS, level_named
from kvist.codec.cachegen.table import ProfileTable, TableShape
from kvist.core.layout import BlockLayout
from kvist.native import digest
from kvist.testing.made_up_kv import made_up_block, made_up_table

HERE = Path(__file__).with_name("payloads")
TABLE = HERE / "cachegen-table-v1.kvcg"
SHAPE = TableShape(2, 2, 2, 8)
NAMES = [(level.name, "bfloat16") for level in LEVELS]
NAMES += [("cachegen-2", "float16"), ("cachegen-2", "float32"), ("cachegen-paper-2", "float32")]


def layout_of(dtype: str) -> BlockLayout:
    return BlockLayout(SHAPE.layers, SHAPE.kv_heads, SHAPE.head_dim, 40, dtype)


def codec_of(name: str, dtype: str) -> Cachegen:
    return Cachegen(ProfileTable.parse(TABLE.read_bytes()), level_named(name), layout_of(dtype))


def path_of(name: str, dtype: str, suffix: str) -> Path:
    return HERE / f"{name}-{dtype}{suffix}"


def decoded(name: str, dtype: str, stored: bytes) -> bytes:
    out = bytearray(layout_of(dtype).block_bytes)
    codec_of(name, dtype).decode(memoryview(stored), memoryview(out))
    return bytes(out)


def test_golden_table_is_read_and_written_as_it_was() -> None:
    data = TABLE.read_bytes()
    assert ProfileTable.parse(data).file_bytes == data
    assert ProfileTable.parse(data).shape == SHAPE


@pytest.mark.parametrize(("name", "dtype"), NAMES)
def test_golden_payload_means_what_it_meant(name: str, dtype: str) -> None:
    again = decoded(name, dtype, path_of(name, dtype, ".bin").read_bytes())
    assert digest(again).hex() == path_of(name, dtype, ".digest").read_text().strip()


@pytest.mark.parametrize(("name", "dtype"), NAMES)
def test_golden_payload_is_what_we_write(name: str, dtype: str) -> None:
    """From the block that lies beside it."""
    stored = path_of(name, dtype, ".bin").read_bytes()
    block = path_of("cachegen-block", dtype, ".bin").read_bytes()
    assert codec_of(name, dtype).encode(memoryview(block)) == stored


def _write_missing() -> None:
    if not TABLE.exists():
        TABLE.write_bytes(made_up_table(SHAPE).file_bytes)
    for name, dtype in NAMES:
        source = path_of("cachegen-block", dtype, ".bin")
        if not source.exists():
            block = np.frombuffer(made_up_block(layout_of(dtype), position=0), np.uint8)
            source.write_bytes(block.tobytes())
        path = path_of(name, dtype, ".bin")
        if not path.exists():
            stored = codec_of(name, dtype).encode(memoryview(source.read_bytes()))
            path.write_bytes(stored)
            meant = digest(decoded(name, dtype, stored)).hex()
            path.with_suffix(".digest").write_text(meant + "\n")


if __name__ == "__main__":
    sys.exit(_write_missing())
