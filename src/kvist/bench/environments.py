"""Peers' environments, and LMCache's server, which runs beside the engines."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvist.bench.engine import EngineError, last_words
from kvist.bench.participants import BLOCK_TOKENS

PEERS_VARIABLE = "KVIST_BENCH_PEERS"
SETUP_SCRIPT = "scripts/bench_peers_setup.sh"

_MEMORY_GIB = 3
_START_S = 120.0
_POLL_S = 0.2
_STOP_S = 10.0


def peer_python(name: str) -> Path | None:
    """The interpreter of the environment that `scripts/bench_peers_setup.sh` made, if it did."""
    named = os.environ.get(PEERS_VARIABLE)
    folder = Path(named) if named else Path.home() / ".cache" / "kvist" / "peers"
    python = (folder / name / "bin" / "python").absolute()
    return python if python.exists() else None


def free_ports(count: int) -> list[int]:
    """Distinct TCP ports of the loopback interface that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [int(s.getsockname()[1]) for s in sockets]
    finally:
        for s in sockets:
            s.close()


@contextmanager
def lmcache_server(python: Path, folder: Path) -> Iterator[int]:
    """Runs `lmcache server` and gives its port; ends it and its children on the way out.

    Raises:
        EngineError: it did not come up.
    """
    port, http_port, metrics_port = free_ports(3)
    log = folder / "lmcache-server.log"
    command = [str(python), "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--http-port", str(http_port)]
    command += ["--prometheus-port", str(metrics_port), "--chunk-size", str(BLOCK_TOKENS)]
    command += ["--l1-size-gb", str(_MEMORY_GIB), "--l1-init-size-gb", str(_MEMORY_GIB)]
    command += ["--eviction-policy", "LRU"]
    # Without these it refuses an engine on a CPU, which then waits for it for ever; and shared
    # memory is the fastest of its ways.
    command += ["--supported-transfer-mode", "auto", "--no-l1-use-lazy"]
    command += ["--shm-name", f"kvist-bench-{os.getpid()}"]
    env = dict(os.environ, LMCACHE_TRACK_USAGE="false", DO_NOT_TRACK="1", HF_HUB_OFFLINE="1")
    with log.open("ab") as file:
        server = subprocess.Popen(
            command, stdout=file, stderr=file, cwd=folder, env=env, start_new_session=True
        )
    try:
        _wait_for(server, port, log)
        yield port
    finally:
        _end(server)


def _wait_for(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    give_up = time.monotonic() + _START_S
    while time.monotonic() < give_up and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), _POLL_S).close()
            return
        except OSError:
            threading.Event().wait(_POLL_S)
    raise EngineError(f"lmcache server did not come up: {last_words(log)}")


def _end(server: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, number)
            server.wait(_STOP_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
