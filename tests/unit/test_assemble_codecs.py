"""`store.ssd.codec` end to end: what one setting wrote, and what another reads."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from kvist.assemble import open_embedded_store
from kvist.cli.du import measure
from kvist.codec.chain import CODECS, parse_chain
from kvist.codec.frame import PAGE_BYTES
from kvist.codec.payload import HEAD_BYTES
from kvist.config import Config, load_config, preflight
from kvist.core.errors import ConfigError, LayoutError
from kvist.core.layout import BlockLayout
from kvist.core.outcome import BlockRef, Outcome, Tier
from kvist.native import digest
from kvist.testing.codec_suite import suite_values

LAYOUT = BlockLayout(2, 2, 32, 64, "bfloat16")
WAIT_S = 20.0
KEYS = [digest(b"%d" % n) for n in range(6)]
BLOCKS = [suite_values(LAYOUT, "channels", n) for n in range(6)]
WORDS = ["raw", *CODECS]
CHAINS = [*WORDS, "aead", "lossless+aead", "int4+aead"]
K1, K2 = "k1 " + "11" * 32, "k2 " + "22" * 32


def config_for(folder: Path, codec: str, keys: str = K1, **more: object) -> Config:
    sealed = "aead" in codec
    key_file = folder.with_name("keys")
    key_file.touch(mode=0o600)
    key_file.write_text(keys)
    return load_config(
        env={},
        overrides={
            "store": {
                "dram": {"capacity": "16MiB", "restore": 0.0},
                "ssd": {
                    "path": str(folder),
                    "capacity": "64MiB",
                    "fsync": "off",
                    "codec": codec,
                    "keys": str(key_file) if sealed or more.pop("with_keys", False) else "",
                    **more,
                },
            }
        },
    ).config


def write(config: Config, numbers: range = range(6), tenant: str = "ann") -> None:
    store = open_embedded_store(
        config, block_bytes=LAYOUT.block_bytes, fingerprint=bytes(32), layout=LAYOUT
    )
    with store.write([BlockRef(KEYS[n], None, tenant) for n in numbers]) as lease:
        for i, n in enumerate(numbers):
            if not lease.present(i):
                lease.buffer(i)[:] = BLOCKS[n]
                assert lease.commit(i)
    assert store.flush(WAIT_S)
    store.close()


def read(config: Config) -> dict[int, bytes]:
    """What a store that is opened anew gives back from disk, by number."""
    store = open_embedded_store(
        config, block_bytes=LAYOUT.block_bytes, fingerprint=bytes(32), layout=LAYOUT
    )
    found = {}
    for n, key in enumerate(KEYS):
        if store.match([key]).tiers != (Tier.SSD,):
            continue
        with store.read([key], deadline_s=WAIT_S) as lease:
            if lease.wait(0) is Outcome.HIT:
                found[n] = bytes(lease.buffer(0))
    store.close()
    return found


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.kvs"))


@pytest.fixture(autouse=True)
def _cryptography(request: pytest.FixtureRequest) -> None:
    if "aead" in request.node.name:
        pytest.importorskip("cryptography")


@pytest.mark.parametrize("codec", CHAINS)
def test_blocks_of_every_codec_survive_a_restart_and_a_crash(tmp_path: Path, codec: str) -> None:
    config = config_for(tmp_path / "cache", codec)
    write(config)
    first = read(config)
    assert list(first) == list(range(6))
    for n, block in first.items():
        assert (block == BLOCKS[n]) == parse_chain(codec).exact
    path = next((tmp_path / "cache").glob("*.kvs"))
    path.write_bytes(path.read_bytes()[: -2 * PAGE_BYTES])  # no footer: the frames are scanned
    after = read(config)
    assert len(after) >= 5
    assert all(first[n] == block for n, block in after.items())


@pytest.mark.parametrize("codec", ["lossless", "int8", "int4", "lossless+aead"])
def test_encoded_blocks_take_less_of_the_disk(tmp_path: Path, codec: str) -> None:
    write(config_for(tmp_path / "raw", "raw"))
    write(config_for(tmp_path / "cache", codec))
    assert disk_bytes(tmp_path / "cache") < 0.85 * disk_bytes(tmp_path / "raw")
    (shown,) = measure([tmp_path / "cache"]).keyspaces
    assert shown.raw_bytes == 6 * LAYOUT.block_bytes > 1.1 * shown.frame_bytes


def test_one_folder_holds_blocks_of_many_settings(tmp_path: Path) -> None:
    for n, codec in enumerate(["raw", "lossless", "int8", "fp8", "int4", "lossless"]):
        write(config_for(tmp_path / "cache", codec), range(n, n + 1))
    assert list(read(config_for(tmp_path / "cache", "int4"))) == list(range(6))
    exact = read(config_for(tmp_path / "cache", "lossless"))
    assert {n: block == BLOCKS[n] for n, block in exact.items()} == {0: True, 1: True, 5: True}


def test_aead_blocks_are_read_with_their_key_only(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    write(config_for(folder, "lossless+aead", K1), range(3))
    assert all(BLOCKS[0][:64] not in path.read_bytes() for path in folder.glob("*.kvs"))
    both = f"{K2}\n{K1}"
    write(config_for(folder, "aead", both), range(3, 6))
    assert list(read(config_for(folder, "raw", both, with_keys=True))) == list(range(6))
    assert list(read(config_for(folder, "aead", K2))) == [3, 4, 5]
    write(config_for(folder, "aead", both), range(3))
    assert read(config_for(folder, "raw")) == {}


def test_what_is_not_sealed_is_a_miss_once_aead_is_asked_for(tmp_path: Path) -> None:
    for n, codec in enumerate(["raw", "lossless", "aead"]):
        write(config_for(tmp_path / "cache", codec), range(n, n + 1))
    assert list(read(config_for(tmp_path / "cache", "lossless+aead"))) == [2]


def test_aead_keys_are_those_of_the_tenant_who_wrote(tmp_path: Path) -> None:
    """Equal tenants have equal tags, in front of the nonce; the name itself is nowhere."""
    tags = []
    for tenant in ("tenant anna", "tenant bert", "tenant anna"):
        folder = tmp_path / f"cache{len(tags)}"
        write(config_for(folder, "aead"), range(1), tenant)
        data = next(folder.glob("*.kvs")).read_bytes()
        assert tenant.encode() not in data
        at = 2 * PAGE_BYTES + HEAD_BYTES  # behind the segment's header and the frame's
        tags.append(data[at : at + 16])
    assert tags[0] == tags[2] != tags[1]


@pytest.mark.parametrize("codec", ["lossless", "int4", "lossless+aead"])
def test_a_damaged_payload_is_a_miss(tmp_path: Path, codec: str) -> None:
    config = config_for(tmp_path / "cache", codec)
    write(config)
    path = next((tmp_path / "cache").glob("*.kvs"))
    data = bytearray(path.read_bytes())
    data[2 * PAGE_BYTES + 500] ^= 1  # a byte of the first frame's payload
    path.write_bytes(data)
    assert list(read(config)) == [1, 2, 3, 4, 5]


def test_a_lossy_codec_is_told_loudly_and_an_exact_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for codec, told in (("raw", 0), ("lossless", 0), ("int8", 1)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            read(config_for(tmp_path / codec, codec))
        assert caplog.text.count("LOSSY") == told


def test_what_cannot_be_had_is_refused_before_the_start(tmp_path: Path) -> None:
    def problems(codec: str, **more: object) -> list[str]:
        return [str(p) for p in preflight(config_for(tmp_path / "cache", codec, **more))]

    assert problems("lossless") == []
    (zipped,) = problems("zip")
    assert zipped.startswith("$.store.ssd.codec (default): no codec is named 'zip'; use raw, ")
    (unkeyed,) = problems("lossless+aead", keys="")
    assert unkeyed.startswith("$.store.ssd.keys (default): ")
    with pytest.raises(ConfigError, match="no codec is named 'zip'"):
        read(config_for(tmp_path / "cache", "zip"))
    with pytest.raises(ConfigError, match="layout"):
        open_embedded_store(
            config_for(tmp_path / "cache", "int8"), block_bytes=4096, fingerprint=bytes(32)
        )
    with pytest.raises(LayoutError, match="blocks of"):
        open_embedded_store(
            config_for(tmp_path / "cache", "int8"),
            block_bytes=4096,
            fingerprint=bytes(32),
            layout=LAYOUT,
        )


def test_a_missing_package_is_told_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    (missing,) = preflight(config_for(tmp_path / "cache", "aead"))
    assert "pip install 'kvist[seal]'" in str(missing)
