"""The services that a run starts on loopback: each is ended, whatever happens."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvist.bench.environments import free_ports
from kvist.bench.store.contender import ContenderError

HOST = "127.0.0.1"
BUCKET = "blocks"
_START_S = 60.0
_STOP_S = 10.0
_POLL_S = 0.05
_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}


@contextmanager
def redis_service(folder: Path) -> Iterator[int]:
    """A Redis or Valkey that keeps nothing on disk; its port.

    Raises:
        ContenderError: it cannot be had.
    """
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise ContenderError("redis-server is not installed")
    _demand("redis")
    (port,) = free_ports(1)
    command = [program, "--port", str(port), "--bind", HOST, "--save", "", "--appendonly", "no"]
    with _process([*command, "--dir", str(folder)], [port]):
        yield port


@contextmanager
def s3_service() -> Iterator[int]:
    """moto's server, in memory, with an empty bucket; its port.

    Raises:
        ContenderError: it cannot be had.
    """
    for name in ("moto", "obstore"):
        _demand(name)
    (port,) = free_ports(1)
    before = {name: os.environ.get(name) for name in _CREDENTIALS}
    os.environ.update(_CREDENTIALS)  # both clients read them there
    try:
        with _process([sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)], [port]):
            bucket = urllib.request.Request(f"http://{HOST}:{port}/{BUCKET}", method="PUT")
            urllib.request.urlopen(bucket, timeout=_START_S).close()
            yield port
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@contextmanager
def mooncake_service() -> Iterator[tuple[str, str]]:
    """A Mooncake master with its metadata server; both addresses.

    Raises:
        ContenderError: it cannot be had.
    """
    module = _demand("mooncake.store")
    command = [str(Path(module).with_name("mooncake_master"))]
    rpc, http, metrics = free_ports(3)
    command += [f"-rpc_port={rpc}", f"-rpc_address={HOST}", f"-metrics_port={metrics}"]
    command += [f"-metrics_host={HOST}", "-enable_http_metadata_server=true"]
    command += [f"-http_metadata_server_host={HOST}", f"-http_metadata_server_port={http}"]
    with _process(command, [rpc, http]):
        yield f"{HOST}:{rpc}", f"http://{HOST}:{http}/metadata"


def _demand(module: str) -> str:
    """Where a module stands, which must be one that can be imported.

    Raises:
        ContenderError: it is not.
    """
    try:
        found = importlib.util.find_spec(module)
        if found is not None and found.origin is not None:
            importlib.import_module(module)
            return found.origin
    except ImportError as error:
        raise ContenderError(f"{module} cannot be imported: {error}") from error
    raise ContenderError(f"{module} is not installed")


@contextmanager
def _process(command: Sequence[str], ports: Sequence[int]) -> Iterator[None]:
    """A process that listens on some ports.

    Raises:
        ContenderError: it does not.
    """
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        raise ContenderError(f"{command[0]}: {error}") from error
    try:
        for port in ports:
            _wait_for(process, port, command[0])
        yield
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_S)


def _wait_for(process: subprocess.Popen[bytes], port: int, name: str) -> None:
    give_up = time.monotonic() + _START_S
    while time.monotonic() < give_up and process.poll() is None:
        try:
            socket.create_connection((HOST, port), _START_S).close()
        except OSError:
            threading.Event().wait(_POLL_S)
        else:
            return
    raise ContenderError(f"{name} did not come up")
