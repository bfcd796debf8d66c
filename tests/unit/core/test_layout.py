"""The canonical block, its slices, the keyspace's text, and errors that name a remedy."""

from __future__ import annotations

import dataclasses
import json

import pytest

from kvist.core.errors import ConfigError, LayoutError
from kvist.core.keys import token_bytes
from kvist.core.keyspace import Keyspace
from kvist.core.layout import BlockLayout, HeadSlice

LAYOUT = BlockLayout(layers=2, kv_heads=4, head_dim=8, block_tokens=16, dtype="bfloat16")


def test_a_block_is_layers_kinds_heads_tokens_dims() -> None:
    assert LAYOUT.head_bytes == 16 * 8 * 2
    assert LAYOUT.block_bytes == 2 * 2 * 4 * LAYOUT.head_bytes
    assert LAYOUT.token_bytes * 16 == LAYOUT.block_bytes


def test_heads_lie_one_after_another_and_fill_the_block() -> None:
    offsets = [
        LAYOUT.head_offset_bytes(layer, kind, head)
        for layer in range(2)
        for kind in range(2)
        for head in range(4)
    ]
    assert offsets == list(range(0, LAYOUT.block_bytes, LAYOUT.head_bytes))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_share_out_all_heads_once(size: int) -> None:
    slices = [LAYOUT.head_slice(rank, size) for rank in range(size)]
    heads = [h for s in slices for h in range(s.start, s.start + s.count)]
    assert heads == [0, 1, 2, 3]


def test_more_ranks_than_heads_hold_copies() -> None:
    assert [LAYOUT.head_slice(r, 8) for r in range(8)] == [HeadSlice(r // 2, 1) for r in range(8)]


def test_heads_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(LayoutError, match="4 KV heads cannot be split over 3 ranks"):
        LAYOUT.head_slice(0, 3)
    with pytest.raises(LayoutError, match="rank 2 is not in a group of 2"):
        LAYOUT.head_slice(2, 2)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"dtype": "int4"}, "unknown KV dtype 'int4'"),
        ({"layers": 0}, "layers must be at least 1"),
        ({"kinds": 3}, "kinds must be 1"),
    ],
)
def test_an_impossible_layout_is_refused(change: dict[str, object], fault: str) -> None:
    with pytest.raises(LayoutError, match=fault):
        dataclasses.replace(LAYOUT, **change)


def test_the_keyspace_text_is_canonical_json_of_every_field() -> None:
    space = Keyspace(weights="digest:ab", layout=LAYOUT, rope="{}")
    fields = json.loads(space.canonical_bytes())
    assert list(fields) == sorted(fields)
    assert fields["kv_heads"] == 4
    assert fields["block_tokens"] == 16


@pytest.mark.parametrize("name", ["weights", "rope", "windows", "quantisation", "activation_dtype"])
def test_every_field_of_a_keyspace_changes_its_text(name: str) -> None:
    space = Keyspace(weights="digest:ab", layout=LAYOUT, rope="{}")
    other = dataclasses.replace(space, **{name: "changed"})
    assert other.canonical_bytes() != space.canonical_bytes()


def test_tokens_are_little_endian_u32() -> None:
    assert token_bytes([1, 2**32 - 1]) == b"\x01\x00\x00\x00\xff\xff\xff\xff"
    with pytest.raises(OverflowError):
        token_bytes([2**32])


def test_a_config_error_names_path_origin_fault_and_remedy() -> None:
    error = ConfigError("is too small", path="$.a.b", origin="kvist.yaml", remedy="give more")
    assert str(error) == "$.a.b (kvist.yaml): is too small; give more"
    assert str(ConfigError("bad", path="$.a")) == "$.a: bad"
    assert str(ConfigError("bad")) == "bad"
