"""Lossless gives back every bit, of any layout and dtype, and refuses all else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.codec.lossless import Lossless
from kvist.codec.payload import HEAD_BYTES
from kvist.core.errors import FormatError
from kvist.core.layout import DTYPE_BYTES, BlockLayout

LAYOUTS = st.builds(
    BlockLayout,
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 33),
    block_tokens=st.integers(1, 17),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    kinds=st.sampled_from([1, 2]),
)
LAYOUT = BlockLayout(2, 3, 8, 16, "bfloat16")


def bits(layout: BlockLayout, seed: int) -> bytes:
    """Noise (NaN and infinity among it), zeros, or the upper bits of normal values."""
    size = layout.block_bytes
    rng = np.random.default_rng(seed)
    if seed % 3 == 0:
        return rng.bytes(size)
    if seed % 3 == 1:
        return bytes(size)
    words = rng.standard_normal(size // layout.itemsize).astype(np.float32).view(np.uint8)
    return words.reshape(-1, 4)[:, 4 - layout.itemsize :].tobytes()


@settings(max_examples=150)
@given(layout=LAYOUTS, seed=st.integers(0, 20))
def test_every_bit_comes_back_from_any_layout(layout: BlockLayout, seed: int) -> None:
    codec, block, out = Lossless(layout), bits(layout, seed), bytearray(layout.block_bytes)
    stored = codec.encode(memoryview(block))
    codec.decode(memoryview(stored), memoryview(out))
    assert out == block
    assert len(stored) <= len(block) + HEAD_BYTES + 8 + 6 * 4 + 128


def test_what_normal_values_take_is_well_below_their_size() -> None:
    layout = BlockLayout(2, 3, 64, 64, "bfloat16")
    stored = Lossless(layout).encode(memoryview(bits(layout, 2)))
    assert layout.block_bytes / len(stored) > 1.25


def test_a_block_of_another_size_or_layout_is_refused() -> None:
    codec = Lossless(LAYOUT)
    with pytest.raises(FormatError, match="bytes, not"):
        codec.encode(memoryview(bytes(10)))
    stored = memoryview(codec.encode(memoryview(bits(LAYOUT, 2))))
    turned = BlockLayout(3, 2, 8, 16, "bfloat16")
    with pytest.raises(FormatError, match="layout"):
        Lossless(turned).decode(stored, memoryview(bytearray(turned.block_bytes)))
    with pytest.raises(FormatError):
        codec.decode(stored, memoryview(bytearray(LAYOUT.block_bytes - 2)))
    with pytest.raises(FormatError):
        codec.decode(stored[:-1], memoryview(bytearray(LAYOUT.block_bytes)))


def test_no_changed_bit_gives_another_block() -> None:
    """Also in a plane that is stored raw, where the coder sees nothing."""
    codec, block = Lossless(LAYOUT), bits(LAYOUT, 2)
    stored = codec.encode(memoryview(block))
    for bit in range(0, 8 * len(stored), 3):
        bad, out = bytearray(stored), bytearray(len(block))
        bad[bit // 8] ^= 1 << bit % 8
        try:
            codec.decode(memoryview(bad), memoryview(out))
        except FormatError:
            continue
        assert out == block  # a bit that says nothing: half a byte behind a table
