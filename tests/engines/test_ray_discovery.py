"""Nodes that find each other by a Ray head: the suite of every discovery, and `kvist up`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvist.core.errors import TierError
from kvist.node import control
from kvist.testing.discovery_suite import DiscoverySuite

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(600)]

STEP_S = 240.0
RAY_NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """A Ray cluster of one node on this machine."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**RAY_NODE, "include_dashboard": False})
    yield cluster
    cluster.shutdown()


class TestRayDiscovery(DiscoverySuite):
    """Each test has a cluster of its own on one head."""

    @pytest.fixture(autouse=True)
    def _head(self, ray_cluster: Any) -> None:
        self.place = f"{ray_cluster.address}/{uuid.uuid4().hex}"

    def open_discovery(self, directory: Path) -> Any:
        from kvist.cluster.discovery.ray import RayDiscovery

        return RayDiscovery(self.place, time.monotonic)

    def let_pass(self, seconds: float) -> None:
        time.sleep(seconds)


def test_head_that_is_not_there_is_a_tier_error() -> None:
    pytest.importorskip("ray")
    from kvist.cluster.discovery.ray import RayDiscovery

    discovery = RayDiscovery("127.0.0.1:9/none", time.monotonic, timeout_s=0.5)
    with pytest.raises(TierError, match="discovery by Ray cannot list"):
        discovery.members()
    discovery.close()


def test_nodes_that_kvist_up_started_know_each_other(ray_cluster: Any, tmp_path: Path) -> None:
    second = ray_cluster.add_node(**RAY_NODE)
    file = tmp_path / "cluster.json"  # which is YAML as well
    spec = {
        "name": f"test-{os.getpid()}",
        "ray": ray_cluster.address,
        "hosts": 2,
        "kvist": {"store": {"dram": {"capacity": "64MiB"}, "ssd": {"enabled": False}}},
    }
    file.write_text(json.dumps(spec))
    try:
        found = json.loads(_kvist("up", str(file), "--json"))
        assert found["ready"]
        sockets = {host["node"]: host["socket"] for host in found["hosts"]}
        assert len(sockets) == 2
        give_up = time.monotonic() + STEP_S
        for name, socket in sockets.items():
            others = set(sockets) - {name}
            while set(control.ask(socket, "status")["cluster"]["nodes"]) != others:
                assert time.monotonic() < give_up
                time.sleep(0.2)
    finally:
        _kvist("down", str(file))
        ray_cluster.remove_node(second)


def _kvist(*args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kvist.cli.main", *args],
        capture_output=True,
        text=True,
        timeout=STEP_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
