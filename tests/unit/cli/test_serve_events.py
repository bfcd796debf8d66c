"""Engines publish where a gateway on their host looks, unless somebody said otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvist.assemble.replicas import replica_entries
from kvist.cli.serve_events import events_args
from kvist.config import EventsConfig, GatewayConfig


@pytest.fixture(autouse=True)
def _runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


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
