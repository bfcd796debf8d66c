"""The SSD knobs reach the tier: several folders, ways of I/O, a folder that cannot be used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvist.assemble import open_embedded_store
from kvist.config import Config, load_config, preflight, ssd_folders
from kvist.core.errors import ConfigError, TierError
from kvist.core.outcome import BlockRef, Outcome, Tier
from kvist.native import digest

BLOCK_BYTES = 10_000
WAIT_S = 20.0
COUNT = 40
KEYS = [digest(b"%d" % n) for n in range(COUNT)]


def config_for(paths: list[Path], **ssd: object) -> Config:
    return load_config(
        env={},
        overrides={
            "store": {
                "dram": {"capacity": "16MiB"},
                "ssd": {
                    "path": [str(p) for p in paths] if len(paths) > 1 else str(paths[0]),
                    "capacity": "64MiB",
                    "fsync": "off",
                    **ssd,
                },
            }
        },
    ).config


def fill(config: Config) -> None:
    store = open_embedded_store(config, block_bytes=BLOCK_BYTES, fingerprint=bytes(32))
    with store.write([BlockRef(key, None) for key in KEYS]) as lease:
        for n in range(COUNT):
            lease.buffer(n)[:] = bytes([n]) * BLOCK_BYTES
            assert lease.commit(n)
    assert store.flush(WAIT_S)
    store.close()


def read_back(config: Config) -> int:
    """How many blocks a store that is opened again finds; fails on wrong bytes."""
    store = open_embedded_store(config, block_bytes=BLOCK_BYTES, fingerprint=bytes(32))
    found = [key for key in KEYS if store.match([key]).tiers == (Tier.SSD,)]
    with store.read(found, deadline_s=WAIT_S) as lease:
        for n, key in enumerate(found):
            assert lease.wait(n) is Outcome.HIT
            assert bytes(lease.buffer(n)) == bytes([KEYS.index(key)]) * BLOCK_BYTES
    store.close()
    return len(found)


@pytest.mark.parametrize("io", ["auto", "direct", "buffered"])
@pytest.mark.parametrize("engine", ["auto", "pool"])
def test_every_way_of_io_keeps_blocks_over_a_restart(tmp_path: Path, io: str, engine: str) -> None:
    config = config_for([tmp_path / "a"], io=io, engine=engine, depth=2)
    fill(config)
    assert read_back(config) == COUNT


def test_blocks_of_several_folders_survive_one_more_folder(tmp_path: Path) -> None:
    fill(config_for([tmp_path / "a", tmp_path / "b"]))
    assert all(list((tmp_path / name).glob("*.kvs")) for name in "ab")
    assert read_back(config_for([tmp_path / "c", tmp_path / "b", tmp_path / "a"])) == COUNT


def test_folder_that_cannot_be_used_costs_its_own_blocks_only(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    fill(config_for(paths))
    (tmp_path / "a").rename(tmp_path / "aside")
    (tmp_path / "a").write_text("not a folder")
    assert 0 < read_back(config_for(paths)) < COUNT
    assert [p.path for p in preflight(config_for(paths))] == ["store.ssd.path"]
    (tmp_path / "b").rename(tmp_path / "beside")
    (tmp_path / "b").write_text("not a folder either")
    with pytest.raises(TierError):
        open_embedded_store(config_for(paths), block_bytes=BLOCK_BYTES, fingerprint=bytes(32))


def test_one_folder_is_written_as_text_and_more_as_a_list(tmp_path: Path) -> None:
    assert ssd_folders(config_for([tmp_path / "a"])) == (tmp_path / "a",)
    both = [tmp_path / "a", tmp_path / "b"]
    assert ssd_folders(config_for(both)) == tuple(both)
    for bad in ([], [""], "", 5):
        with pytest.raises(ConfigError, match=r"store\.ssd\.path"):
            load_config(env=dict(os.environ, HOME="/"), overrides={"store": {"ssd": {"path": bad}}})
