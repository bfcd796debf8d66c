"""Two real nodes on two ports, and a proxy between them that can stall, cut and flip bits."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from node_process import NodeProcess, attach, eventually

from kvist.core.outcome import BlockRef, Outcome
from kvist.native import digest
from kvist.node.client import NodeStore
from kvist.testing.store_suite import WAIT_S, content

BLOCK_BYTES = 1 << 20
BLOCKS = 16  # more than socket buffers hold
TIMEOUT_S = 2.5
LONG_S = 20.0
_CHUNK_BYTES = 1 << 15
_HELD_BYTES = 1 << 16  # that a stalled proxy takes from the owner
_LOOK_S = 0.05


def key(n: int) -> bytes:
    """The key of block n, mixed like a real one: directories know keys by their first half."""
    return digest(b"block %d" % n)


def ref(n: int) -> BlockRef:
    """Block n, whose parent is the one before it."""
    return BlockRef(key(n), key(n - 1) if n else None)


def free_port() -> int:
    """A port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def peer_node(
    path: Path,
    *,
    listen: int = 0,
    members: Sequence[int] = (),
    ssd: Path | None = None,
    options: Sequence[str] = (),
    blocks: int = 2 * BLOCKS,
) -> NodeProcess:
    """A node that serves on a port (0: none) and reads from others."""
    sets = [f"store.dram.capacity={blocks * BLOCK_BYTES}"]
    sets += [f"node.peers.timeout_s={TIMEOUT_S}", "node.peers.probe_s=1"]
    sets += ["node.peers.retry_s=0.1"]
    if listen:
        sets.append(f"node.peers.listen=127.0.0.1:{listen}")
    if members:
        sets.append("node.peers.members=" + ",".join(f"127.0.0.1:{port}" for port in members))
    return NodeProcess(path, ssd=ssd, options=tuple(f"--set={text}" for text in (*sets, *options)))


def client_of(node: NodeProcess, n: int = 1) -> NodeStore:
    """An engine of keyspace n, with blocks that take several calls to send."""
    return NodeStore(node.path, attach(n, block_bytes=BLOCK_BYTES), name="engine", answer_s=LONG_S)


def fill(store: NodeStore, numbers: Sequence[int]) -> None:
    """Writes blocks."""
    with store.write([ref(n) for n in numbers]) as lease:
        for i, n in enumerate(numbers):
            lease.buffer(i)[:] = content(key(n), BLOCK_BYTES)
            assert lease.commit(i)


def found(store: NodeStore, numbers: Sequence[int]) -> int:
    """How long the run of blocks is that the store knows of."""
    return len(store.match([key(n) for n in numbers]))


def learn(store: NodeStore, numbers: Sequence[int], count: int = BLOCKS) -> None:
    """Looks the blocks up until the run has so many: the first look-up may be answered late."""
    eventually(lambda: found(store, numbers) == count, LONG_S)


def read(store: NodeStore, numbers: Sequence[int], deadline_s: float = WAIT_S) -> list[bool]:
    """Which blocks came; those that did have the right bytes."""
    with store.read([key(n) for n in numbers], deadline_s=deadline_s) as lease:
        hits = [lease.wait(i) is Outcome.HIT for i in range(len(numbers))]
        for i, n in enumerate(numbers):
            if hits[i]:
                assert bytes(lease.buffer(i)) == content(key(n), BLOCK_BYTES)
    return hits


def no_lease_left(*nodes: NodeProcess) -> None:
    """Every lease has been given back, and nothing has leaked."""
    for node in nodes:
        eventually(lambda node=node: node.store_stats()["leases"] == 0)
        eventually(lambda node=node: node.store_stats()["loading_blocks"] == 0)
        node.assert_sound()


class Proxy:
    """Passes bytes between a port of its own and another, as long as it is told to.

    What the owner sends is counted over all connections: `spoil_after` bytes from now it stalls, is
    cut, or has one bit flipped.
    """

    def __init__(self, to_port: int) -> None:
        self.port = free_port()
        self._to_port = to_port
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._listener.settimeout(_LOOK_S)
        self._lock = threading.Lock()
        self._links: set[socket.socket] = set()
        self._ended = threading.Event()
        self._how = ""
        self._left = 0
        self.spoiled = threading.Event()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def spoil_after(self, size_bytes: int, how: str) -> None:
        """After so many more bytes: `stall`, `cut` or `flip`; `stall` lasts until `heal`."""
        with self._lock:
            self._how, self._left = how, size_bytes
            self.spoiled.clear()

    def heal(self) -> None:
        """Passes everything again; connections that were stalled are cut."""
        with self._lock:
            stalled = self._how == "stall" and self.spoiled.is_set()
            self._how = ""
        if stalled:
            self._cut()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                link, _ = self._listener.accept()
            except OSError:
                continue
            onward = socket.socket()
            try:
                onward.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _HELD_BYTES)
                onward.connect(("127.0.0.1", self._to_port))
            except OSError:
                link.close()
                onward.close()
                continue
            with self._lock:
                self._links |= {link, onward}
            for pair in ((link, onward, False), (onward, link, True)):
                threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            source.settimeout(None)
            while data := source.recv(_CHUNK_BYTES):
                sink.sendall(self._spoil(data) if counted else data)
        for link in (source, sink):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def _spoil(self, data: bytes) -> bytes:
        with self._lock:
            how, at = self._how, self._left
            self._left -= len(data)
            hit = bool(how) and at < len(data)
            if hit and how != "stall":
                self._how = ""
            if hit:
                self.spoiled.set()
        if not hit:
            return data
        if how == "flip":
            spoiled = bytearray(data)
            spoiled[max(0, at)] ^= 0x10
            return bytes(spoiled)
        if how == "cut":
            raise ConnectionAbortedError
        while self._how == "stall" and not self._ended.is_set():
            self._ended.wait(_LOOK_S)
        return data

    def _cut(self) -> None:
        with self._lock:
            links, self._links = self._links, set()
        for link in links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join(LONG_S)
        self._listener.close()
        self._cut()


@contextlib.contextmanager
def proxied_pair(folder: Path) -> Iterator[tuple[NodeProcess, Proxy, NodeProcess]]:
    """An owner of sixteen blocks, a proxy, and a node that knows of them through it."""
    port = free_port()
    with (
        peer_node(folder / "a.sock", listen=port) as owner,
        Proxy(port) as proxy,
        peer_node(folder / "b.sock", members=[proxy.port]) as reader,
    ):
        yield owner, proxy, reader
