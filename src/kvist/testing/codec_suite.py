"""`CodecSuite`: what every codec of blocks must do. Subclass it and define `open_codec`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvist.codec.payload import HEAD_BYTES, BlockCodec
from kvist.core.errors import ConfigError, FormatError
from kvist.core.layout import DTYPE_BYTES, BlockLayout
from kvist.native.quantise_twin import from_float, to_float
from kvist.native.quantshape import Number

CONTENTS = ("normal", "channels", "zeros", "constant", "noise", "largest", "special")
_SHAPES = (
    # layers, kv_heads, head_dim, block_tokens, kinds
    (1, 1, 1, 1, 2),
    (2, 3, 7, 1, 2),
    (1, 2, 33, 5, 1),
    (3, 1, 16, 17, 2),
    (2, 2, 65, 70, 2),
)
_NUMBERS = {
    "bfloat16": Number.BFLOAT16,
    "float16": Number.FLOAT16,
    "float32": Number.FLOAT32,
}
_LIMIT_S = 60.0


def suite_layouts() -> Iterator[BlockLayout]:
    """Layouts of every dtype: one token, odd sizes, a latent, more than a group."""
    for (layers, heads, dim, tokens, kinds), dtype in product(_SHAPES, sorted(DTYPE_BYTES)):
        yield BlockLayout(layers, heads, dim, tokens, dtype, kinds)


def suite_values(layout: BlockLayout, content: str, seed: int = 0) -> bytes:
    """A block of `layout`: one of `CONTENTS`, by name.

    `channels`: K and V as models make them, some channels far larger than others. `noise`: bits at
    random. `special`: infinities, NaN, the largest and the least values among normal ones.
    `largest`: every value near the largest that the dtype has.
    """
    rng = np.random.default_rng(seed)
    count = layout.block_bytes // layout.itemsize
    if content == "noise" or layout.dtype not in _NUMBERS:
        return bytes(layout.block_bytes) if content == "zeros" else rng.bytes(layout.block_bytes)
    number = _NUMBERS[layout.dtype]
    largest = 65504.0 if number is Number.FLOAT16 else 3.3895313892515355e38
    x = rng.standard_normal(count)
    if content == "channels":
        x = (x.reshape(-1, layout.head_dim) * 4 ** rng.standard_normal(layout.head_dim)).ravel()
    elif content == "zeros":
        x = np.zeros(count)
    elif content == "constant":
        x = np.full(count, -3.25)
    elif content == "largest":
        x = np.sign(x) * largest * (1 - rng.random(count) / 100)
    elif content == "special":
        odd = np.array([np.inf, -np.inf, np.nan, largest, -largest, 1e-7, 1e-40, -0.0])
        x = np.where(rng.random(count) < 0.05, rng.choice(odd, count), x)
    with np.errstate(all="ignore"):
        return from_float(x.astype(np.float32), number).tobytes()


def block_values(layout: BlockLayout, block: bytes) -> npt.NDArray[np.float32]:
    """What a block's bytes mean: [layers, kinds, heads, tokens, dim]. Not for fp8 layouts."""
    number = _NUMBERS[layout.dtype]
    bits: npt.NDArray[Any] = np.frombuffer(block, "<u4" if number.width == 4 else "<u2")
    sizes = (layout.layers, layout.kinds, layout.kv_heads, layout.block_tokens, layout.head_dim)
    return to_float(bits, number).reshape(sizes)


class CodecSuite:
    """Subclass as `class TestMine(CodecSuite)`."""

    exact = True

    def open_codec(self, layout: BlockLayout) -> BlockCodec:
        """The codec bound to `layout`; `ConfigError` for a layout that it does not take."""
        raise NotImplementedError

    def codecs(self) -> Iterator[tuple[BlockLayout, BlockCodec]]:
        """The codec for each of `suite_layouts` that it takes."""
        for layout in suite_layouts():
            try:
                yield layout, self.open_codec(layout)
            except ConfigError:
                assert not self.exact, f"an exact codec takes every layout, {layout} too"

    def encoded(self) -> Iterator[tuple[BlockLayout, BlockCodec, bytes, bytes]]:
        """Layout, codec, block and payload for a few layouts and contents."""
        for layout, codec in list(self.codecs())[::3]:
            block = suite_values(layout, "channels")
            yield layout, codec, block, codec.encode(memoryview(block))

    @staticmethod
    def decode(codec: BlockCodec, stored: bytes, size_bytes: int) -> bytes:
        """The block of a payload."""
        out = bytearray(size_bytes)
        codec.decode(memoryview(stored), memoryview(out))
        return bytes(out)

    def test_name_is_a_word_of_a_codec_chain(self) -> None:
        for _, codec in self.codecs():
            assert re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,30}", codec.name)

    @pytest.mark.parametrize("content", CONTENTS)
    def test_blocks_come_back(self, content: str) -> None:
        taken = 0
        for layout, codec in self.codecs():
            taken += 1
            block = suite_values(layout, content)
            stored = codec.encode(memoryview(block))
            again = self.decode(codec, stored, len(block))
            assert codec.encode(memoryview(block)) == stored
            if self.exact:
                assert again == block, layout
            elif layout.dtype in _NUMBERS:
                before, after = block_values(layout, block), block_values(layout, again)
                odd = ~np.isfinite(before)
                assert np.isfinite(after[~odd]).all(), layout
                assert np.array_equal(before[odd], after[odd], equal_nan=True), layout
        assert taken

    def test_a_payload_cut_short_or_grown_is_refused(self) -> None:
        for layout, codec, _, stored in self.encoded():
            sizes = {*range(0, min(len(stored), 70), 9), len(stored) // 2, len(stored) - 1}
            for bad in (*(stored[:size] for size in sorted(sizes)), stored + b"\0"):
                with pytest.raises(FormatError):
                    self.decode(codec, bad, layout.block_bytes)

    def test_a_damaged_payload_is_refused_or_decoded(self) -> None:
        """Nothing but `FormatError`; no bit of the head may be another."""
        rng = np.random.default_rng(1)
        for layout, codec, _, stored in self.encoded():
            bits = [*range(0, 8 * HEAD_BYTES, 5), *rng.integers(0, 8 * len(stored), 200).tolist()]
            for bit in bits:
                bad = bytearray(stored)
                bad[bit // 8] ^= 1 << bit % 8
                try:
                    self.decode(codec, bytes(bad), layout.block_bytes)
                except FormatError:
                    continue
                assert bit >= 8 * HEAD_BYTES, (layout, bit)

    def test_a_block_or_place_of_another_size_is_refused(self) -> None:
        for layout, codec, block, stored in self.encoded():
            with pytest.raises(FormatError):
                codec.encode(memoryview(block + b"\0"))
            for size in (layout.block_bytes - 1, layout.block_bytes + 1, 2 * layout.block_bytes):
                with pytest.raises(FormatError):
                    self.decode(codec, stored, size)

    def test_a_payload_of_another_layout_is_refused(self) -> None:
        """Also where the number of bytes is the same."""
        layout = BlockLayout(2, 4, 8, 16, "bfloat16")
        stored = self.open_codec(layout).encode(memoryview(suite_values(layout, "normal")))
        for other in (BlockLayout(4, 2, 8, 16, "bfloat16"), BlockLayout(2, 4, 8, 16, "float16")):
            with pytest.raises(FormatError):
                self.decode(self.open_codec(other), stored, other.block_bytes)

    def test_threads_may_share_a_codec(self) -> None:
        layout = BlockLayout(2, 4, 16, 32, "bfloat16")
        codec = self.open_codec(layout)
        blocks = [suite_values(layout, "normal", seed) for seed in range(16)]

        def there_and_back(block: bytes) -> bytes:
            return self.decode(codec, codec.encode(memoryview(block)), len(block))

        alone = [there_and_back(block) for block in blocks]
        with ThreadPoolExecutor(4) as pool:
            together = [pool.submit(there_and_back, block) for block in blocks]
            assert [done.result(_LIMIT_S) for done in together] == alone
