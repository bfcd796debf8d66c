"""`node.peers.transport=nixl`: what is refused, and real nodes with it where NIXL is installed."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from carried import alive, needs_nixl
from node_process import NodeProcess, eventually
from peer_nodes import (
    BLOCK_BYTES,
    BLOCKS,
    TIMEOUT_S,
    client_of,
    fill,
    free_port,
    learn,
    no_lease_left,
    peer_node,
    read,
)

from kvist.assemble import node_peering
from kvist.config import load_config, preflight
from kvist.core.errors import ConfigError
from kvist.node.client import NodeStore

NUMBERS = range(BLOCKS)
NIXL = "node.peers.transport=nixl"
LONG_S = 90.0
LATE_S = 4 * TIMEOUT_S


def _without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def test_missing_package_is_refused_in_one_line_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _without_nixl(monkeypatch)
    config = load_config(env={}, sets=[NIXL, "store.ssd.enabled=false"]).config
    with pytest.raises(ConfigError) as caught:
        node_peering(config)
    said = "$.node.peers.transport: the package nixl is missing; pip install 'kvist[nixl]'"
    assert str(caught.value) == said
    (problem,) = preflight(config)
    assert "pip install 'kvist[nixl]'" in str(problem)


def test_tls_and_nixl_together_are_refused() -> None:
    """NIXL's bytes are not sealed: who asked for TLS would not get it."""
    knobs = [NIXL, *(f"node.peers.{name}=x" for name in ("tls_cert", "tls_key", "tls_ca"))]
    with pytest.raises(ConfigError, match="not sealed by TLS") as caught:
        node_peering(load_config(env={}, sets=knobs).config)
    assert caught.value.path == "$.node.peers.transport"


@contextmanager
def nodes(
    folder: Path, *, reader: str = NIXL, owner: str = NIXL
) -> Iterator[tuple[NodeProcess, NodeProcess, NodeStore]]:
    """An owner of sixteen blocks, a reader, and the reader's engine."""
    port = free_port()
    with (
        peer_node(folder / "a.sock", listen=port, options=[owner]) as a,
        peer_node(folder / "b.sock", members=[port], options=[reader]) as b,
        client_of(b) as engine,
        client_of(a) as writer,
    ):
        fill(writer, NUMBERS)
        yield a, b, engine


def facts(node: NodeProcess) -> dict[str, Any]:
    """What a node says of its carriers."""
    return dict(node.status()["carrying"])


def warm(owner: NodeProcess, reader: NodeProcess, engine: NodeStore) -> None:
    """Reads until blocks are carried."""

    def carried() -> bool:
        engine.clear()
        learn(engine, NUMBERS)
        assert read(engine, NUMBERS) == [True] * BLOCKS
        return bool(facts(reader)["blocks"])

    eventually(carried, LONG_S)
    assert len(facts(owner)["shows"]) == 1
    assert len(facts(reader)["reads"]) == 1


@needs_nixl
@pytest.mark.parametrize("ways", ["tcp,self", "all"])
def test_blocks_of_real_nodes_travel_by_nixl(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ways: str
) -> None:
    monkeypatch.setenv("UCX_TLS", ways)
    with nodes(folder) as (owner, reader, engine):
        warm(owner, reader, engine)
        before = facts(reader)
        engine.clear()
        learn(engine, NUMBERS)
        assert read(engine, NUMBERS) == [True] * BLOCKS
        after = facts(reader)
        assert after["bytes"] - before["bytes"] == BLOCKS * BLOCK_BYTES
        assert after["failures"] == 0
        no_lease_left(owner, reader)
        pids = facts(owner)["shows"] + facts(reader)["reads"]
        owner.terminate()
        reader.kill()
        eventually(lambda: not any(map(alive, pids)))


@needs_nixl
def test_real_owner_killed_is_a_miss_in_time_and_its_carriers_end_with_it(folder: Path) -> None:
    with nodes(folder) as (owner, reader, engine):
        warm(owner, reader, engine)
        engine.clear()
        learn(engine, NUMBERS)
        pids = facts(owner)["shows"]
        owner.kill()
        began = time.monotonic()
        assert read(engine, NUMBERS, 3 * LATE_S) == [False] * BLOCKS
        assert time.monotonic() - began < LATE_S
        eventually(lambda: not any(map(alive, pids)))
        no_lease_left(reader)


@needs_nixl
def test_real_node_with_nixl_reads_over_tcp_from_one_without(folder: Path) -> None:
    with nodes(folder, owner="node.peers.transport=tcp") as (owner, reader, engine):
        eventually(lambda: facts(reader)["reads"] != [], LONG_S)
        learn(engine, NUMBERS)
        assert read(engine, NUMBERS) == [True] * BLOCKS
        assert facts(reader)["blocks"] == 0
        assert "carrying" not in owner.status()
        assert reader.log_text().count("does not offer nixl") == 1
        no_lease_left(owner, reader)
