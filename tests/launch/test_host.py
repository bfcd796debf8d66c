"""A host's processes: a real node, kept alive, and gone with whoever gave the orders."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import msgspec
import pytest

from kvist.launch.host import Host
from kvist.launch.spec import EngineSpec, HostOrders, HostReport
from kvist.tiers.ssd.lock import DirectoryLock

DEADLINE_S = 60.0


class HostProcess:
    """`python -m kvist.launch.host`, its stdin in our hands."""

    def __init__(self, folder: Path, *engines: EngineSpec) -> None:
        self.ssd = folder / "ssd-n1"
        orders = HostOrders(
            name="t",
            node="n1",
            folder=str(folder / "run"),
            kvist={
                "store": {
                    "dram": {"capacity": "16MiB"},
                    "ssd": {"path": str(folder / "ssd-{node}"), "capacity": "64MiB"},
                }
            },
            engines=engines,
        )
        self._out = (folder / "reports").open("w+b")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvist.launch.host"],
            stdin=subprocess.PIPE,
            stdout=self._out,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(orders) + b"\n")
        self.process.stdin.flush()
        self._path = folder / "reports"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.process.wait(DEADLINE_S)
        self._out.close()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def report(self) -> HostReport | None:
        lines = self._path.read_bytes().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        return msgspec.json.decode(whole[-1], type=HostReport) if whole else None

    def until(self, holds: Callable[[HostReport], bool]) -> HostReport:
        give_up = time.monotonic() + DEADLINE_S
        while True:
            found = self.report()
            if found is not None and found.children and holds(found):
                return found
            assert time.monotonic() < give_up, found
            time.sleep(0.05)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[HostProcess]:
    with HostProcess(tmp_path) as process:
        yield process


def _gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def _wait(holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.05)


def test_a_killed_node_is_started_again(host: HostProcess) -> None:
    first = host.until(lambda report: report.ready).children[0]
    os.kill(first.pid, signal.SIGKILL)
    again = host.until(lambda report: report.ready and report.children[0].restarts == 1)
    assert again.children[0].pid != first.pid
    assert again.children[0].phase == "ready"


def test_the_end_of_the_orders_is_the_end_of_all(host: HostProcess) -> None:
    ready = host.until(lambda report: report.ready)
    assert host.ssd.parent.joinpath("run", "kvist.yaml").stat().st_mode & 0o077 == 0
    host.close()
    assert host.process.wait(DEADLINE_S) == 0
    assert _gone(ready.children[0].pid)
    assert not Path(ready.socket).exists()  # it drained: a killed node leaves its socket
    left = {path.name for path in host.ssd.parent.joinpath("run").iterdir()}
    assert "node.log" in left
    assert not left & {"kvist.yaml", "nodes"}  # the first may hold a password
    last = host.report()
    assert last is not None
    assert [child.phase for child in last.children] == ["stopped"]


def test_a_killed_host_takes_its_node_with_it(host: HostProcess) -> None:
    ready = host.until(lambda report: report.ready)
    os.kill(host.process.pid, signal.SIGKILL)
    host.process.wait(DEADLINE_S)
    _wait(lambda: _gone(ready.children[0].pid))
    assert not Path(ready.socket).exists()
    if host.ssd.is_dir():
        DirectoryLock(host.ssd).release()  # nobody holds it


def test_an_engine_that_cannot_start_says_why_and_is_tried_again(tmp_path: Path) -> None:
    with HostProcess(tmp_path, EngineSpec(model=str(tmp_path / "no-model"))) as host:
        found = host.until(lambda report: report.children[1].restarts >= 2)
        assert found.children[0].phase == "ready"
        assert "no such folder" in found.children[1].detail
        assert not found.ready


def test_no_orders_is_said(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvist.launch.host"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 1
    assert "no orders on stdin" in done.stderr


def test_a_host_that_ends_late_leaves_the_next_one_its_configuration(tmp_path: Path) -> None:
    """A keeper that Ray starts again has a host of the same folder while the old one drains."""
    orders = HostOrders("t", "n1", str(tmp_path / "run"), {}, ())
    first = Host(orders, {})
    config = first.folder / "kvist.yaml"
    os.utime(config, ns=(1, 1))  # as if long ago: clocks of files are coarse
    first._wrote = 1
    second = Host(orders, {})
    first.stop()
    assert config.exists()
    second.stop()
    assert not config.exists()
