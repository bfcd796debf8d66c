"""A node on a thread of this process, and raw connections to it, for what no client does."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from node_process import attach

from kvist.core.events import KvEvent
from kvist.node import messages as m
from kvist.node.keyspaces import Attach, Keyspaces, OpenStore
from kvist.node.place import Place, peer_uid
from kvist.node.protocol import MOST_BYTES, Frames, decode_reply, encode
from kvist.node.server import NodeServer
from kvist.policy import LeafLru
from kvist.store import TieredStore
from kvist.testing.store_suite import RAW_BYTES
from kvist.tiers.dram import PAGE_BYTES, Arena

LIMIT_S = 10.0


def dram_store(attach: Attach, on_event: Callable[[KvEvent], None], slots: int = 8) -> TieredStore:
    """Slots and nothing below."""
    arena = Arena(slots * PAGE_BYTES, slot_bytes=attach.block_bytes)
    return TieredStore(arena, LeafLru(), None, raw_bytes=attach.block_bytes, events=on_event)


@contextmanager
def serving(
    path: Path,
    open_store: OpenStore = dram_store,
    *,
    keyspaces: int = 1,
    uid_of: Callable[[socket.socket], int] = peer_uid,
) -> Iterator[NodeServer]:
    """A node that serves until the body ends."""
    place = Place(path)
    place.make_folder()
    server = NodeServer(
        place.listen(),
        lambda work, poke: Keyspaces(open_store, work, poke, most=keyspaces),
        uid_of=uid_of,
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
        assert thread.is_alive() or server.stopping, "the node's loop ended"
    finally:
        server.stop("the test is over")
        thread.join(LIMIT_S)
        for keyspace in server.keyspaces:
            keyspace.store.check_integrity()
        server.keyspaces.close(1.0)


class Raw:
    """A connection that may say anything."""

    def __init__(self, path: Path) -> None:
        self.link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.link.settimeout(LIMIT_S)
        self.link.connect(str(path))
        self._frames = Frames(MOST_BYTES)
        self._replies: list[m.Reply] = []
        self._fds: list[int] = []

    def send(self, *messages: m.Message) -> None:
        """Sends messages."""
        self.link.sendall(b"".join(encode(message) for message in messages))

    def hello(self, n: int = 1, **other: object) -> m.Reply:
        """Says hello as an engine of keyspace n, and what came back."""
        wanted = attach(n)
        fields = {
            "magic": m.MAGIC,
            "oldest": 1,
            "newest": 1,
            "pid": 1,
            "name": "raw",
            "fingerprint": wanted.fingerprint,
            "layout": wanted.layout,
            "block_bytes": RAW_BYTES,
            "wants_events": False,
        }
        self.send(m.Hello(**(fields | other)))  # type: ignore[arg-type]
        reply = self.reply()
        assert reply is not None
        return reply

    def reply(self) -> m.Reply | None:
        """The next message of the node; `None` if it has hung up."""
        while not self._replies:
            try:
                data, fds, _, _ = socket.recv_fds(self.link, 1 << 16, 4)
                self._fds += fds
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._replies += [decode_reply(body) for body in self._frames.feed(data)]
        return self._replies.pop(0)

    def close(self) -> None:
        """Hangs up, as a process does that dies."""
        self.link.close()
        self.let_go()

    def let_go(self) -> None:
        """Says that no process touches the arena any more."""
        while self._fds:
            os.close(self._fds.pop())

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
