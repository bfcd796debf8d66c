"""The ways in which blocks come from another process over TCP, each asked the same."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

import numpy as np

from kvist.bench.between.sender import ASK
from kvist.bench.environments import free_ports
from kvist.bench.node.run import node_process
from kvist.bench.store.contender import Blocks, Contender, ContenderError, in_huge_pages, share_out
from kvist.core.keys import Key
from kvist.core.lease import commit_each
from kvist.core.outcome import BlockRef, Outcome
from kvist.node import control
from kvist.node.client import NodeStore
from kvist.node.keyspaces import Attach

_START_S = 60.0
_DEADLINE_S = 60.0
_STOP_S = 10.0


class Way(Protocol):
    """One way. Blocks stand ready in the other process when `prepare` returns."""

    def prepare(self, round_number: int) -> None:
        """Whatever must be done before a round."""
        ...

    def read(self, round_number: int) -> float:
        """Brings every block into this side's memory; seconds.

        Raises:
            ContenderError: what came is not what was to come.
        """
        ...

    def close(self) -> None:
        """Ends what it started."""
        ...


class PlainSocket:
    """A Python process that sends, and threads here that receive: nothing is checked or named."""

    def __init__(self, blocks: Blocks, *, streams: int) -> None:
        """Starts the sender.

        Raises:
            ContenderError: it did not come up.
        """
        self._blocks = blocks
        sizes = (str(blocks.count), str(blocks.block_bytes))
        self._sender = subprocess.Popen(
            [sys.executable, "-m", "kvist.bench.between.sender", str(blocks.path), *sizes],
            stdout=subprocess.PIPE,
        )
        assert self._sender.stdout is not None, "it was opened as a pipe"
        port = self._sender.stdout.readline().strip()
        if not port:
            raise ContenderError("the sender did not come up")
        self._links = []
        for _ in range(streams):
            link = socket.create_connection(("127.0.0.1", int(port)), _START_S)
            link.settimeout(None)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._links.append(link)

    def prepare(self, round_number: int) -> None:
        """Makes what is compared differ."""
        del round_number
        self._blocks.forget()

    def read(self, round_number: int) -> float:
        """See `Way`."""
        del round_number
        streams, count, size = len(self._links), self._blocks.count, self._blocks.block_bytes

        def receive(n: int) -> None:
            link = self._links[n]
            link.sendall(ASK.pack(n, streams))
            for i in range(n, count, streams):
                if link.recv_into(self._blocks.room(i), size, socket.MSG_WAITALL) != size:
                    raise ContenderError("the sender hung up")

        began = time.perf_counter()
        share_out(streams, streams, receive)
        took_s = time.perf_counter() - began
        self._blocks.prove("the plain socket")
        return took_s

    def close(self) -> None:
        """Ends the sender."""
        for link in self._links:
            link.close()
        self._sender.kill()
        self._sender.wait(_STOP_S)
        if self._sender.stdout is not None:
            self._sender.stdout.close()


class TwoNodes:
    """Two nodes: an engine wrote to one of them, and another engine reads from the other."""

    def __init__(
        self, blocks: Blocks, folder: Path, *, streams: int, transport: str = "tcp"
    ) -> None:
        """Starts the nodes and writes the blocks to the first.

        Raises:
            ContenderError: a node did not come up.
        """
        self._blocks = blocks
        self._keys = [_key(i) for i in range(blocks.count)]
        (port,) = free_ports(1)
        attach = Attach(bytes(32), "", blocks.block_bytes)
        places = folder / f"owner-{transport}", folder / f"reader-{transport}"
        for place in places:
            place.mkdir(mode=0o700)
        listen = f"node.peers.listen=127.0.0.1:{port}"
        members = f"node.peers.members=127.0.0.1:{port}"
        way = f"node.peers.transport={transport}"
        sets = ("node.peers.probe_s=1", f"node.peers.streams={streams}", way)
        self._nodes = [
            node_process(places[0], blocks.total_bytes, listen, way),
            node_process(places[1], blocks.total_bytes, members, *sets),
        ]
        self._stores: list[NodeStore] = []
        self._sockets: list[Path] = []
        entered = 0
        try:
            for node in self._nodes:
                _, path = node.__enter__()
                entered += 1
                self._sockets.append(path)
                self._stores.append(NodeStore(path, attach))
            self._fill()
            if transport != "tcp":
                self._wait_for_carriers()
        except (ContenderError, OSError):
            self._nodes = self._nodes[:entered]
            self.close()
            raise

    def _fill(self) -> None:
        owner, reader = self._stores
        for store in (owner, reader):
            arena = store.arena()
            in_huge_pages(arena.address, arena.size_bytes)  # as `Warmer` does
        refs = [
            BlockRef(key, parent)
            for key, parent in zip(self._keys, [None, *self._keys[:-1]], strict=True)
        ]
        with owner.write(refs) as lease:
            for i in range(len(refs)):
                lease.buffer(i)[:] = self._blocks.view(i)
            if not all(commit_each(lease, range(len(refs)), [None] * len(refs))):
                raise ContenderError("the node did not take every block")

    def _wait_for_carriers(self) -> None:
        """Reads until blocks are carried.

        Raises:
            ContenderError: they never are.
        """
        until = time.monotonic() + _START_S
        while not self._carried_blocks():
            self.prepare(0)
            self.read(0)
            if time.monotonic() > until:
                raise ContenderError("the nodes do not carry blocks; see their log")

    def _carried_blocks(self) -> int:
        status = control.ask(self._sockets[1], "status")
        return int(status["carrying"]["blocks"])

    def prepare(self, round_number: int) -> None:
        """Makes the reader's node forget, and learn anew what the owner has."""
        del round_number
        reader = self._stores[1]
        reader.clear()
        until = time.monotonic() + _START_S
        while len(reader.match(self._keys)) < len(self._keys):
            if time.monotonic() > until:
                raise ContenderError("the reader's node does not see the blocks")

    def read(self, round_number: int) -> float:
        """See `Way`."""
        del round_number
        began = time.perf_counter()
        with self._stores[1].read(self._keys, deadline_s=_DEADLINE_S) as lease:
            missed = sum(lease.wait(i) is not Outcome.HIT for i in range(len(self._keys)))
            took_s = time.perf_counter() - began
            if missed:
                raise ContenderError(f"{missed} blocks did not come")
            for i in range(0, len(self._keys), max(1, len(self._keys) // 8)):
                if not np.array_equal(
                    np.frombuffer(lease.buffer(i), np.uint8), self._blocks.source[i]
                ):
                    raise ContenderError(f"other bytes came for block {i}")
        return took_s

    def close(self) -> None:
        """Ends both nodes."""
        for store in self._stores:
            store.close()
        for node in self._nodes:
            node.__exit__(None, None, None)


class Written:
    """A store of `kvist.bench.store` whose server holds the blocks: written, and then read."""

    def __init__(self, contender: Contender) -> None:
        """Owns `contender`."""
        self._contender = contender

    def prepare(self, round_number: int) -> None:
        """Writes every block."""
        self._contender.write(round_number)

    def read(self, round_number: int) -> float:
        """See `Way`."""
        took_s = self._contender.read(round_number)
        if took_s is None:
            raise ContenderError("it reads nothing")
        return took_s

    def close(self) -> None:
        """See `Way`."""
        self._contender.close()


def _key(i: int) -> Key:
    return i.to_bytes(32, "big")
