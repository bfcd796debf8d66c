"""Mooncake Store with its segment in this process: its own memcpy path, the fastest that it has.

Where the medium is `peer`, the segment is in another process: blocks come over TCP.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]
from obey import forget, load_blocks, obey, prove  # type: ignore[import-not-found]

_BATCH = 32
_UP_S = 30.0
_POLL_S = 0.05
_STOP_S = 10.0
_LOOPBACK = "127.0.0.1"
_FORCED = (True,)
_HOLD = "hold"


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind((_LOOPBACK, 0))
    ports = [int(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Peer:
    """A master process of our own, and one client that is also the storage node unless told so."""

    holder: subprocess.Popen[bytes] | None = None

    def __init__(self, settings: dict[str, Any]) -> None:
        if settings["medium"] == "disk":
            raise RuntimeError("its disk tier needs a cluster with a storage root; not driven here")
        self.source, self.target = load_blocks(settings)
        self.count, self.block_bytes = settings["count"], settings["block_bytes"]
        rpc, http, metrics = _free_ports(3)
        command = [os.path.join(os.path.dirname(sys.executable), "mooncake_master")]
        command += [f"-rpc_port={rpc}", f"-rpc_address={_LOOPBACK}"]
        command += [f"-metrics_port={metrics}", f"-metrics_host={_LOOPBACK}"]
        command += ["-enable_http_metadata_server=true"]
        command += [f"-http_metadata_server_host={_LOOPBACK}"]
        command += [f"-http_metadata_server_port={http}"]
        with (Path(settings["folder"]) / "master.log").open("wb") as log:
            self.master = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            self._wait_for([rpc, http])
            total = self.count * self.block_bytes
            own_bytes = 3 * total
            if settings["medium"] == "peer":
                own_bytes = 0
                self._hold(json.dumps([http, rpc, 3 * total, total]))
            self.client = MooncakeDistributedStore()
            answer = _set_up(self.client, http, rpc, own_bytes, total)
            for memory in (self.source, self.target):
                answer = answer or self.client.register_buffer(memory.ctypes.data, memory.nbytes)
            if answer:
                raise RuntimeError(f"setup failed with {answer}")
        except RuntimeError:
            self._end_master()
            raise

    def _hold(self, what: str) -> None:
        self.holder = subprocess.Popen(
            [sys.executable, __file__, _HOLD, what], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.holder.stdout is not None, "it was opened as a pipe"
        while (line := self.holder.stdout.readline()) != b"held\n":
            if not line:
                raise RuntimeError("the process that holds the segment did not come up")

    def _wait_for(self, ports: list[int]) -> None:
        give_up = time.monotonic() + _UP_S
        for port in ports:
            while True:
                try:
                    socket.create_connection((_LOOPBACK, port), 0.5).close()
                    break
                except OSError:
                    if time.monotonic() > give_up or self.master.poll() is not None:
                        raise RuntimeError("mooncake_master did not come up") from None
                    threading.Event().wait(_POLL_S)

    def write(self, round_number: int) -> float:
        """Puts batches from registered memory."""
        self.client.remove_all(*_FORCED)
        began = time.perf_counter()
        self._all(self.client.batch_put_from, self.source, round_number, 0)
        return time.perf_counter() - began

    def read(self, round_number: int) -> float:
        """Gets batches into registered memory."""
        forget(self.target)
        began = time.perf_counter()
        self._all(self.client.batch_get_into, self.target, round_number, self.block_bytes)
        took_s = time.perf_counter() - began
        prove(self.source, self.target)
        return took_s

    def _all(self, call: Any, memory: Any, round_number: int, wanted: int) -> None:
        for first in range(0, self.count, _BATCH):
            run = range(first, min(first + _BATCH, self.count))
            keys = [f"{round_number}-{i}" for i in run]
            places = [memory[i].ctypes.data for i in run]
            answers = call(keys, places, [self.block_bytes] * len(run))
            if any(answer != wanted for answer in answers):
                raise RuntimeError(f"a batch was answered with {sorted(set(answers))[:3]}")

    def close(self) -> None:
        """Ends the client, then the master."""
        self.client.close()
        self._end_master()

    def _end_master(self) -> None:
        for process in (self.holder, self.master):
            if process is None:
                continue
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_STOP_S)


def _set_up(client: Any, http: int, rpc: int, segment_bytes: int, buffer_bytes: int) -> int:
    """Joins the master; 0 where that went well."""
    metadata, master = f"http://{_LOOPBACK}:{http}/metadata", f"{_LOOPBACK}:{rpc}"
    return int(client.setup(_LOOPBACK, metadata, segment_bytes, buffer_bytes, "tcp", "", master))


def _hold(http: int, rpc: int, segment_bytes: int, buffer_bytes: int) -> None:
    """Gives the pool its memory until standard input ends."""
    client = MooncakeDistributedStore()
    if answer := _set_up(client, http, rpc, segment_bytes, buffer_bytes):
        raise RuntimeError(f"setup failed with {answer}")
    print("held", flush=True)
    sys.stdin.read()
    client.close()


if __name__ == "__main__":
    if sys.argv[1] == _HOLD:
        _hold(*json.loads(sys.argv[2]))
    else:
        obey(Peer)
