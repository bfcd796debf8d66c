"""Two processes with stores of their own share blocks over each real service."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real import HOST, make_bucket

SHARER = Path(__file__).with_name("sharer.py")
COUNT = 30
END_S = 120.0

Url = Callable[[str], str]


@pytest.fixture(params=["file", "redis", "cluster", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where to share; nothing is there yet."""
    if request.param == "file":
        return f"file://{tmp_path}/shared"
    if request.param == "redis":
        import redis

        server = request.getfixturevalue("redis_service")
        with redis.Redis(port=server.port) as client:
            client.flushall()
        return f"redis://{HOST}:{server.port}/0"
    if request.param == "cluster":
        from redis.cluster import RedisCluster

        port = request.getfixturevalue("cluster_service")[0].port
        client = RedisCluster(host=HOST, port=port)
        client.flushall(target_nodes=RedisCluster.PRIMARIES)
        client.close()
        return f"redis+cluster://{HOST}:{port}"
    server = request.getfixturevalue("s3_service")
    bucket = "sharing-" + tmp_path.name.replace("_", "-").strip("-").lower()[-40:]
    make_bucket(server, bucket)
    return f"s3://{bucket}/kv?endpoint=http://{HOST}:{server.port}&region=us-east-1"


def run(
    action: str, url: str, folder: Path | None, count: int, present: int = COUNT
) -> dict[str, Any]:
    """What a process answers; it fails on a wrong byte."""
    line = [sys.executable, str(SHARER), action, url, str(folder or "-")]
    line += ["0", str(count), str(present)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=END_S)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_what_one_host_stored_another_reads(url: str) -> None:
    assert run("write", url, None, COUNT)["stored"] == COUNT
    read = run("read", url, None, COUNT + 20)
    assert (read["matched"], read["hits"], read["remote"]) == (COUNT, COUNT, COUNT)
    assert run("write", url, None, COUNT + 5)["stored"] <= COUNT + 5


def test_a_host_with_a_disk_fills_and_reads_the_remote_too(url: str, tmp_path: Path) -> None:
    assert run("write", url, tmp_path / "one", COUNT)["stored"] == COUNT
    there = run("read", url, tmp_path / "two", COUNT)
    assert (there["hits"], there["remote"]) == (COUNT, COUNT)
    here = run("read", url, tmp_path / "one", COUNT)
    assert (here["hits"], here["remote"]) == (COUNT, 0)
