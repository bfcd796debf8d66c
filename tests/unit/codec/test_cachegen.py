"""CacheGen keeps its promises: bounds, sinks, positions, levels, and what it refuses."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.codec.cachegen.body import Body, Mode, open_body
from kvist.codec.cachegen.codec import Cachegen
from kvist.codec.cachegen.levels import BY_NUMBER, LEVELS, Family, level_named
from kvist.codec.cachegen.position import Turning
from kvist.codec.cachegen.table import TableShape
from kvist.codec.payload import HEAD_BYTES
from kvist.core.errors import ConfigError, FormatError
from kvist.core.layout import BlockLayout
from kvist.native.cachegen_twin import to_float
from kvist.testing.made_up_kv import made_up_block, made_up_table

LAYOUT = BlockLayout(3, 2, 16, 40, "bfloat16")
TABLE = made_up_table(TableShape.of(LAYOUT))
TUNED = [level for level in LEVELS if level.family is Family.TUNED]
PAPER = [level for level in LEVELS if level.family is Family.PAPER]


def codec(name: str, layout: BlockLayout = LAYOUT) -> Cachegen:
    return Cachegen(made_up_table(TableShape.of(layout)), level_named(name), layout)


def decoded(one: Cachegen, stored: bytes, layout: BlockLayout = LAYOUT) -> bytes:
    out = bytearray(layout.block_bytes)
    one.decode(memoryview(stored), memoryview(out))
    return bytes(out)


def values(block: bytes, layout: BlockLayout = LAYOUT) -> npt.NDArray[np.float32]:
    shape = (layout.layers, layout.kinds, layout.kv_heads, layout.block_tokens, layout.head_dim)
    return to_float(block, layout.dtype).reshape(shape)


def body_of(stored: bytes, layout: BlockLayout = LAYOUT) -> Body:
    return open_body(
        memoryview(stored)[HEAD_BYTES:], token_bytes=layout.token_bytes, anchor_bytes=0
    )


def test_numbers_and_names_of_levels_are_promises() -> None:
    assert {level.number: level.name for level in LEVELS} == {
        **{n: f"cachegen-{n}" for n in range(1, 8)},
        **{100 + n: f"cachegen-paper-{n}" for n in range(1, 6)},
    }
    assert BY_NUMBER[3] is level_named("cachegen-3")
    with pytest.raises(ConfigError, match="unknown codec"):
        level_named("cachegen-0")


@pytest.mark.parametrize("family", [TUNED, PAPER])
def test_a_coarser_level_is_smaller_and_less_exact(family: list) -> None:
    block = made_up_block(LAYOUT, position=LAYOUT.block_tokens)
    sizes, errors = [], []
    for level in family:
        stored = codec(level.name).encode(memoryview(block))
        sizes.append(len(stored))
        error = values(block) - values(decoded(codec(level.name), stored))
        errors.append(float(np.square(error).mean()))
    assert sizes == sorted(sizes, reverse=True)
    assert errors == sorted(errors)
    assert len(block) > sizes[0] > 1.2 * sizes[-1]


@pytest.mark.parametrize("level", TUNED, ids=lambda level: level.name)
def test_error_in_the_basis_is_half_a_step_at_most(level: object) -> None:
    """The bound: each direction of the basis, in steps, comes back within a half. Float32 blocks,
    so that rounding to the dtype adds next to nothing.
    """
    layout = BlockLayout(2, 2, 16, 40, "float32")
    table = made_up_table(TableShape.of(layout))
    block = made_up_block(layout, position=layout.block_tokens)
    one = codec(level.name, layout)  # type: ignore[attr-defined]
    stored = one.encode(memoryview(block))
    body = body_of(stored, layout)
    assert body.mode is Mode.TUNED
    assert len(body.left_out) == 0
    error = values(decoded(one, stored, layout), layout) - values(block, layout)
    cos, sin = Turning(table, layout.block_tokens, layout.dtype).angles(body.position)
    a, b = error[:, 0, :, :, :8].copy(), error[:, 0, :, :, 8:].copy()
    error[:, 0, :, :, :8], error[:, 0, :, :, 8:] = a * cos + b * sin, b * cos - a * sin
    rank = level.rank  # type: ignore[attr-defined]
    step = 2.0 ** ((table.gauge + 4 * (rank - 1)) / 4)
    scaled = error.reshape(-1, layout.block_tokens, 16) * table.weight[:, None]
    parts = np.einsum("rtc,rcj->rtj", scaled, np.linalg.inv(table.basis.astype(float) / 127))
    assert np.abs(parts / step).max() < 0.5 + 0.02


@pytest.mark.parametrize("level", PAPER, ids=lambda level: level.name)
def test_error_of_the_papers_deltas_is_half_a_bin_at_most(level: object) -> None:
    layout = BlockLayout(3, 2, 16, 40, "float32")
    table = made_up_table(TableShape.of(layout))
    block = made_up_block(layout, position=layout.block_tokens)
    one = codec(level.name, layout)  # type: ignore[attr-defined]
    error = values(decoded(one, one.encode(memoryview(block)), layout), layout)
    error = np.abs(error - values(block, layout))
    wider = 2.0 ** (np.arange(3) / 2) * 2.0 ** (level.rank - 5)  # type: ignore[attr-defined]
    step = table.delta_step * wider[:, None]
    anchor = np.arange(40) % 10 == 0
    largest = np.abs(values(block, layout))[:, :, :, anchor].max(axis=(2, 4))
    bound = largest / 254 * 1.001
    assert (error[:, :, :, anchor].max(axis=(2, 4)) <= bound).all()
    slack = 1e-5 * np.abs(values(block, layout)).max()
    assert (error[:, :, :, ~anchor].max(axis=(2, 3, 4)) <= step / 2 + slack).all()


def test_a_sink_stands_in_the_payload_as_it_is() -> None:
    block = made_up_block(LAYOUT, position=0)
    stored = codec("cachegen-7").encode(memoryview(block))
    assert bytes(body_of(stored).left_out) == bytes(4)
    again = values(decoded(codec("cachegen-7"), stored))
    assert (again[:, :, :, 0] == values(block)[:, :, :, 0]).all()
    assert (again[:, :, :, 1:] != values(block)[:, :, :, 1:]).any()


@pytest.mark.parametrize("position", [0, 40, 400, 4000])
def test_the_position_of_a_block_is_found(position: int) -> None:
    turning = Turning(TABLE, LAYOUT.block_tokens, LAYOUT.dtype)
    block = made_up_block(LAYOUT, position=position)
    assert turning.find(memoryview(block)) == position


def test_a_wrong_position_costs_bytes_and_no_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    block = made_up_block(LAYOUT, position=400)
    right = codec("cachegen-3")
    stored = right.encode(memoryview(block))
    monkeypatch.setattr(Turning, "find", lambda *_: 4000)
    astray = codec("cachegen-3").encode(memoryview(block))
    assert len(astray) > len(stored)
    errors = [np.square(values(decoded(right, s)) - values(block)).mean() for s in (stored, astray)]
    assert errors[1] < 1.3 * errors[0]


def test_what_is_not_finite_comes_back_and_spoils_no_neighbour() -> None:
    x = values(made_up_block(LAYOUT, position=40)).copy()
    x[1, 0, 1, 7, 3], x[2, 1, 0, 9, 1] = np.nan, -np.inf
    block = (x.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    one = codec("cachegen-4")
    stored = one.encode(memoryview(block))
    assert np.frombuffer(body_of(stored).left_out, "<u4").tolist() == [7, 9]
    again = values(decoded(one, stored))
    for token in (7, 9):
        assert np.array_equal(again[:, :, :, token], values(block)[:, :, :, token], equal_nan=True)
    others = [t for t in range(40) if t not in (7, 9)]
    assert np.isfinite(again[:, :, :, others]).all()


@settings(max_examples=60)
@given(
    layers=st.integers(1, 3),
    kinds=st.integers(1, 2),
    heads=st.integers(1, 3),
    dim=st.integers(1, 40),
    tokens=st.integers(1, 50),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    name=st.sampled_from([level.name for level in LEVELS]),
    fill=st.sampled_from(["kv", "zeros", "large", "bits"]),
    seed=st.integers(0, 99),
)
def test_blocks_of_any_shape_come_back(
    layers: int, kinds: int, heads: int, dim: int, tokens: int, dtype: str, name: str, fill: str,
    seed: int,
) -> None:  # fmt: skip
    layout = BlockLayout(layers, heads, dim, tokens, dtype, kinds)
    block = made_up_block(layout, seed=seed, position=tokens)
    if fill == "zeros":
        block = bytes(len(block))
    elif fill == "bits":
        block = np.random.default_rng(seed).bytes(len(block))
    elif fill == "large":
        raw = np.frombuffer(block, np.uint8).copy()
        raw[layout.itemsize - 1 :: 7 * layout.itemsize] |= 0x78
        block = raw.tobytes()
    one = codec(name, layout)
    stored = one.encode(memoryview(block))
    assert len(stored) <= len(block) + HEAD_BYTES + 16
    again = decoded(one, stored, layout)
    before, after = to_float(block, dtype), to_float(again, dtype)
    odd = ~np.isfinite(before)
    assert np.array_equal(before[odd], after[odd], equal_nan=True)
    assert np.isfinite(after[~odd]).all()
    assert decoded(one, stored, layout) == again


def test_another_table_level_or_layout_is_refused() -> None:
    block = made_up_block(LAYOUT)
    stored = codec("cachegen-3").encode(memoryview(block))
    for name in ("cachegen-2", "cachegen-paper-3"):
        with pytest.raises(FormatError, match="payload of cachegen-3"):
            decoded(codec(name), stored)
    unknown = bytearray(stored)
    unknown[8:12] = struct.pack("<I", 77)
    with pytest.raises(FormatError, match="payload of 77"):
        decoded(codec("cachegen-3"), bytes(unknown))
    other = bytearray(stored)
    other[16] ^= 1
    with pytest.raises(FormatError, match="cachegen table"):
        decoded(codec("cachegen-3"), bytes(other))
    with pytest.raises(ConfigError, match="kvist codec profile"):
        Cachegen(TABLE, level_named("cachegen-3"), BlockLayout(3, 2, 17, 40, "bfloat16"))
    with pytest.raises(ConfigError, match="codes no float8"):
        Cachegen(TABLE, level_named("cachegen-3"), BlockLayout(3, 2, 16, 40, "float8_e4m3"))


@pytest.mark.parametrize("field", [4, 8, 12])
@pytest.mark.parametrize("value", [1, 41, 0x7FFFFFFF, 0xFFFFFFFF])
def test_a_body_that_names_more_than_it_has_is_refused(field: int, value: int) -> None:
    """Positions, tokens left out, escapes: a length bomb allocates nothing."""
    stored = bytearray(codec("cachegen-3").encode(memoryview(made_up_block(LAYOUT, position=40))))
    stored[HEAD_BYTES + field : HEAD_BYTES + field + 4] = struct.pack("<I", value)
    if field == 4 and value <= 41:
        decoded(codec("cachegen-3"), bytes(stored))  # another position is other values, no fault
        return
    with pytest.raises(FormatError):
        decoded(codec("cachegen-3"), bytes(stored))


def test_bodies_of_no_mode_or_another_familys_are_refused() -> None:
    stored = codec("cachegen-3").encode(memoryview(made_up_block(LAYOUT)))
    for mode in (2, 3, 255):
        bad = bytearray(stored)
        bad[HEAD_BYTES] = mode
        with pytest.raises(FormatError):
            decoded(codec("cachegen-3"), bytes(bad))
    raw = bytearray(codec("cachegen-3").encode(memoryview(bytes(range(256)) * 60)))
    assert raw[HEAD_BYTES] == Mode.RAW
    raw[HEAD_BYTES + 8] = 1
    with pytest.raises(FormatError, match="names parts"):
        decoded(codec("cachegen-3"), bytes(raw))
