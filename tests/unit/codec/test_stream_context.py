"""A real context over a throttled link: what arrives is what its levels say, in time or as text."""

from __future__ import annotations

import numpy as np
import pytest

from kvist.codec.cachegen.codec import Cachegen
from kvist.codec.cachegen.levels import level_named
from kvist.codec.cachegen.table import TableShape
from kvist.codec.stream_context import EncodedContext, decode_chunk
from kvist.codec.stream_link import ContextSource, End, Receiver
from kvist.codec.streaming import Bandwidth
from kvist.core.errors import ConfigError, FormatError
from kvist.core.layout import BlockLayout
from kvist.testing.made_up_kv import made_up_block, made_up_table
from kvist.testing.virtual_link import VirtualLink

LAYOUT = BlockLayout(2, 2, 32, 32, "bfloat16")
CODECS = [
    Cachegen(made_up_table(TableShape.of(LAYOUT)), level_named(name), LAYOUT)
    for name in ("cachegen-1", "cachegen-4", "cachegen-7")
]
BLOCKS = [made_up_block(LAYOUT, seed=n, position=n * 32) for n in range(10)]
A_CHUNK = 4


def context() -> EncodedContext:
    return EncodedContext(
        [memoryview(b) for b in BLOCKS], CODECS, blocks_a_chunk=A_CHUNK, block_tokens=32
    )


def test_a_chunk_at_a_coarser_level_is_smaller() -> None:
    source: ContextSource = context()
    assert list(source.tokens) == [128, 128, 64]
    for chunk in range(3):
        sizes = [len(source.payload(chunk, level)) for level in range(3)]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] > 2 * sizes[2]


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.9, 4.0])
def test_a_context_arrives_by_its_deadline_or_is_text(share: float) -> None:
    """`share`: how much of the least lossy level the link could bring by the deadline."""
    source = context()
    finest = sum(len(source.payload(chunk, 0)) for chunk in range(3))
    link = VirtualLink(source, lambda _now: share * finest)
    places = [bytearray(LAYOUT.block_bytes) for _ in BLOCKS]

    def decode(chunk: int, level: int, payload: bytes) -> None:
        first = chunk * A_CHUNK
        decode_chunk(payload, CODECS[level], [memoryview(p) for p in places[first : first + 4]])

    receiver = Receiver(
        link, decode, 1.0, 4 * LAYOUT.block_bytes, clock=link.clock,
        bandwidth=Bandwidth(share * finest),
    )  # fmt: skip
    got = receiver.run()
    assert link.now_s <= 1.0 + 1e-9
    assert got.end is (End.DEADLINE if share == 0.05 else End.WHOLE)
    for n, block in enumerate(BLOCKS[: len(got.levels) * A_CHUNK]):
        codec = CODECS[got.levels[n // A_CHUNK]]
        want = bytearray(LAYOUT.block_bytes)
        codec.decode(memoryview(codec.encode(memoryview(block))), memoryview(want))
        assert places[n] == want
    if share == 4.0:
        assert set(got.levels) == {0}


def test_chunks_that_are_not_of_so_many_blocks_are_refused() -> None:
    payload = context().payload(0, 1)
    places = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in range(A_CHUNK)]
    decode_chunk(payload, CODECS[1], places)
    for bad in (b"", payload[:-1], payload + b"\0", payload[:7], b"\3" + payload[1:]):
        with pytest.raises(FormatError):
            decode_chunk(bad, CODECS[1], places)
    with pytest.raises(FormatError):
        decode_chunk(payload, CODECS[1], places[1:])
    with pytest.raises(FormatError):
        decode_chunk(payload, CODECS[0], places)
    rng = np.random.default_rng(3)
    for _ in range(200):
        bad_bytes = bytearray(payload)
        bad_bytes[rng.integers(24)] ^= 1 << int(rng.integers(8))
        with pytest.raises(FormatError):
            decode_chunk(bytes(bad_bytes), CODECS[1], places)


def test_a_context_needs_levels_and_blocks_in_its_chunks() -> None:
    for codecs, size in (([], 1), (CODECS * 6, 1), (CODECS, 0)):
        with pytest.raises(ConfigError):
            EncodedContext([], codecs, blocks_a_chunk=size, block_tokens=32)
