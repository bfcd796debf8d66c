"""`store.ssd.codec=cachegen-…` end to end: with its table, without, and with another."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from kvist.assemble import open_embedded_store
from kvist.cli.main import main
from kvist.codec.cachegen.profile import Sample, Sensitivity, build_table
from kvist.codec.cachegen.table import TableShape
from kvist.codec.chain import TABLED
from kvist.config import Config, load_config, preflight
from kvist.core.errors import ConfigError
from kvist.core.layout import BlockLayout
from kvist.core.outcome import BlockRef, Outcome, Tier
from kvist.native import digest
from kvist.testing.made_up_kv import made_up_block, made_up_kv, made_up_table

LAYOUT = BlockLayout(2, 2, 32, 64, "bfloat16")
TABLE = made_up_table(TableShape.of(LAYOUT))
WAIT_S = 20.0
KEYS = [digest(b"%d" % n) for n in range(4)]
BLOCKS = [made_up_block(LAYOUT, seed=n, position=n * 64) for n in range(4)]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "model.kvcg"
    path.write_bytes(TABLE.file_bytes)
    return path


def config_for(folder: Path, codec: str, table: Path | None) -> Config:
    ssd = {
        "path": str(folder / "cache"),
        "capacity": "64MiB",
        "fsync": "off",
        "codec": codec,
        "table": str(table or ""),
    }
    overrides = {"store": {"dram": {"capacity": "16MiB", "restore": 0.0}, "ssd": ssd}}
    return load_config(env={}, overrides=overrides).config


def write(config: Config) -> None:
    store = open_embedded_store(
        config, block_bytes=LAYOUT.block_bytes, fingerprint=bytes(32), layout=LAYOUT
    )
    with store.write([BlockRef(key, None) for key in KEYS]) as lease:
        for n, block in enumerate(BLOCKS):
            lease.buffer(n)[:] = block
            assert lease.commit(n)
    assert store.flush(WAIT_S)
    store.close()


def read(config: Config) -> dict[int, bytes]:
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


@pytest.mark.parametrize("codec", ["cachegen-1", "cachegen-5", "cachegen-paper-2"])
def test_blocks_come_back_from_disk_after_a_restart(
    tmp_path: Path, table: Path, codec: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        write(config_for(tmp_path, codec, table))
    assert "LOSSY" in caplog.text
    found = read(config_for(tmp_path, codec, table))
    assert list(found) == [0, 1, 2, 3]
    assert all(len(block) == LAYOUT.block_bytes for block in found.values())
    assert all(block != BLOCKS[n] for n, block in found.items())
    # Another lossy setting with the table reads them, too, and gives the same.
    assert read(config_for(tmp_path, "int8", table)) == found


def test_blocks_of_another_table_are_misses(tmp_path: Path, table: Path) -> None:
    write(config_for(tmp_path, "cachegen-3", table))
    even = Sensitivity(TABLE.weight.reshape(2, 2, 2, 32).astype(float) ** 2, 128)
    other = build_table([Sample(made_up_kv(TableShape.of(LAYOUT), 100, seed=9))], even)
    table.write_bytes(other.file_bytes)
    assert read(config_for(tmp_path, "cachegen-3", table)) == {}
    assert read(config_for(tmp_path, "int8", None)) == {}


def test_an_exact_setting_does_not_read_them(tmp_path: Path, table: Path) -> None:
    write(config_for(tmp_path, "cachegen-1", table))
    assert read(config_for(tmp_path, "lossless", table)) == {}


def test_a_missing_table_is_said_before_and_at_the_start(tmp_path: Path, table: Path) -> None:
    for path in (None, tmp_path / "none.kvcg"):
        config = config_for(tmp_path, "cachegen-2", path)
        with pytest.raises(ConfigError, match=r"store\.ssd\.table.*kvist codec profile") as e:
            open_embedded_store(
                config, block_bytes=LAYOUT.block_bytes, fingerprint=bytes(32), layout=LAYOUT
            )
        assert "\n" not in str(e.value)
        assert "store.ssd.table" in {problem.path for problem in preflight(config)}
    assert preflight(config_for(tmp_path, "cachegen-2", table)) == []


def test_a_table_of_another_model_is_refused(tmp_path: Path, table: Path) -> None:
    table.write_bytes(made_up_table(TableShape(1, 2, 2, 32)).file_bytes)
    with pytest.raises(ConfigError, match="profile this model"):
        write(config_for(tmp_path, "cachegen-2", table))


def test_the_list_shows_every_codec_that_a_store_takes(
    tmp_path: Path, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["codec", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    for row in rows:
        config = config_for(tmp_path, row["name"], table if row["needs_table"] else None)
        assert preflight(config) == []
        assert len(row["summary"].split()) >= 3
    assert {row["name"] for row in rows if row["needs_table"]} == set(TABLED)
    assert main(["codec", "list"]) == 0
    assert "cachegen-paper-5" in capsys.readouterr().out
