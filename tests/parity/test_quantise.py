"""Quantising codecs: C++, with and without wide registers, and its twin give the same bytes."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.native import quantise_twin
from kvist.native.quantshape import Number, QuantShape, Scheme

SHAPES = st.builds(
    QuantShape,
    layers=st.integers(1, 2),
    kinds=st.integers(1, 2),
    heads=st.integers(1, 2),
    tokens=st.integers(1, 40),
    dim=st.integers(1, 40),
    number=st.sampled_from(Number),
    scheme=st.sampled_from(Scheme),
    group=st.sampled_from([1, 7, 16, 32, 64]),
)


@pytest.fixture(scope="session")
def quantise(native: ModuleType) -> ModuleType:
    return native if hasattr(native, "encode_quantised") else quantise_twin


def block(shape: QuantShape, seed: int) -> bytes:
    """Noise, zeros, or normal values of one or of many magnitudes."""
    rng = np.random.default_rng(seed)
    count = shape.block_bytes // shape.number.width
    if seed % 5 == 0:
        return rng.bytes(shape.block_bytes)
    if seed % 5 == 1:
        return bytes(shape.block_bytes)
    with np.errstate(all="ignore"):
        x = rng.standard_normal(count)
        if seed % 5 > 2:
            x *= 10.0 ** rng.integers(-44, 39)
        if seed % 5 == 4:
            x *= 10.0 ** rng.integers(-5, 5, count)
        return quantise_twin.from_float(x.astype(np.float32), shape.number).tobytes()


def decoded(quantise: ModuleType, body: bytes, shape: QuantShape, way: str = "") -> bytes:
    out = bytearray(shape.block_bytes)
    getattr(quantise, f"decode_quantised{way}")(body, out, shape)
    return bytes(out)


@settings(max_examples=200)
@given(shape=SHAPES, seed=st.integers(0, 60))
def test_bodies_and_blocks_are_those_of_the_twin(
    quantise: ModuleType, shape: QuantShape, seed: int
) -> None:
    raw = block(shape, seed)
    want = quantise_twin.encode_quantised(raw, shape)
    meant = decoded(quantise_twin, want, shape)
    assert quantise.encode_quantised(raw, shape) == want
    assert decoded(quantise, want, shape) == meant
    if hasattr(quantise, "encode_quantised_portable"):
        assert quantise.encode_quantised_portable(raw, shape) == want
        assert decoded(quantise, want, shape, "_portable") == meant


@settings(max_examples=200)
@given(shape=SHAPES, seed=st.integers(0, 60), data=st.data())
def test_a_damaged_body_is_refused_by_all_or_by_none(
    quantise: ModuleType, shape: QuantShape, seed: int, data: st.DataObject
) -> None:
    body = bytearray(quantise_twin.encode_quantised(block(shape, seed), shape))
    at = data.draw(st.integers(0, len(body) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "grow"]))
    if kind == "flip":
        body[at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del body[at:]
    else:
        body += bytes(data.draw(st.integers(1, 4)))
    answers = []
    for way in (quantise, quantise_twin):
        try:
            answers.append(decoded(way, bytes(body), shape))
        except ValueError:
            answers.append(None)
    assert (answers[0] is None) == (answers[1] is None)
    if answers[0] is not None and shape.number is Number.FLOAT32:
        finite = [np.nan_to_num(np.frombuffer(a, np.float32)) for a in answers]
        assert np.array_equal(*finite)


def test_a_block_of_another_shape_is_refused(quantise: ModuleType) -> None:
    shape = QuantShape(1, 2, 1, 4, 8, Number.BFLOAT16, Scheme.INT8, 64)
    with pytest.raises(ValueError, match="shape"):
        quantise.encode_quantised(bytes(10), shape)
    body = quantise.encode_quantised(bytes(shape.block_bytes), shape)
    with pytest.raises(ValueError, match="shape"):
        quantise.decode_quantised(body, bytearray(10), shape)
    with pytest.raises(BufferError, match="read-only"):
        quantise.decode_quantised(body, bytes(shape.block_bytes), shape)


def test_numbers_are_those_of_ieee(quantise: ModuleType) -> None:
    """A group of one value with scale 1 shows how a value is rounded to the block's numbers."""
    scale = np.full(4096, 0x3F80, np.uint16)
    for number in (Number.FLOAT16, Number.BFLOAT16):
        shape = QuantShape(1, 1, 1, 1, 4096, number, Scheme.FP8, 1)
        codes = np.tile(np.arange(256, dtype=np.uint8), 16)
        body = scale.tobytes() + codes.tobytes()
        bits = np.frombuffer(decoded(quantise, body, shape), np.uint16)
        want = quantise_twin.from_float(quantise_twin.from_e4m3(codes), number)
        same = (bits == want) | (codes & 0x7F == 0x7F)
        assert same.all()


def test_every_float16_survives_being_a_zero_point(quantise: ModuleType) -> None:
    """A group of int4 with one value is its zero point, converted to float32 and back."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    shape = QuantShape(1, 1, 1, 16, 4096, Number.FLOAT16, Scheme.INT4, 1)
    again = np.frombuffer(
        decoded(quantise, quantise.encode_quantised(bits.tobytes(), shape), shape), np.uint16
    )
    assert (np.where(bits == 0x8000, 0, bits) == again).all()


def test_a_shape_without_size_is_no_shape() -> None:
    with pytest.raises(ValueError, match="size"):
        QuantShape(1, 2, 1, 0, 8, Number.BFLOAT16, Scheme.INT8, 64)
