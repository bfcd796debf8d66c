"""Engines publish where a gateway on their host looks, unless somebody said otherwise."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from kvist.assemble.replicas import replica_entries
from kvist.cli.serve_events import events_args
from kvist.config import EventsConfig, GatewayConfig
from kvist.launch.ports import Port
from kvist.node.place import Place


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's runtime folder."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_gateway_looks_where_the_engine_publishes(host: str) -> None:
    option, text = events_args(EventsConfig(), 8001, ["--dtype", "float32"])
    said = json.loads(text)
    (entry,) = replica_entries(GatewayConfig(replicas=f"http://{host}:8001/"))
    assert option == "--kv-events-config"
    assert (entry.events, entry.replay) == (said["endpoint"], said["replay_endpoint"])


@pytest.mark.parametrize(
    "given",
    [
        ["--kv-events-config", "{}"],
        ["--kv_events_config={}"],
        ["--kv-events-config.enable_kv_cache_events", "true"],
        ["--data-parallel-size", "2"],
        ["-dp", "2"],
    ],
    ids=" ".join,
)
def test_what_somebody_said_of_events_stays(given: list[str]) -> None:
    assert events_args(EventsConfig(), 8001, given) == []


def test_engine_whose_store_announces_nothing_does_not_either() -> None:
    assert events_args(EventsConfig(enabled=False), 8001, []) == []


def test_endpoints_are_in_a_folder_of_ones_own(runtime: Path) -> None:
    (runtime / "kvist").mkdir(mode=0o755)
    _, text = events_args(EventsConfig(), 8001, [])
    folder = Path(json.loads(text)["endpoint"].removeprefix("ipc://")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_engine_serves_though_there_is_no_folder_of_ones_own(
    runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runtime / "kvist" / "engines").mkdir(parents=True)
    (runtime / "kvist" / "engines").chmod(0o777)
    assert events_args(EventsConfig(), 8001, []) == []
    assert "no gateway hears this engine" in capsys.readouterr().err


def test_folders_above_are_private_too(runtime: Path) -> None:
    """A folder of ports made the folder of the node, and left it open; no node started then."""
    Port(runtime / "kvist" / "ports", "127.0.0.1", 40_000).choose()
    Place(runtime / "kvist" / "node.sock").make_folder()
