"""`kvist up` on Ray's own local cluster: two nodes, two real engines; deaths; and nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]

STEP_S = 420.0
RAY_NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}  # nothing of ours is in Ray's store
PROMPT = "The harbour master counted the ships and wrote"


class Cluster:
    """Two Ray nodes on this machine, and `kvist` commands about them."""

    def __init__(self, folder: Path, model: Path) -> None:
        from ray.cluster_utils import Cluster as RayCluster

        self.ray = RayCluster(
            initialize_head=True, head_node_args={**RAY_NODE, "include_dashboard": False}
        )
        self.second = self.ray.add_node(**RAY_NODE)
        self.file = folder / "cluster.json"  # which is YAML as well
        engine = {
            "model": str(model),
            "env": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
            "args": ["--dtype=float32", "--enforce-eager", "--max-model-len=512"],
        }
        self.file.write_text(
            json.dumps(
                {
                    "name": f"test-{os.getpid()}",
                    "ray": self.ray.address,
                    "hosts": 2,
                    "kvist": {
                        "store": {
                            "dram": {"capacity": "256MiB"},
                            "ssd": {"path": f"{folder}/{{node}}", "capacity": "1GiB"},
                        }
                    },
                    "engines": [engine],
                }
            )
        )

    def kvist(self, *args: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "kvist.cli.main", *args],
            capture_output=True,
            text=True,
            timeout=STEP_S,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def up(self, *args: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.kvist("up", str(self.file), "--json", *args))
        return found

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        give_up = time.monotonic() + STEP_S
        while not holds(found := self.up("--status")):
            assert time.monotonic() < give_up, found
            time.sleep(1.0)
        return found


@pytest.fixture
def cluster(tmp_path: Path, smollm2_folder: Path) -> Iterator[Cluster]:
    pytest.importorskip("ray")
    cluster = Cluster(tmp_path, smollm2_folder)
    try:
        yield cluster
    finally:
        cluster.ray.shutdown()


def _children(found: dict[str, Any], what: str) -> list[dict[str, Any]]:
    children = [child for host in found["hosts"] for child in host["children"]]
    return [child for child in children if (child["what"] == "node") == (what == "node")]


def _ask(url: str) -> str:
    model = json.load(urllib.request.urlopen(f"{url}/v1/models", timeout=60))["data"][0]["id"]
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    text: str = json.load(urllib.request.urlopen(request, timeout=120))["choices"][0]["text"]
    return text


def _gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_two_nodes_and_two_engines_live_die_and_end(cluster: Cluster) -> None:
    found = cluster.up()
    nodes, engines = _children(found, "node"), _children(found, "engine")
    assert found["ready"]
    assert len(nodes) == len(engines) == 2
    answers = [_ask(engine["url"]) for engine in engines]
    assert answers[0] == answers[1] != ""
    assert len({engine["url"] for engine in engines}) == 2

    # A node that is killed is started again beside its engine, which goes on.
    os.kill(nodes[0]["pid"], signal.SIGKILL)
    assert _ask(engines[0]["url"]) == answers[0]
    found = cluster.until(
        lambda now: now["ready"] and sum(c["restarts"] for c in _children(now, "node")) == 1
    )
    assert {e["pid"] for e in _children(found, "engine")} == {e["pid"] for e in engines}
    assert _ask(engines[0]["url"]) == answers[0]

    # A Ray node that is lost takes its processes with it; the next one takes its place.
    before = {host["node"]: host for host in found["hosts"]}
    cluster.ray.remove_node(cluster.second, allow_graceful=False)
    cluster.until(lambda now: len(now["hosts"]) == 1)
    cluster.ray.add_node(**RAY_NODE)
    found = cluster.up()
    after = {host["node"]: host for host in found["hosts"]}
    lost, new = set(before) - set(after), set(after) - set(before)
    assert found["ready"]
    assert len(lost) == len(new) == 1
    assert all(_gone(child["pid"]) for child in before[lost.pop()]["children"])
    assert [_ask(engine["url"]) for engine in _children(found, "engine")] == answers

    # The same description again changes nothing; another one is refused.
    assert {c["pid"] for c in _children(cluster.up(), "node")} == {
        c["pid"] for c in _children(found, "node")
    }

    assert "has ended" in cluster.kvist("down", str(cluster.file))
    everything = [child for host in found["hosts"] for child in host["children"]]
    assert all(_gone(child["pid"]) for child in everything)
    assert not any(Path(host["socket"]).exists() for host in found["hosts"])
    assert "does not run" in cluster.kvist("down", str(cluster.file), code=1)
