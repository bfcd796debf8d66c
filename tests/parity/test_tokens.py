"""Tokens and hashes of KV events: both implementations read them alike, and refuse the rest."""

from __future__ import annotations

from types import ModuleType

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.core.keys import token_bytes

U32 = st.integers(0, 2**32 - 1)
EDGES = [0, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1]


@given(tokens=st.lists(st.one_of(st.sampled_from(EDGES), U32), max_size=40))
def test_tokens_survive_the_way_through_messagepack(native: ModuleType, tokens: list[int]) -> None:
    assert native.unpack_tokens(msgspec.msgpack.encode(tokens)) == token_bytes(tokens)


@pytest.mark.parametrize("count", [15, 16, 65_535, 65_536])
def test_arrays_of_every_length_are_read(native: ModuleType, count: int) -> None:
    tokens = list(range(count))
    assert native.unpack_tokens(msgspec.msgpack.encode(tokens)) == token_bytes(tokens)


@pytest.mark.parametrize("number", [b"\xcf" + bytes(7) + b"\x09", b"\xd0\x09", b"\xd3" + bytes(8)])
def test_integers_of_any_width_are_tokens(native: ModuleType, number: bytes) -> None:
    assert native.unpack_tokens(b"\x91" + number) == token_bytes([number[-1]])


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\x91",
        b"\x90\x00",
        b"\xdd\xff\xff\xff\xff",
        b"\x92\x01",
        b"\x05",
        *(msgspec.msgpack.encode(other) for other in ([-1], [2**32], [1.0], ["1"], [None], {})),
    ],
)
def test_what_is_no_array_of_tokens_is_refused(native: ModuleType, packed: bytes) -> None:
    with pytest.raises(ValueError, match="not a MessagePack array of u32"):
        native.unpack_tokens(packed)


@given(packed=st.binary(max_size=60))
def test_any_bytes_are_read_alike_or_refused(packed: bytes) -> None:
    from kvist.native import twin, unpack_tokens

    try:
        want = twin.unpack_tokens(packed)
    except ValueError:
        with pytest.raises(ValueError, match="not a MessagePack array"):
            unpack_tokens(packed)
    else:
        assert unpack_tokens(packed) == want


@given(hashes=st.lists(st.one_of(st.binary(max_size=40), st.integers(-(2**63), 2**64 - 1))))
def test_hashes_become_keys_of_sixteen_bytes_or_more(
    native: ModuleType, hashes: list[bytes | int]
) -> None:
    keys = native.block_keys(hashes)
    for block_hash, key in zip(hashes, keys, strict=True):
        whole = block_hash if isinstance(block_hash, bytes) else key[:8]
        assert key == whole.ljust(16, b"\0")
        if isinstance(block_hash, int):
            assert int.from_bytes(key[:8], "big") == block_hash % 2**64


def test_hash_that_is_neither_bytes_nor_number_is_refused(native: ModuleType) -> None:
    with pytest.raises(TypeError, match="bytes or int"):
        native.block_keys([bytes(32), "text"])
