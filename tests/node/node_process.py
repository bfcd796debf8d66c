"""A real node in a process of its own, and clients of it, for tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvist.core.errors import NodeAwayError
from kvist.node import control
from kvist.node.client import NodeStore
from kvist.node.keyspaces import Attach
from kvist.testing.store_suite import RAW_BYTES

START_S = 90.0
SLOTS = 8
PAGE_BYTES = 4096


def clean_env(**more: str) -> dict[str, str]:
    """This process's environment without the knobs of Kvist."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("KVIST_") or "NATIVE" in k}
    return kept | more


class NodeProcess:
    """`kvist node` on a socket; killed when the context ends."""

    def __init__(
        self,
        path: Path,
        *,
        slots: int = SLOTS,
        ssd: Path | None = None,
        options: tuple[str, ...] = (),
        command: tuple[str, ...] = (),
    ) -> None:
        """`command` is run in place of `kvist node`."""
        self.path = path
        settings = [f"store.dram.capacity={slots * PAGE_BYTES}", "store.dram.restore=0"]
        if ssd is None:
            settings.append("store.ssd.enabled=false")
        else:
            settings += [f"store.ssd.path={ssd}", "store.ssd.capacity=64MiB", "store.ssd.fsync=off"]
        self._command = [sys.executable, "-m", "kvist.cli.main", "node", "--socket", str(path)]
        self._command += [f"--set={text}" for text in settings] + list(options)
        if command:
            self._command = [*command, str(path)]
        self._log = path.with_suffix(".log")
        self.process = self._spawn()

    def _spawn(self, *options: str) -> subprocess.Popen[bytes]:
        command = [*self._command, *options]
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=clean_env(), cwd=self.path.parent
            )
        until = time.monotonic() + START_S
        while not self._is_up(process):
            if process.poll() is not None or time.monotonic() > until:
                process.kill()  # else the failure of this test is one of the next, too
                process.wait(START_S)
                raise AssertionError(f"the node did not start: {self.log_text()}")
            time.sleep(0.02)
        return process

    def _is_up(self, process: subprocess.Popen[bytes]) -> bool:
        try:
            return bool(control.ask(self.path, "status")["pid"] == process.pid)
        except NodeAwayError:
            return False

    def client(self, n: int = 1, **options: Any) -> NodeStore:
        """A client of keyspace number n."""
        return NodeStore(self.path, attach(n), **options)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(START_S)

    def terminate(self) -> None:
        """An orderly end."""
        self.process.terminate()
        assert self.process.wait(START_S) == 0, self.log_text()

    def stop(self) -> None:
        """SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def start_again(self) -> None:
        """A new node on the same socket."""
        self.process = self._spawn()

    def replace(self) -> None:
        """A new node of the same configuration takes over from this one."""
        before, self.process = self.process, self._spawn("--replace")
        assert before.wait(START_S) == 0, self.log_text()

    def status(self) -> dict[str, Any]:
        """What `kvist node status` shows."""
        return control.ask(self.path, "status")

    def store_stats(self) -> dict[str, Any]:
        """Of the only keyspace that is open."""
        (keyspace,) = self.status()["keyspaces"]
        return dict(keyspace)

    def assert_sound(self) -> None:
        """No slot, reference or queue entry leaked in any store."""
        if self.process.poll() is None:
            assert control.ask(self.path, "check")["broken"] == {}

    def engine(self, *orders: str) -> EngineProcess:
        """An engine that has carried out `orders`."""
        return EngineProcess(self.path, *orders)

    def log_text(self) -> str:
        """What it printed."""
        return self._log.read_text(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()


class EngineFailed(AssertionError):
    """An engine ended before it held what it was told to hold."""


class EngineProcess:
    """`node_engine.py`: holds what it was told to hold, until it is killed."""

    def __init__(self, path: Path, *orders: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("node_engine.py")), str(path), *orders],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.worker = 0
        while (line := self.process.stdout.readline().strip()) != "ready":
            if not line:
                self.kill()
                raise EngineFailed("the engine could not do what it was told")
            self.worker = int(line.removeprefix("worker "))

    def kill(self) -> None:
        """SIGKILL to the engine, not to its worker."""
        self.process.kill()
        self.process.wait(START_S)
        if self.process.stdout is not None:
            self.process.stdout.close()


def attach(n: int, *, block_bytes: int = RAW_BYTES, layout: str = "") -> Attach:
    """Keyspace number n."""
    return Attach(n.to_bytes(32, "big"), layout, block_bytes)


def eventually(holds: Any, limit_s: float = 10.0) -> None:
    """Waits until `holds()`, which another process brings about."""
    until = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until, "it did not come about"
        time.sleep(0.01)
