"""The configuration: sources, their order, sizes, errors that say what to do, preflight."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvist.config import (
    Config,
    Machine,
    SsdConfig,
    StoreConfig,
    as_mapping,
    dram_bytes,
    format_size,
    knobs,
    load_config,
    parse_size,
    preflight,
    read_machine,
    ssd_bytes,
)
from kvist.core.errors import ConfigError

MIB, GIB = 1 << 20, 1 << 30
PLENTY = Machine(physical_bytes=64 * GIB, available_bytes=64 * GIB)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no `kvist.yaml` of the checkout is read."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)


def test_defaults_are_a_whole_configuration() -> None:
    loaded = load_config(env={})
    assert loaded.config == Config()
    assert set(loaded.origins) == set(knobs())
    assert set(loaded.origins.values()) == {"default"}


def test_later_sources_win_and_origins_say_which(tmp_path: Path) -> None:
    file = tmp_path / "k.yaml"
    file.write_text("block_tokens: 32\nstore: {io_threads: 3, read_deadline_s: 5}\nevents:\n")
    env = {"KVIST_STORE__IO_THREADS": "4", "KVIST_CONNECTOR__SAVE": "false"}
    overrides = {"connector": {"save": True}, "store.dram.capacity": "1GiB"}
    loaded = load_config(file, env, overrides, ["store.dram.capacity=2GiB"])
    config = loaded.config
    assert (config.block_tokens, config.store.io_threads) == (32, 4)
    assert config.store.read_deadline_s == 5.0
    assert config.connector.save is True
    assert config.store.dram.capacity == 2 * GIB
    assert loaded.origins["block_tokens"] == str(file)
    assert loaded.origins["store.io_threads"] == "KVIST_STORE__IO_THREADS"
    assert loaded.origins["connector.save"] == "kv_connector_extra_config"
    assert loaded.origins["store.dram.capacity"] == "--set"


def test_file_is_option_then_variable_then_working_directory(tmp_path: Path) -> None:
    Path("kvist.yaml").write_text("block_tokens: 16")
    assert load_config(env={}).config.block_tokens == 16
    named = tmp_path / "named.yaml"
    named.write_text("block_tokens: 32")
    env = {"KVIST_CONFIG": str(named)}
    assert load_config(env=env).config.block_tokens == 32
    option = tmp_path / "option.yaml"
    option.write_text("block_tokens: 64")
    assert load_config(option, env).config.block_tokens == 64


def test_show_can_be_read_back() -> None:
    config = load_config(env={}, sets=["store.ssd.capacity=1GiB", "events.enabled=0"]).config
    Path("kvist.yaml").write_text(yaml.safe_dump(as_mapping(config)))
    assert load_config(env={}).config == config


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "store.dram.capcity=1",
            "$.store.dram.capcity (--set): no such knob; did you mean store.dram.capacity?",
        ),
        ("zzzz=1", "$.zzzz (--set): no such knob; see `kvist config show`"),
        ("store=1", "$.store (--set): no such knob; see `kvist config show`"),
        ("block_tokens=100", "$.block_tokens (--set): cannot be '100'; accepted: 16, 32, 64"),
        (
            "store.io_threads=0",
            "$.store.io_threads (--set): cannot be '0'; accepted: integer from 1 to 64",
        ),
        ("store.ssd.segment=auto", "$.store.ssd.segment (--set): cannot be 'auto'; accepted: size"),
        ("store.ssd.segment=1KiB", "$.store.ssd.segment (--set): cannot be '1KiB'"),
        ("store.ssd.capacity=8 GB/s", "$.store.ssd.capacity (--set): '8 GB/s' is not a size"),
        ("connector.load=maybe", "$.connector.load (--set): cannot be 'maybe'"),
        ("store.ssd.path=", "$.store.ssd.path (--set): cannot be ''"),
        ("store.read_deadline_s=0", "$.store.read_deadline_s (--set): cannot be '0'"),
        ("store.read_deadline_s=nan", "$.store.read_deadline_s (--set): cannot be 'nan'"),
        ("block_tokens", "--set: 'block_tokens' has no value; write --set path=value"),
    ],
)
def test_errors_name_path_origin_and_remedy_in_one_line(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(env={}, sets=[line])
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("store: 3", "$.store (F): is a section, not 3"),
        ("store:\n  ssd:\n    capasity: 1", "did you mean store.ssd.capacity?"),
        ("- 1", "F: holds a list, not a mapping"),
        ("a: [", "F: is not YAML"),
        ("block_tokens: '128'", "$.block_tokens (F): cannot be '128'"),
        ("store: {ssd: {enabled: 1}}", "$.store.ssd.enabled (F): cannot be 1"),
        ("!!python/object/apply:os.getcwd []", "F: is not YAML"),
        ("#" * (1 << 20) + "\n", "F: is above 1 MiB"),
    ],
)
def test_file_errors_name_the_file(text: str, fault: str) -> None:
    Path("F").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config("F", env={})
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match=r"--config: cannot read gone\.yaml: No such file"):
        load_config("gone.yaml", env={})
    with pytest.raises(ConfigError, match="KVIST_CONFIG: cannot read"):
        load_config(env={"KVIST_CONFIG": "gone.yaml"})


def test_misspelt_variables_are_errors_and_foreign_ones_are_not() -> None:
    with pytest.raises(ConfigError, match="did you mean KVIST_STORE__IO_THREADS"):
        load_config(env={"KVIST_STORE__IO_THREAD": "1"})
    with pytest.raises(ConfigError, match="KVIST_NO__SUCH: sets no knob"):
        load_config(env={"KVIST_NO__SUCH": "1"})
    assert load_config(env={"KVIST_CRASH_ROUNDS": "1", "HOME": "/"}).config == Config()


def test_every_knob_can_be_set_from_the_environment() -> None:
    """Each default, written as text, is read back as itself."""
    env = {k.env: str(k.default) for k in knobs().values()}
    loaded = load_config(env=env)
    assert loaded.config == Config()
    assert dict(loaded.origins) == {path: knob.env for path, knob in knobs().items()}


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8GiB", 8 * GIB),
        ("512MB", 512_000_000),
        ("1.5g", 3 * GIB // 2),
        (" 64 mib ", 64 * MIB),
        ("4096", 4096),
        (4096, 4096),
        ("2t", 2 << 40),
        ("0", 0),
    ],
)
def test_sizes_are_read_as_written(text: str | int, size_bytes: int) -> None:
    assert parse_size(text, "$.x", "test") == size_bytes


@pytest.mark.parametrize("bad", ["", "GiB", "-1", "1e9", "8GiBs", "1..5G", -1, 1.5, True, "9" * 30])
def test_what_is_not_a_size_is_refused(bad: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(bad, "$.x", "test")
    assert (caught.value.path, caught.value.origin) == ("$.x", "test")


@given(st.integers(0, 1 << 62))
def test_formatted_sizes_are_read_back_exactly(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes


def test_auto_dram_is_a_quarter_of_what_is_available_up_to_8_gib() -> None:
    assert dram_bytes(Config(), Machine(8 * GIB, 4 * GIB)) == GIB
    assert dram_bytes(Config(), Machine(99 * GIB, 99 * GIB)) == 8 * GIB


def test_auto_ssd_is_a_tenth_of_what_is_free_up_to_64_gib() -> None:
    assert ssd_bytes(Config(), 100 * GIB) == 10 * GIB
    assert ssd_bytes(Config(), 9999 * GIB) == 64 * GIB


def test_auto_ssd_does_not_shrink_by_what_it_stored_itself(tmp_path: Path) -> None:
    """Restarting again and again must not lower the cap, and evict, each time."""
    config = _config(tmp_path, "auto")
    with (tmp_path / "segment-0.kvs").open("wb") as stream:
        stream.truncate(1000 * GIB)  # sparse: takes no space, counts as held
    assert ssd_bytes(config) == 64 * GIB


def test_machine_memory_is_limited_by_the_container(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    meminfo = tmp_path / "proc/meminfo"
    meminfo.write_text("MemTotal:  8388608 kB\nMemFree: 1 kB\nMemAvailable:  4194304 kB\n")
    assert read_machine(tmp_path) == Machine(8 * GIB, 4 * GIB)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{2 * GIB}\n")
    (tmp_path / "sys/fs/cgroup/memory.current").write_text(f"{GIB}\n")
    assert read_machine(tmp_path) == Machine(2 * GIB, GIB)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert read_machine(tmp_path) == Machine(8 * GIB, 4 * GIB)


def _config(folder: Path, ssd: int | str = 128 * MIB, dram: int = 64 * MIB) -> Config:
    sets = [f"store.ssd.path={folder}", f"store.ssd.capacity={ssd}", f"store.dram.capacity={dram}"]
    return load_config(env={}, sets=sets).config


def test_preflight_makes_a_private_folder_and_leaves_nothing_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "cache"
    assert preflight(_config(folder), machine=PLENTY) == []
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.iterdir()) == []


def test_preflight_names_each_knob_that_would_fail(tmp_path: Path) -> None:
    small = preflight(_config(tmp_path, ssd=MIB, dram=MIB), machine=PLENTY)
    assert [p.path for p in small] == ["store.dram.capacity", "store.ssd.capacity"]
    huge = preflight(_config(tmp_path, ssd=1 << 60, dram=1 << 60), machine=PLENTY)
    assert [p.path for p in huge] == ["store.dram.capacity", "store.ssd.capacity"]
    assert all(p.remedy for p in small + huge)


def test_preflight_reports_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    config = _config(blocked / "cache")
    origins = {"store.ssd.path": "kvist.yaml"}
    (problem,) = preflight(config, origins=origins, machine=PLENTY)
    assert str(problem).startswith("$.store.ssd.path (kvist.yaml): cannot use")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_preflight_reports_a_folder_of_someone_else(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    (problem,) = preflight(_config(tmp_path), machine=PLENTY)
    assert problem.path == "store.ssd.path"


def test_preflight_ignores_the_folder_when_the_ssd_tier_is_off(tmp_path: Path) -> None:
    ssd = SsdConfig(enabled=False, path=str(tmp_path / "none"))
    config = Config(store=StoreConfig(ssd=ssd))
    assert preflight(config, machine=PLENTY) == []
    assert not (tmp_path / "none").exists()


def test_a_tenant_quota_is_a_share_or_shares_by_name() -> None:
    def quota(value: object) -> object:
        return load_config(env={}, overrides={"store": {"tenant_quota": value}}).config.store

    assert quota(0.5) == StoreConfig(tenant_quota=0.5)
    assert quota({"a": 0.25, "*": 1}) == StoreConfig(tenant_quota={"a": 0.25, "*": 1.0})
    env = {"KVIST_STORE__TENANT_QUOTA": "0.5", "KVIST_STORE__TTL_S": "60"}
    assert load_config(env=env).config.store == StoreConfig(tenant_quota=0.5, ttl_s=60.0)
    for bad in (0, 1.5, {}, {"a": 2}, {"a": "much"}, "much", None):
        with pytest.raises(ConfigError, match=r"store\.tenant_quota.*mapping of name to number"):
            quota(bad)
    for bad in (-1, "soon"):
        with pytest.raises(ConfigError, match=r"store\.ttl_s"):
            load_config(env={}, overrides={"store": {"ttl_s": bad}})


def test_shares_by_name_can_be_shown_and_read_back() -> None:
    shares = {"a": 0.25, "*": 0.5}
    config = load_config(env={}, overrides={"store": {"tenant_quota": shares}}).config
    Path("kvist.yaml").write_text(yaml.safe_dump(as_mapping(config)))
    assert load_config(env={}).config == config
