"""Real servers that tests start themselves, and stop."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

HOST = "127.0.0.1"
START_S = 60.0
STOP_S = 10.0
_POLL_S = 0.05


def free_port() -> int:
    """A port that nobody listens on now; 10,000 above it is free too, for a cluster's bus."""
    for _ in range(100):
        with socket.socket() as one:
            one.bind((HOST, 0))
            port = int(one.getsockname()[1])
        if 1024 < port < 55_000:
            return port
    raise AssertionError("no free port")


class Server:
    """One process that listens on a port."""

    def __init__(self, command: list[str], port: int, folder: Path) -> None:
        self.port = port
        self._command = command
        self._log = folder / f"server-{port}.log"
        self.start()

    def start(self) -> None:
        """Starts it (again) and waits until it listens."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        self.wait_for(self.port)

    def wait_for(self, port: int) -> None:
        """Waits until it listens on `port`."""
        give_up = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection((HOST, port), 1.0).close()
                return
            except OSError:
                if time.monotonic() > give_up or self.process.poll() is not None:
                    text = self._log.read_text(errors="replace")[-2000:]
                    raise AssertionError(f"{self._command[0]} did not start: {text}") from None
                time.sleep(_POLL_S)

    def kill(self) -> None:
        """As `kill -9` does."""
        self.process.kill()
        self.process.wait(STOP_S)

    def freeze(self) -> None:
        """It keeps its connections and answers nothing."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Undoes `freeze`."""
        os.kill(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """Ends it, whatever state it is in."""
        if self.process.poll() is None:
            self.thaw()
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()


def redis_command() -> str:
    """The server of Redis or Valkey; skips the test where there is none."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        pytest.skip(
            "redis-server is not installed (on Debian and Ubuntu: apt install redis-server)"
        )
    return found


@contextmanager
def redis_server(*options: str) -> Iterator[Server]:
    """A server of our own that keeps nothing on disk."""
    pytest.importorskip("redis")
    command = redis_command()
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="kvist-redis-") as folder:
        line = [command, "--port", str(port), "--bind", HOST, "--save", "", "--appendonly", "no"]
        server = Server([*line, "--dir", folder, *options], port, Path(folder))
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def redis_cluster(nodes: int = 3) -> Iterator[list[Server]]:
    """A cluster of primaries without replicas."""
    command = redis_command()
    cli = shutil.which("redis-cli") or shutil.which("valkey-cli")
    if cli is None:
        pytest.skip("redis-cli is not installed")
    with tempfile.TemporaryDirectory(prefix="kvist-redis-") as folder:
        servers: list[Server] = []
        try:
            for n in range(nodes):
                own = Path(folder) / str(n)
                own.mkdir()
                port = free_port()
                line = [command, "--port", str(port), "--bind", HOST, "--save", ""]
                line += ["--cluster-enabled", "yes", "--dir", str(own), "--appendonly", "no"]
                servers.append(Server(line, port, own))
            places = [f"{HOST}:{s.port}" for s in servers]
            create = [cli, "--cluster", "create", *places, "--cluster-yes"]
            done = subprocess.run(create, capture_output=True, text=True, timeout=START_S)
            assert done.returncode == 0, done.stdout + done.stderr
            _wait_for_slots(cli, servers)
            yield servers
        finally:
            for server in servers:
                server.stop()


def _wait_for_slots(cli: str, servers: list[Server]) -> None:
    give_up = time.monotonic() + START_S
    for server in servers:
        ask = [cli, "-p", str(server.port), "cluster", "info"]
        while (
            "cluster_state:ok"
            not in subprocess.run(ask, capture_output=True, text=True, timeout=START_S).stdout
        ):
            assert time.monotonic() < give_up, "the cluster does not come up"
            time.sleep(_POLL_S)


@contextmanager
def s3_server() -> Iterator[Server]:
    """moto's server: S3 over HTTP, in memory."""
    pytest.importorskip("moto", reason="moto is not installed")
    pytest.importorskip("obstore", reason="obstore is not installed")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="kvist-s3-") as folder:
        command = [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)]
        server = Server(command, port, Path(folder))
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def mooncake_master() -> Iterator[tuple[str, str]]:
    """A master with its metadata server; yields both addresses."""
    store = pytest.importorskip("mooncake.store", exc_type=ImportError)
    command = Path(store.__file__).with_name("mooncake_master")
    rpc, http, metrics = free_port(), free_port(), free_port()
    line = [str(command), f"-rpc_port={rpc}", f"-rpc_address={HOST}", f"-metrics_port={metrics}"]
    line += [f"-metrics_host={HOST}", "-enable_http_metadata_server=true"]
    line += [f"-http_metadata_server_host={HOST}", f"-http_metadata_server_port={http}"]
    with tempfile.TemporaryDirectory(prefix="kvist-mooncake-") as folder:
        server = Server(line, rpc, Path(folder))
        try:
            server.wait_for(http)
            yield f"{HOST}:{rpc}", f"http://{HOST}:{http}/metadata"
        finally:
            server.stop()


def make_bucket(server: Server, name: str) -> None:
    """moto asks for no credentials: a bucket is one PUT."""
    request = urllib.request.Request(f"http://{HOST}:{server.port}/{name}", method="PUT")
    with urllib.request.urlopen(request, timeout=START_S):
        pass
