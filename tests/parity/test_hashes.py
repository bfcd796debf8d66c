"""Digests, checksums and chains: both implementations against the published libraries."""

from __future__ import annotations

from types import ModuleType

import blake3
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

SEED = bytes(range(32))


def pattern(length_bytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(length_bytes)


def reference_chain(
    seed: bytes, tokens: list[int], block_tokens: int, extras: dict[int, bytes]
) -> list[bytes]:
    keys, key = [], seed
    for i in range(len(tokens) // block_tokens):
        block = tokens[i * block_tokens : (i + 1) * block_tokens]
        text = b"".join(t.to_bytes(4, "little") for t in block)
        key = blake3.blake3(key + text + extras.get(i, b"")).digest()
        keys.append(key)
    return keys


@settings(max_examples=150, deadline=None)
@given(length=st.integers(0, 5000), seed=st.integers(0, 3))
def test_digest_is_blake3(native: ModuleType, length: int, seed: int) -> None:
    data = pattern(length, seed)
    assert native.digest(data) == blake3.blake3(data).digest()


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 96, 127, 128, 1024, 1025, 5000])
def test_every_variant_of_the_digest_is_blake3(native: ModuleType, length: int) -> None:
    if not hasattr(native, "digest_variants"):
        pytest.skip("the twin has one variant")
    data = pattern(length)
    assert set(native.digest_variants(data)) == {blake3.blake3(data).digest()}


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 100])
@pytest.mark.parametrize("odd", [-1, 0, 1])
def test_digest_is_blake3_around_chunk_borders(native: ModuleType, chunks: int, odd: int) -> None:
    data = pattern(chunks * 1024 + odd)
    assert native.digest(data) == blake3.blake3(data).digest()


def test_checksum_is_xxh3_at_every_length_to_1100(native: ModuleType) -> None:
    data = pattern(1100)
    for length in range(len(data) + 1):
        assert native.checksum(data[:length]) == xxhash.xxh3_64_intdigest(data[:length]), length


@settings(max_examples=150, deadline=None)
@given(length=st.integers(0, 3000), seed=st.integers(0, 3))
def test_copy_checksum_copies_and_hashes(native: ModuleType, length: int, seed: int) -> None:
    data = pattern(length, seed)
    target = bytearray(length + 2)
    total = native.copy_checksum(memoryview(target)[1 : length + 1], data)
    assert total == native.checksum(data) == xxhash.xxh3_64_intdigest(data)
    assert target == b"\0" + data + b"\0"


def test_buffers_of_any_shape_and_type_are_hashed(native: ModuleType) -> None:
    data = pattern(4096)
    array = np.frombuffer(data, np.uint32).reshape(32, 32)
    target = np.zeros((2, 2048), np.uint8)
    assert native.digest(array) == native.digest(data)
    assert native.checksum(array) == native.checksum(bytearray(data))
    assert native.copy_checksum(target, array) == native.checksum(data)
    assert target.tobytes() == data


def test_copy_checksum_refuses_what_it_cannot_copy(native: ModuleType) -> None:
    with pytest.raises(ValueError, match="length"):
        native.copy_checksum(bytearray(3), b"four")
    with pytest.raises(BufferError, match="read-only"):
        native.copy_checksum(b"four", b"four")
    whole = memoryview(bytearray(600))
    with pytest.raises(ValueError, match="overlap"):
        native.copy_checksum(whole[1:500], whole[:499])
    native.copy_checksum(whole[300:], whole[:300])


@pytest.mark.parametrize("length", [241, 1024, 1025, 2048, 2999, 70000])
def test_every_vector_variant_is_xxh3(native: ModuleType, length: int) -> None:
    if not hasattr(native, "checksum_variants"):
        return  # the twin has one variant
    data = pattern(length)
    assert set(native.checksum_variants(data)) == {xxhash.xxh3_64_intdigest(data)}


@settings(max_examples=80, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=70),
    block_tokens=st.integers(1, 20),
    extras=st.dictionaries(st.integers(0, 40), st.binary(max_size=70), max_size=4),
)
def test_chain_is_the_definition(
    native: ModuleType, tokens: list[int], block_tokens: int, extras: dict[int, bytes]
) -> None:
    want = reference_chain(SEED, tokens, block_tokens, extras)
    assert native.chain_keys(SEED, tokens, block_tokens, extras) == want
    array = np.array(tokens, np.uint32)
    assert native.chain_keys(SEED, array, block_tokens, extras) == want
    assert native.chain_keys(SEED, array.astype(np.int64), block_tokens, extras) == want


def test_chain_takes_long_blocks_and_strided_tokens(native: ModuleType) -> None:
    tokens = np.arange(8000, dtype=np.uint32)[::2]
    want = reference_chain(SEED, tokens.tolist(), 1300, {})
    assert native.chain_keys(SEED, tokens, 1300) == want
    assert native.chain_keys(SEED, tuple(tokens.tolist()), 1300, None) == want


def test_chain_reads_only_full_blocks(native: ModuleType) -> None:
    assert native.chain_keys(SEED, [], 4) == []
    assert native.chain_keys(SEED, [1, 2, 3], 4) == []
    assert native.chain_keys(SEED, [1, 2, 3, 4, -1], 4, {1: b"x"}) == reference_chain(
        SEED, [1, 2, 3, 4], 4, {}
    )


def test_chain_refuses_bad_arguments(native: ModuleType) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        native.chain_keys(b"short", [1], 1)
    with pytest.raises(ValueError, match="block_tokens"):
        native.chain_keys(SEED, [1], 0)
    for token in (-1, 2**32, 2**70):
        with pytest.raises(OverflowError):
            native.chain_keys(SEED, [0, token], 1)
    with pytest.raises(TypeError):
        native.chain_keys(SEED, ["a"], 1)
    with pytest.raises(TypeError):
        native.chain_keys(SEED, [1], 1, {0: "text"})
