"""Payloads of every codec, byte for byte: a stored cache must stay readable.

`python tests/golden/test_payload_golden.py` writes the payloads of codecs that have none yet; those
that are there are promises and are never written again.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from kvist.codec.chain import CODECS
from kvist.codec.keyring import Keyring
from kvist.codec.payload import BlockCodec
from kvist.codec.registry import open_codecs
from kvist.core.layout import BlockLayout
from kvist.native import digest
from kvist.native.quantise_twin import from_float
from kvist.native.quantshape import Number

HERE = Path(__file__).with_name("payloads")
NUMBERS = {
    "bfloat16": Number.BFLOAT16,
    "float16": Number.FLOAT16,
    "float32": Number.FLOAT32,
}
KEY = digest(b"golden block")
RING = Keyring("golden", {"golden": bytes(range(32))})
NAMES = [(word, dtype) for word in CODECS for dtype in NUMBERS]


def layout_of(dtype: str) -> BlockLayout:
    return BlockLayout(layers=2, kv_heads=2, head_dim=24, block_tokens=40, dtype=dtype)


def golden_block(dtype: str) -> bytes:
    """Values from integers alone, a few of them not finite; the same on every machine."""
    layout = layout_of(dtype)
    n = np.arange(layout.block_bytes // layout.itemsize, dtype=np.uint64)
    noise = (n * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)  # 24 bits
    powers = 2.0 ** ((n * np.uint64(7) % np.uint64(11)).astype(np.float64) - 6)
    x = ((noise.astype(np.float64) / 2**23 - 1) * powers).astype(np.float32)
    x[100], x[2000] = np.inf, np.nan
    return from_float(x, NUMBERS[dtype]).tobytes()


def codec_of(word: str, dtype: str) -> BlockCodec:
    return CODECS[word].bind(layout_of(dtype))


def decoded(word: str, dtype: str, stored: bytes) -> bytes:
    out = bytearray(layout_of(dtype).block_bytes)
    codec_of(word, dtype).decode(memoryview(stored), memoryview(out))
    return bytes(out)


@pytest.mark.parametrize(("word", "dtype"), NAMES)
def test_golden_payload_is_what_we_write(word: str, dtype: str) -> None:
    stored = codec_of(word, dtype).encode(memoryview(golden_block(dtype)))
    assert stored == (HERE / f"{word}-{dtype}.bin").read_bytes()


@pytest.mark.parametrize(("word", "dtype"), NAMES)
def test_golden_payload_means_what_it_meant(word: str, dtype: str) -> None:
    again = decoded(word, dtype, (HERE / f"{word}-{dtype}.bin").read_bytes())
    assert digest(again).hex() == (HERE / f"{word}-{dtype}.digest").read_text().strip()
    if CODECS[word].exact:
        assert again == golden_block(dtype)


def test_golden_sealed_payload_opens() -> None:
    pytest.importorskip("cryptography")
    chain = open_codecs("lossless+aead", layout_of("bfloat16"), RING).writer
    out = bytearray(layout_of("bfloat16").block_bytes)
    stored = (HERE / "lossless+aead.bin").read_bytes()
    chain.decode(memoryview(stored), memoryview(out), key=KEY)
    assert out == golden_block("bfloat16")


def test_golden_sealed_payload_is_what_we_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the nonce that it was sealed with."""
    pytest.importorskip("cryptography")
    stored = (HERE / "lossless+aead.bin").read_bytes()
    nonce = stored[80:92]
    monkeypatch.setattr(os, "urandom", lambda size: nonce[:size])
    assert sealed() == stored


def sealed() -> bytes:
    chain = open_codecs("lossless+aead", layout_of("bfloat16"), RING).writer
    return chain.encode(memoryview(golden_block("bfloat16")), key=KEY, tenant="ann")


def _write_missing() -> None:
    for word, dtype in NAMES:
        path = HERE / f"{word}-{dtype}.bin"
        if path.exists():
            continue
        stored = codec_of(word, dtype).encode(memoryview(golden_block(dtype)))
        path.write_bytes(stored)
        path.with_suffix(".digest").write_text(digest(decoded(word, dtype, stored)).hex() + "\n")
    path = HERE / "lossless+aead.bin"
    if not path.exists():
        path.write_bytes(sealed())


if __name__ == "__main__":
    sys.exit(_write_missing())
