"""Payloads of another size than the block survive; what cannot be decoded is a counted miss."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from kvist.codec.chain import Chain
from kvist.codec.registry import CodecRegistry
from kvist.core.errors import ConfigError, FormatError
from kvist.core.outcome import Outcome
from kvist.testing.tier_suite import read_block, suite_block, suite_key, suite_payload
from kvist.tiers.protocol import Payload
from kvist.tiers.ssd import FsyncMode, MissCause, SsdTier

RAW_BYTES = 20_000


class Zlib:
    """A codec of the standard library."""

    name = "zlib"

    def encode(self, block: memoryview) -> bytes:
        return zlib.compress(block)

    def decode(self, stored: memoryview, out: memoryview) -> None:
        try:
            raw = zlib.decompress(stored)
        except zlib.error as exc:
            raise FormatError(str(exc)) from exc
        if len(raw) != len(out):
            raise FormatError("another size than was promised")
        out[:] = raw


KNOWN = CodecRegistry([Chain("zlib", Zlib())])


def open_tier(directory: Path, codecs: CodecRegistry = KNOWN) -> SsdTier:
    return SsdTier.open(
        directory,
        keyspace=bytes(32),
        capacity_bytes=8 << 20,
        fsync=FsyncMode.OFF,
        codecs=codecs,
    )


def squeezed(i: int, *, codec: str = "zlib", raw_bytes: int = RAW_BYTES) -> Payload:
    data = zlib.compress(suite_block(i, RAW_BYTES))
    return Payload(suite_key(i), None, memoryview(data), codec=codec, raw_bytes=raw_bytes)


def test_encoded_blocks_survive_write_reopen_read_and_a_crash(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.put([squeezed(0), suite_payload(1, RAW_BYTES), squeezed(2)])
    for _ in range(2):
        assert [read_block(tier, i, RAW_BYTES) for i in range(3)] == [
            suite_block(i, RAW_BYTES) for i in range(3)
        ]
        outs = [memoryview(bytearray(RAW_BYTES)) for _ in range(3)]
        items = [(suite_key(i), out) for i, out in enumerate(outs)]
        assert set(dict(tier.read_many(items)).values()) == {Outcome.HIT}
        assert [bytes(out) for out in outs] == [suite_block(i, RAW_BYTES) for i in range(3)]
        tier.close()
        tier = open_tier(tmp_path)
    tier.close()
    path = next(tmp_path.glob("*.kvs"))
    path.write_bytes(path.read_bytes()[:-8192])  # no footer: the frames are scanned
    tier = open_tier(tmp_path)
    assert read_block(tier, 2, RAW_BYTES) == suite_block(2, RAW_BYTES)
    tier.close()


def test_encoded_block_takes_only_its_stored_bytes(tmp_path: Path) -> None:
    data = zlib.compress(bytes(1 << 20))
    tier = open_tier(tmp_path)
    tier.put([Payload(suite_key(1), None, memoryview(data), codec="zlib", raw_bytes=1 << 20)])
    assert read_block(tier, 1, 1 << 20) == bytes(1 << 20)
    assert read_block(tier, 1, len(data)) is None
    tier.close()
    assert sum(p.stat().st_size for p in tmp_path.glob("*.kvs")) < 1 << 16


@pytest.mark.parametrize(
    "payload",
    [
        squeezed(0, codec="unknown"),
        squeezed(0, raw_bytes=RAW_BYTES + 1),
        squeezed(0, codec="raw"),
        Payload(suite_key(0), None, memoryview(bytes(RAW_BYTES)), codec="zlib"),
        Payload(suite_key(0), None, memoryview(bytes(RAW_BYTES)), codec="unknown"),
        Payload(suite_key(0), None, memoryview(b"junk"), codec="zlib", raw_bytes=RAW_BYTES),
    ],
)
def test_what_cannot_be_decoded_is_a_counted_miss(tmp_path: Path, payload: Payload) -> None:
    tier = open_tier(tmp_path)
    tier.put([payload, suite_payload(1)])
    assert read_block(tier, 0, payload.decoded_bytes) is None
    assert tier.stats().misses_by_cause == {MissCause.CODEC: 1}
    assert not tier.contains(suite_key(0))
    assert read_block(tier, 1) == suite_block(1)
    tier.close()


def test_hot_encoded_blocks_are_reinserted_as_they_are(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.put([squeezed(0)])
    for i in range(1, 700):
        tier.put([suite_payload(i, RAW_BYTES)])
        assert read_block(tier, 0, RAW_BYTES) == suite_block(0, RAW_BYTES)
    assert tier.stats().reinserted_blocks > 0
    tier.close()


def test_raw_is_no_name_for_a_codec() -> None:
    with pytest.raises(ConfigError, match="raw"):
        CodecRegistry([Chain("raw", Zlib())])


def test_blocks_are_encoded_on_their_way_down_unless_that_spares_nothing(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, CodecRegistry(writer=Chain("zlib", Zlib())))
    noise = memoryview(os.urandom(RAW_BYTES))
    tier.put([suite_payload(0, RAW_BYTES), Payload(suite_key(1), None, noise, checksum=7)])
    assert read_block(tier, 0, RAW_BYTES) == suite_block(0, RAW_BYTES)
    assert read_block(tier, 1, RAW_BYTES) is None  # its writer's checksum was wrong, and was kept
    stats = tier.stats()
    assert stats.raw_bytes == 2 * RAW_BYTES
    assert RAW_BYTES < stats.stored_bytes < 1.1 * RAW_BYTES
    tier.close()
