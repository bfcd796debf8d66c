"""Blocks in the remote go through codecs as on disk: smaller, sealed, or of no use to a reader."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvist.adapters.memory import MemoryAdapter, MemoryMedium
from kvist.assemble import open_embedded_store
from kvist.codec.keyring import Keyring
from kvist.codec.registry import CodecRegistry, open_codecs
from kvist.config import load_config, preflight
from kvist.core.layout import BlockLayout
from kvist.core.outcome import BlockRef, Outcome
from kvist.native import digest
from kvist.testing.codec_suite import suite_values
from kvist.tiers.protocol import Payload
from kvist.tiers.remote import MissCause, RemoteTier

LAYOUT = BlockLayout(2, 2, 32, 64, "bfloat16")
RING = Keyring("a", {"a": bytes(32)})
KEYS = [digest(b"%d" % n) for n in range(4)]
BLOCKS = [suite_values(LAYOUT, "channels", n) for n in range(4)]
WAIT_S = 20.0


def open_tier(medium: MemoryMedium, codecs: CodecRegistry) -> RemoteTier:
    tier = RemoteTier(MemoryAdapter(medium), keyspace=bytes(32), codecs=codecs)
    assert tier.wait_listed(WAIT_S)
    return tier


def put(medium: MemoryMedium, text: str) -> int:
    """Another host stores the blocks encoded as `text`; the bytes that they take."""
    tier = open_tier(medium, open_codecs(text, LAYOUT, RING if "aead" in text else None))
    tier.put([Payload(k, None, memoryview(b)) for k, b in zip(KEYS, BLOCKS, strict=True)])
    tier.close()
    adapter = MemoryAdapter(medium)
    return sum(entry.size_bytes for entry in adapter.list_page("").entries)


def read(medium: MemoryMedium, codecs: CodecRegistry) -> tuple[list[bytes | None], set[MissCause]]:
    tier = open_tier(medium, codecs)
    found: list[bytes | None] = []
    for key in KEYS:
        out = bytearray(LAYOUT.block_bytes)
        hit = tier.read_into(key, memoryview(out)) is Outcome.HIT
        found.append(bytes(out) if hit else None)
    causes = {c for c, count in tier.stats().misses_by_cause.items() if count}
    tier.close()
    return found, causes


@pytest.mark.parametrize("text", ["raw", "lossless", "aead", "lossless+aead"])
def test_blocks_come_back_from_the_remote_through_every_exact_chain(text: str) -> None:
    if "aead" in text:
        pytest.importorskip("cryptography")
    medium = MemoryMedium()
    put(medium, text)
    ring = RING if "aead" in text else None
    assert read(medium, open_codecs(text, LAYOUT, ring))[0] == BLOCKS


def test_encoded_blocks_take_less_of_the_remote() -> None:
    sizes = [put(MemoryMedium(), text) for text in ("raw", "lossless", "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[3] < 0.5 * sizes[0]


@pytest.mark.parametrize(
    ("written", "wanted"), [("int4", "lossless"), ("raw", "aead"), ("lossless", "lossless+aead")]
)
def test_what_a_host_does_not_take_it_leaves_to_the_others(written: str, wanted: str) -> None:
    """Lossy blocks are nothing to an exact host, and unsealed ones to a host that seals."""
    pytest.importorskip("cryptography")
    medium = MemoryMedium()
    put(medium, written)
    assert read(medium, open_codecs(wanted, LAYOUT, RING)) == ([None] * 4, {MissCause.CODEC})
    others = read(medium, open_codecs(written, LAYOUT, None))[0]
    assert all(block is not None for block in others)


def test_store_remote_codec_reaches_the_remote(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    overrides = {
        "store": {
            "dram": {"capacity": "16MiB", "restore": 0.0},
            "ssd": {"enabled": False},
            "remote": {"url": f"file://{tmp_path}/shared", "codec": "int4"},
        }
    }
    config = load_config(env={}, overrides=overrides).config
    with caplog.at_level(logging.WARNING):
        store = open_embedded_store(
            config, block_bytes=LAYOUT.block_bytes, fingerprint=bytes(32), layout=LAYOUT
        )
    assert caplog.text.count("store.remote.codec=int4 is LOSSY") == 1
    with store.write([BlockRef(key, None) for key in KEYS]) as lease:
        for n, block in enumerate(BLOCKS):
            lease.buffer(n)[:] = block
            assert lease.commit(n)
    assert store.flush(WAIT_S)
    store.close()
    stored = sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
    assert stored < 0.6 * sum(map(len, BLOCKS))


def test_a_codec_of_the_remote_that_cannot_be_had_is_named_as_such(tmp_path: Path) -> None:
    for codec, said in (("zip", "store.remote.codec"), ("aead", "store.remote.keys")):
        remote = {"url": f"file://{tmp_path}/shared", "codec": codec}
        overrides = {"store": {"ssd": {"enabled": False}, "remote": remote}}
        (problem,) = preflight(load_config(env={}, overrides=overrides).config)
        assert problem.path == said
