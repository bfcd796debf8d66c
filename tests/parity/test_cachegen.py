"""CacheGen's coding: C++, on every instruction set, and its twin give the same bytes."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.codec.cachegen import plan as plans
from kvist.codec.cachegen.levels import level_named
from kvist.codec.cachegen.position import Turning
from kvist.codec.cachegen.table import TableShape
from kvist.core.layout import BlockLayout
from kvist.native import cachegen_twin
from kvist.testing.made_up_kv import made_up_block, made_up_table

LAYOUTS = (
    BlockLayout(2, 2, 16, 33, "bfloat16"),
    BlockLayout(1, 1, 7, 1, "float16"),
    BlockLayout(1, 2, 40, 19, "float32"),
    BlockLayout(2, 1, 64, 16, "float16", kinds=1),
    BlockLayout(1, 1, 128, 8, "bfloat16"),
)


@pytest.fixture(scope="session")
def cachegen(native: ModuleType) -> ModuleType:
    return native if hasattr(native, "CachegenPlan") else cachegen_twin


def made(module: ModuleType, layout: BlockLayout, level: str) -> Any:
    """The plan of a level, as `plans` makes it, of one implementation."""
    old = plans.CachegenPlan
    plans.CachegenPlan = module.CachegenPlan  # type: ignore[misc]
    try:
        return plans.tuned_plan(made_up_table(TableShape.of(layout)), level_named(level), layout)
    finally:
        plans.CachegenPlan = old  # type: ignore[misc]


def block_of(layout: BlockLayout, content: str, seed: int) -> bytes:
    if content == "kv":
        return made_up_block(layout, seed=seed, position=seed % 3 * layout.block_tokens)
    rng = np.random.default_rng(seed)
    if content == "noise":  # infinities, NaN and values near the largest among them
        return rng.bytes(layout.block_bytes)
    kv = np.frombuffer(made_up_block(layout, seed=seed), np.uint8).copy()
    where = rng.random(len(kv) // 64) < 0.01  # a few values that nothing expects
    kv.reshape(-1)[: len(where) * 64 : 64][where] ^= 0x7F
    return kv.tobytes()


@settings(max_examples=40)
@given(
    layout=st.sampled_from(LAYOUTS),
    level=st.sampled_from(["cachegen-1", "cachegen-3", "cachegen-7"]),
    content=st.sampled_from(["kv", "noise", "odd"]),
    seed=st.integers(0, 1000),
)
def test_blocks_are_coded_as_by_the_twin(
    cachegen: ModuleType, layout: BlockLayout, level: str, content: str, seed: int
) -> None:
    block = block_of(layout, content, seed)
    table = made_up_table(TableShape.of(layout))
    turning = Turning(table, layout.block_tokens, layout.dtype)
    angles = turning.angles(turning.find(memoryview(block)))
    plan, twin = made(cachegen, layout, level), made(cachegen_twin, layout, level)
    coded = plan.encode(block, *angles)
    assert coded == twin.encode(block, *angles)
    variants = cachegen.cachegen_variants() if hasattr(cachegen, "cachegen_variants") else 0
    for variant in range(variants):
        assert coded == plan.encode(block, *angles, variant=variant)
    left_out, stream, escapes = coded
    if not stream:
        return
    want = bytearray(block)
    twin.decode(stream, escapes, left_out, want, *angles)
    for kwargs in [{}, *({"variant": v} for v in range(variants))]:
        out = bytearray(block)
        plan.decode(stream, escapes, left_out, out, *angles, **kwargs)
        assert out == want


CLASSES = 5


def coder_arrays(seed: int) -> tuple[bytes, bytes, bytes, int]:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 40))
    frequencies = np.zeros((CLASSES, 256), np.int64)
    for row in frequencies:
        said = rng.choice(np.arange(1, 256), int(rng.integers(1, 30)), replace=False)
        cuts = np.sort(rng.choice(np.arange(1, 4096), len(said), replace=False))
        row[np.append(said, 0)] = np.diff(cuts, prepend=0, append=4096)
    classes = rng.integers(0, CLASSES, rows).astype(np.uint8)
    shifts = (rng.integers(0, 8, rows) * rng.integers(0, 2, rows)).astype(np.uint8)
    return frequencies.astype("<u2").tobytes(), classes.tobytes(), shifts.tobytes(), rows


@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 80), large=st.booleans())
def test_rows_of_any_integers_come_back(
    cachegen: ModuleType, seed: int, tokens: int, large: bool
) -> None:
    *arrays, rows = coder_arrays(seed)
    rng = np.random.default_rng(seed)
    size = 2**31 if large else 300
    values = rng.integers(-size, size, (rows, tokens)).astype("<i4").tobytes()
    coder, twin = cachegen.RowCoder(*arrays), cachegen_twin.RowCoder(*arrays)
    stream, escapes = coder.encode_rows(values)
    assert (stream, escapes) == twin.encode_rows(values)
    assert coder.decode_rows(stream, escapes, tokens) == values
    assert twin.decode_rows(stream, escapes, tokens) == values


@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 40), data=st.data())
def test_a_stream_that_is_not_of_the_rows_is_refused_by_both(
    cachegen: ModuleType, seed: int, tokens: int, data: st.DataObject
) -> None:
    *arrays, rows = coder_arrays(seed)
    values = np.random.default_rng(seed).integers(-300, 300, (rows, tokens)).astype("<i4")
    coder, twin = cachegen.RowCoder(*arrays), cachegen_twin.RowCoder(*arrays)
    stream, escapes = coder.encode_rows(values.tobytes())
    bad = bytearray(stream)
    bad[data.draw(st.integers(0, len(bad) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    answers = []
    for one in (coder, twin):
        try:
            answers.append(one.decode_rows(bytes(bad), escapes, tokens))
        except ValueError:
            answers.append(None)
    assert answers[0] == answers[1]
    for cut in ((stream[:-2], escapes), (stream, escapes + bytes(4)), (stream + b"\0\0", escapes)):
        for one in (coder, twin):
            with pytest.raises(ValueError, match=r"rows|symbols"):
                one.decode_rows(*cut, tokens)


def test_arrays_that_do_not_fit_are_refused(cachegen: ModuleType) -> None:
    frequencies, classes, shifts, _ = coder_arrays(3)
    for bad in (
        (frequencies[:-512], bytes([CLASSES - 1]) * len(classes), shifts),
        (frequencies, classes + b"\0", shifts),
        (frequencies, classes, bytes([8]) * len(shifts)),
        (bytes(512), bytes(len(classes)), shifts),
        (frequencies, b"", b""),
    ):
        with pytest.raises(ValueError, match=r"."):
            cachegen.RowCoder(*bad)


def test_tokens_left_out_must_rise_and_be_there(cachegen: ModuleType) -> None:
    layout = LAYOUTS[0]
    plan = made(cachegen, layout, "cachegen-4")
    block = made_up_block(layout)
    turning = Turning(made_up_table(TableShape.of(layout)), layout.block_tokens, layout.dtype)
    angles = turning.angles(0)
    left_out, stream, escapes = plan.encode(block, *angles)
    assert left_out == bytes(4)  # the first token is a sink
    for bad in (b"", b"\x21\0\0\0", bytes(8), b"\1\0\0\0\0\0\0\0", b"\0\0\0"):
        with pytest.raises(ValueError, match=r"."):
            plan.decode(stream, escapes, bad, bytearray(block), *angles)
    with pytest.raises(ValueError, match=r"."):
        plan.decode(stream, escapes, left_out, bytearray(block[:-2]), *angles)
    with pytest.raises(ValueError, match=r"."):
        plan.encode(block[:-2], *angles)
