"""Redis as a peer: a server of our own on a Unix socket, and the least client that can be."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

from kvist.bench.environments import free_ports
from kvist.bench.store.contender import Blocks, ContenderError, share_out

_START_S = 20.0
_ANSWER_S = 60.0
_STOP_S = 10.0
_POLL_S = 0.05


class _Client:
    """One connection that speaks RESP; a block goes from and to its own memory, uncopied."""

    def __init__(self, address: str | tuple[str, int]) -> None:
        over_unix = isinstance(address, str)
        self._socket = socket.socket(socket.AF_UNIX if over_unix else socket.AF_INET)
        self._socket.settimeout(_ANSWER_S)
        try:
            self._socket.connect(address)
            if not over_unix:
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            self._socket.close()
            raise

    def ask(self, *words: bytes) -> bytes:
        """The first line of the answer."""
        self._begin(len(words))
        for word in words:
            self._socket.sendall(b"$%d\r\n%b\r\n" % (len(word), word))
        return self._line()

    def set(self, key: bytes, block: memoryview) -> None:
        """Stores a block."""
        self._begin(3)
        self._socket.sendall(b"$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(block)))
        self._socket.sendall(block)
        self._socket.sendall(b"\r\n")
        if (answer := self._line()) != b"+OK":
            raise ContenderError(f"Redis answered {answer[:80]!r}")

    def get(self, key: bytes, room: memoryview) -> None:
        """Fills `room` with a block."""
        answer = self.ask(b"GET", key)
        if answer != b"$%d" % len(room):
            raise ContenderError(f"Redis answered {answer[:80]!r}")
        while room:
            count = self._socket.recv_into(room)
            if not count:
                raise ContenderError("Redis closed the connection")
            room = room[count:]
        self._line()

    def close(self) -> None:
        self._socket.close()

    def _begin(self, words: int) -> None:
        self._socket.sendall(b"*%d\r\n" % words)

    def _line(self) -> bytes:
        line = bytearray()
        while not line.endswith(b"\r\n"):
            more = self._socket.recv(1)
            if not more:
                raise ContenderError("Redis closed the connection")
            line += more
        return bytes(line[:-2])


class Redis:
    """A server with one client a thread. It reads from memory only, whatever it keeps on disk."""

    def __init__(
        self,
        blocks: Blocks,
        folder: Path,
        *,
        threads: int,
        durable: bool,
        over_tcp: bool = False,
    ) -> None:
        """Starts the server; where `durable`, every write is synced to its log before the answer.

        It is reached on a Unix socket, or `over_tcp` on loopback.

        Raises:
            ContenderError: there is no server, or it did not come up.
        """
        program = shutil.which("redis-server")
        if program is None:
            raise ContenderError("redis-server is not installed")
        self._blocks, self._durable = blocks, durable
        self._folder = folder / "redis"
        self._folder.mkdir()
        address: str | tuple[str, int] = str(self._folder / "socket")
        command = [program, "--port", "0", "--unixsocket", str(address), "--save", ""]
        if over_tcp:
            (port,) = free_ports(1)
            address = ("127.0.0.1", port)
            command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--dir", str(self._folder), "--appendonly", "yes" if durable else "no"]
        command += ["--appendfsync", "always", "--auto-aof-rewrite-percentage", "0"]
        self._server = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._clients: list[_Client] = []
        try:
            self._clients = [self._connect(address) for _ in range(threads)]
        except (OSError, ContenderError) as error:
            self.close()
            raise ContenderError(f"redis-server did not come up: {error}") from error

    def _connect(self, address: str | tuple[str, int]) -> _Client:
        give_up = time.monotonic() + _START_S
        while time.monotonic() < give_up and self._server.poll() is None:
            try:
                return _Client(address)
            except (FileNotFoundError, ConnectionRefusedError):
                threading.Event().wait(_POLL_S)
        raise ContenderError(f"no answer in {_START_S:.0f} s")

    def write(self, round_number: int) -> float:
        """Sets every block; seconds."""
        self._clients[0].ask(b"FLUSHALL")
        began = time.perf_counter()

        def put(i: int) -> None:
            self._client(i).set(b"%d-%d" % (round_number, i), self._blocks.view(i))

        share_out(len(self._clients), self._blocks.count, put)
        took_s = time.perf_counter() - began
        if self._durable:  # bounds what its log takes on the disk
            self._clients[0].ask(b"FLUSHALL")
            self._clients[0].ask(b"BGREWRITEAOF")
        return took_s

    def read(self, round_number: int) -> float | None:
        """Gets every block; seconds. A durable server reads from memory, as the other does."""
        if self._durable:
            return None
        self._blocks.forget()
        began = time.perf_counter()

        def get(i: int) -> None:
            self._client(i).get(b"%d-%d" % (round_number, i), self._blocks.room(i))

        share_out(len(self._clients), self._blocks.count, get)
        took_s = time.perf_counter() - began
        self._blocks.prove("Redis")
        return took_s

    def _client(self, i: int) -> _Client:
        # share_out gives thread t the blocks t, t + threads ...: a connection stays with a thread
        return self._clients[i % len(self._clients)]

    def close(self) -> None:
        """Ends the server."""
        for client in self._clients:
            client.close()
        self._server.terminate()
        try:
            self._server.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait(_STOP_S)
        shutil.rmtree(self._folder, ignore_errors=True)
