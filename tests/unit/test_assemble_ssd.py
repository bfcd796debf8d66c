"""The SSD knobs reach the tier: several folders, ways of I/O, a folder that cannot be used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvist.assemble import open_embedded_store
from kvist.config import Config, load_config, preflight, ssd_folders
from kvist.core.errors import ConfigError, TierError
from kvist.core.events import KvEvent, Removed, Stored
from kvist.core.outcome import BlockRef, Outcome, Tier
from kvist.native import digest
from kvist.store import TieredStore

BLOCK_BYTES = 10_000
WAIT_S = 20.0
COUNT = 40
KEYS = [digest(b"%d" % n) for n in range(COUNT)]


def config_for(paths: list[Path], **ssd: object) -> Config:
    return load_config(
        env={},
        overrides={
            "store": {
                # A block that is back in DRAM no longer shows as one of the SSD.
                "dram": {"capacity": "16MiB", "restore": 0.0},
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


def write(store: TieredStore, keys: list[bytes]) -> None:
    with store.write([BlockRef(key, None) for key in keys]) as lease:
        for n in range(len(keys)):
            if not lease.present(n):
                lease.buffer(n)[:] = keys[n][:1] * BLOCK_BYTES
                assert lease.commit(n)
    assert store.flush(WAIT_S)


def open_store(config: Config, events: list[KvEvent] | None = None) -> TieredStore:
    return open_embedded_store(
        config,
        block_bytes=BLOCK_BYTES,
        fingerprint=bytes(32),
        on_event=None if events is None else events.append,
    )


@pytest.mark.parametrize("folders", [["a"], ["a", "b"]])
def test_list_and_events_agree_on_what_the_disk_holds(tmp_path: Path, folders: list[str]) -> None:
    """The cap of each folder is passed several times over, so that blocks are evicted below."""
    config = config_for([tmp_path / name for name in folders], capacity="4MiB", segment="1MiB")
    events: list[KvEvent] = []
    store = open_store(config, events)
    keys = [digest(b"many %d" % n) for n in range(1200)]
    for n in range(0, len(keys), 40):
        write(store, keys[n : n + 40])
    listed = {info.key for info in store.list(10_000, Tier.SSD)}
    assert store.list(5, Tier.SSD)[0].tier is Tier.SSD
    store.close()
    there: set[bytes] = set()
    for event in events:
        if isinstance(event, Stored) and event.tier is Tier.SSD:
            there.update(event.keys)
        elif isinstance(event, Removed) and event.tier is Tier.SSD:
            there.difference_update(event.keys)
    assert 0 < len(listed) < len(keys)
    assert there == listed
    again = open_store(config)
    assert {info.key for info in again.list(10_000, Tier.SSD)} == listed
    assert all(again.stat(key) for key in listed)
    again.close()


def test_second_sight_keeps_new_blocks_off_the_disk(tmp_path: Path) -> None:
    config = config_for([tmp_path / "a"], insert="second-sight")
    store = open_store(config)
    write(store, KEYS)
    with store.read(KEYS[:3], deadline_s=WAIT_S):
        pass
    assert store.flush(WAIT_S)
    assert store.stats().filtered == COUNT
    store.close()
    again = open_store(config)
    assert [key for key in KEYS if len(again.match([key]))] == KEYS[:3]
    again.close()


def test_the_value_filter_needs_the_value_order(tmp_path: Path) -> None:
    config = config_for([tmp_path / "a"], insert="value")
    with pytest.raises(ConfigError, match=r"store\.dram\.policy=value"):
        open_store(config)
    sets = [f"store.ssd.path={tmp_path / 'a'}", "store.ssd.insert=value"]
    sets += ["store.dram.policy=value", "store.dram.capacity=16MiB", "store.ssd.capacity=64MiB"]
    store = open_store(load_config(env={}, sets=sets).config)
    write(store, KEYS)
    stats = store.stats()
    assert stats.filtered + stats.flushed == COUNT
    store.close()


def test_time_to_live_and_shares_reach_the_store(tmp_path: Path) -> None:
    overrides = {
        "store": {
            "dram": {"capacity": "16MiB"},
            "ssd": {"path": str(tmp_path / "a"), "capacity": "64MiB"},
            "ttl_s": 3600,
            "tenant_quota": {"big": 0.75, "*": 0.25},
        }
    }
    store = open_store(load_config(env={}, overrides=overrides).config)
    blocks = store.arena.capacity_slots
    rooms = [store.room_blocks(tenant) for tenant in ("big", "other", "")]
    assert rooms == [int(blocks * share) for share in (0.75, 0.25, 0.25)]
    assert store._table.ages is not None
    store.close()
    plain = open_store(config_for([tmp_path / "a"]))
    assert plain.room_blocks("other") == blocks
    assert plain._table.ages is None
    plain.close()
