"""Planes and their range coder: C++ and its twin give the same bytes, and take no others."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.native import planes_twin, rans_twin

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@pytest.fixture(scope="session")
def planes(native: ModuleType) -> ModuleType:
    return native if hasattr(native, "encode_planes") else planes_twin


def block(seed: int, groups: int, values: int, width: int) -> bytes:
    """Values as a KV cache has them, or noise, zeros, or almost only zeros."""
    rng = np.random.default_rng(seed)
    count = groups * values
    if seed % 4 == 0:
        return rng.bytes(count * width)
    if seed % 4 == 1:
        return bytes(count * width)
    if seed % 4 == 2:
        return (rng.random(count * width) < 0.001).astype(np.uint8).tobytes()
    bits = rng.standard_normal(count).astype(np.float32).view(np.uint32) >> (32 - 8 * width)
    return bits.astype(WORDS[width]).tobytes()


SHAPES = {
    "seed": st.integers(0, 40),
    "groups": st.integers(1, 4),
    "values": st.integers(1, 700),
    "width": st.sampled_from([1, 2, 4]),
}


def decoded(planes: ModuleType, body: bytes, size: int, groups: int, width: int) -> bytes:
    out = bytearray(size)
    planes.decode_planes(body, out, groups, width)
    return bytes(out)


@settings(max_examples=120)
@given(**SHAPES)
def test_bodies_are_those_of_the_twin_and_come_back(
    planes: ModuleType, seed: int, groups: int, values: int, width: int
) -> None:
    raw = block(seed, groups, values, width)
    body = planes.encode_planes(raw, groups, width)
    assert body == planes_twin.encode_planes(raw, groups, width)
    assert decoded(planes, body, len(raw), groups, width) == raw
    if hasattr(planes, "encode_planes_variants"):
        assert set(planes.encode_planes_variants(raw, groups, width)) == {body}
    for variant in range(planes.planes_variants() if hasattr(planes, "planes_variants") else 0):
        out = bytearray(len(raw))
        planes.decode_planes_variant(body, out, groups, width, variant)
        assert out == raw, variant


@settings(max_examples=200)
@given(**SHAPES, data=st.data())
def test_a_damaged_body_is_refused_or_decoded_alike(
    planes: ModuleType, seed: int, groups: int, values: int, width: int, data: st.DataObject
) -> None:
    raw = block(seed, groups, values, width)
    body = bytearray(planes_twin.encode_planes(raw, groups, width))
    kind = data.draw(st.sampled_from(["flip", "cut", "grow"]))
    at = data.draw(st.integers(0, len(body) - 1))
    if kind == "flip":
        body[at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del body[at:]
    else:
        body[at:at] = bytes(data.draw(st.integers(1, 4)))
    answers = []
    for way in (planes, planes_twin):
        try:
            answers.append(decoded(way, bytes(body), len(raw), groups, width))
        except ValueError:
            answers.append(b"refused")
    assert answers[0] == answers[1]


def test_a_stream_with_a_flipped_bit_is_refused(planes: ModuleType) -> None:
    """The states must end where the encoder began: chance lets one in 2⁵¹² through."""
    raw = block(3, 2, 640, 2)
    body = planes.encode_planes(raw, 2, 2)
    for bit in range(8 * (len(body) - 300), 8 * len(body), 7):
        damaged = bytearray(body)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="not"):
            decoded(planes, bytes(damaged), len(raw), 2, 2)


@pytest.mark.parametrize(("groups", "width"), [(0, 2), (1, 3), (1, 8), (3, 2), (7, 1)])
def test_a_block_of_no_such_groups_is_refused(planes: ModuleType, groups: int, width: int) -> None:
    with pytest.raises(ValueError, match=r"groups|value"):
        planes.encode_planes(bytes(16), groups, width)
    with pytest.raises(ValueError, match=r"groups|value"):
        planes.decode_planes(b"\1\0" * 16, bytearray(16), groups, width)


def test_planes_are_not_decoded_into_what_cannot_be_written(planes: ModuleType) -> None:
    with pytest.raises(BufferError, match="read-only"):
        planes.decode_planes(planes.encode_planes(bytes(16), 1, 2), bytes(16), 1, 2)


@settings(max_examples=200)
@given(counts=st.lists(st.integers(0, 1 << 40), min_size=256, max_size=256).filter(any))
def test_frequencies_add_up_and_spare_no_symbol(counts: list[int]) -> None:
    array = np.array(counts, np.int64)
    frequencies = rans_twin.normalise(array)
    assert frequencies.sum() == rans_twin.SCALE
    assert ((frequencies > 0) == (array > 0)).all()
    if (array > 0).sum() > 1:
        assert rans_twin.unpack_table(rans_twin.pack_table(frequencies))[0].tolist() == (
            frequencies.tolist()
        )


def test_flat_and_steep_tables_come_back(planes: ModuleType) -> None:
    """Tables at their limits: one symbol almost alone, and all 256 alike."""
    steep = bytes(100_000) + b"\1" + bytes(100_000)
    flat = bytes(range(256)) * 40
    for raw in (steep, flat, bytes(range(255, -1, -1)) + bytes(90_000)):
        body = planes.encode_planes(raw, 1, 1)
        assert body == planes_twin.encode_planes(raw, 1, 1)
        if hasattr(planes, "encode_planes_variants"):
            assert set(planes.encode_planes_variants(raw, 1, 1)) == {body}
        assert decoded(planes, body, len(raw), 1, 1) == raw
