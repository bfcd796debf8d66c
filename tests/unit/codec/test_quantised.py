"""The bounds that the docstring of `quantised` states hold for every value."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.codec.quantised import QUANTISED, Quantised
from kvist.core.errors import ConfigError
from kvist.core.layout import BlockLayout
from kvist.testing.codec_suite import CONTENTS, block_values, suite_values

GROUPS = {"int8": 64, "fp8": 64, "int4": 32}
UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
TINY = {"bfloat16": 2.0**-125, "float16": 2.0**-24, "float32": 2.0**-125}

LAYOUTS = st.builds(
    BlockLayout,
    layers=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    head_dim=st.integers(1, 80),
    block_tokens=st.integers(1, 80),
    dtype=st.sampled_from(sorted(UNIT)),
    kinds=st.sampled_from([1, 2]),
)


def decoded(codec: Quantised, block: bytes) -> bytes:
    out = bytearray(len(block))
    codec.decode(memoryview(codec.encode(memoryview(block))), memoryview(out))
    return bytes(out)


def bounds(word: str, layout: BlockLayout, x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The bound on each value's error, less what rounding to the dtype costs."""
    out = np.zeros_like(x)
    for kind in range(layout.kinds):
        axis = 2 if layout.kinds == 2 and kind == 0 else 3  # of [layers, heads, tokens, dim]
        size = x.shape[axis + 1]
        for start in range(0, size, GROUPS[word]):
            part = [slice(None)] * 4
            part[axis] = slice(start, start + GROUPS[word])
            values = x[:, kind][tuple(part)]
            most = np.abs(values).max(axis, keepdims=True)
            reach = values.max(axis, keepdims=True) - values.min(axis, keepdims=True)
            out[:, kind][tuple(part)] = {
                "int8": 0.505 * most / 127,
                "fp8": np.maximum(0.0631 * np.abs(values), 0.001 * most / 448),
                "int4": 0.505 * reach / 15,
            }[word]
    return out


@pytest.mark.parametrize("word", QUANTISED)
@settings(max_examples=150)
@given(
    layout=LAYOUTS,
    content=st.sampled_from([c for c in CONTENTS if c not in ("noise", "special")]),
    seed=st.integers(0, 9),
    scale=st.integers(-40, 30),
)
def test_no_value_is_further_off_than_the_stated_bound(
    word: str, layout: BlockLayout, content: str, seed: int, scale: int
) -> None:
    block = suite_values(layout, content, seed)
    if layout.dtype == "float32" and content != "largest":
        scaled = block_values(layout, block).astype(np.float64) * 10.0**scale
        with np.errstate(all="ignore"):
            block = scaled.astype(np.float32).tobytes()
    x = block_values(layout, block).astype(np.float64)
    again = block_values(layout, decoded(Quantised(word, layout), block)).astype(np.float64)
    limit = bounds(word, layout, x) + UNIT[layout.dtype] * np.abs(again) + TINY[layout.dtype]
    assert (np.abs(again - x) <= limit).all()


@pytest.mark.parametrize("word", QUANTISED)
@pytest.mark.parametrize("dtype", sorted(UNIT))
def test_groups_next_to_the_largest_value_come_back_exactly(word: str, dtype: str) -> None:
    """An earlier int4 gave infinity here: 15 × scale was beyond the largest float32."""
    layout = BlockLayout(1, 2, 64, 64, dtype)
    block = suite_values(layout, "largest")
    again = decoded(Quantised(word, layout), block)
    assert np.isfinite(block_values(layout, again)).all()
    if dtype != "float16" and word == "int4":
        assert again == block  # max - min is beyond the largest: nothing can be quantised


@pytest.mark.parametrize("word", QUANTISED)
def test_a_group_with_what_is_not_finite_comes_back_exactly_and_others_small(word: str) -> None:
    layout = BlockLayout(1, 1, 64, 64, "bfloat16")
    plain = suite_values(layout, "normal")
    words = np.frombuffer(plain, np.uint16).copy().reshape(2, 64, 64)
    words[0, 5, 7] = 0x7F80  # infinity, in channel 7 of K
    words[1, 9, 3] = 0xFFC1  # a NaN with a payload, in token 9 of V
    codec = Quantised(word, layout)
    stored = codec.encode(memoryview(words.tobytes()))
    out = bytearray(layout.block_bytes)
    codec.decode(memoryview(stored), memoryview(out))
    again = np.frombuffer(out, np.uint16).reshape(2, 64, 64)
    group = GROUPS[word]
    assert (again[0, :group, 7] == words[0, :group, 7]).all()
    assert (again[1, 9, :group] == words[1, 9, :group]).all()
    assert not (again == words).all()
    assert len(stored) == len(codec.encode(memoryview(plain))) + 2 * 2 * group


def test_a_constant_group_comes_back_exactly_from_int4() -> None:
    layout = BlockLayout(1, 1, 32, 32, "bfloat16")
    block = suite_values(layout, "constant")
    assert decoded(Quantised("int4", layout), block) == block


def test_layouts_and_names_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not take float8_e4m3"):
        Quantised("int8", BlockLayout(1, 1, 8, 8, "float8_e4m3"))
    with pytest.raises(ConfigError, match="int3"):
        Quantised("int3", BlockLayout(1, 1, 8, 8, "bfloat16"))


def test_stated_sizes_of_codes_are_met() -> None:
    layout = BlockLayout(2, 4, 64, 64, "bfloat16")
    sizes = {
        word: layout.block_bytes / len(Quantised(word, layout).encode(memoryview(block)))
        for word in QUANTISED
        for block in [suite_values(layout, "normal")]
    }
    assert sizes["int8"] == sizes["fp8"] > 1.9
    assert sizes["int4"] > 3.1
