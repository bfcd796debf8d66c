"""An owner on threads of this process, and raw connections to it, for what no reader does."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
from node_process import attach

from kvist.node.keyspaces import Attach
from kvist.node.peers import messages as m
from kvist.node.peers.carrying.showcase import Showcase
from kvist.node.peers.carrying.transport import Carrying
from kvist.node.peers.credentials import Credentials
from kvist.node.peers.peering import Address, Peering
from kvist.node.peers.server import PeerServer, listen
from kvist.node.peers.serving import ClusterSide
from kvist.policy import LeafLru
from kvist.store import TieredStore
from kvist.testing.store_suite import RAW_BYTES, DictTier, content, key, put
from kvist.tiers.dram import PAGE_BYTES, Arena

LIMIT_S = 10.0
SLOTS = 8
HELD = range(4)


@dataclass(frozen=True, slots=True)
class InUse:
    """A keyspace that is open."""

    attach: Attach
    store: TieredStore


@contextmanager
def owner(
    credentials: Credentials | None = None,
    *,
    first_s: float = LIMIT_S,
    wanted: Attach | None = None,
    node: bytes | None = None,
    cluster: ClusterSide | None = None,
    showcase: Showcase | None = None,
    block_bytes: int = RAW_BYTES,
    slots: int = SLOTS,
    below: DictTier | None = None,
) -> Iterator[tuple[PeerServer, TieredStore]]:
    """Serves keyspace 1, which holds blocks 0 to 3, on a port of the loopback interface.

    Block 3 is below DRAM.
    """
    wanted = wanted or attach(1, block_bytes=block_bytes)
    slot_bytes = -(-block_bytes // PAGE_BYTES) * PAGE_BYTES
    arena = Arena(slots * slot_bytes, slot_bytes=slot_bytes)
    below = below or DictTier()
    below.blocks = {key(3): content(key(3), block_bytes)}
    with TieredStore(arena, LeafLru(), below, raw_bytes=block_bytes) as store:
        assert all(put(store, range(3)))
        found = {wanted.fingerprint: InUse(wanted, store)}
        server = PeerServer(
            listen("127.0.0.1", 0),
            found.get,
            credentials or Credentials(),
            first_s=first_s,
            node=node,
            cluster=cluster,
            showcase=showcase,
        )
        try:
            yield server, store
        finally:
            server.stop(LIMIT_S)
            store.check_integrity()
            assert store.stats().leases == 0


def peering(
    server: PeerServer | str,
    credentials: Credentials | None = None,
    *,
    carrying: Carrying | None = None,
) -> Peering:
    """What reads from an owner, or from one at an address."""
    address = server if isinstance(server, str) else server.address
    host, _, port = address.rpartition(":")
    return Peering(
        credentials or Credentials(),
        None,
        (Address(host, int(port)),),
        streams=2,
        timeout_s=1.0,
        probe_s=1.0,
        retry_s=0.05,
        index_blocks=1000,
        carrying=carrying,
    )


class RawPeer:
    """A connection to an owner that may say anything."""

    def __init__(self, server: PeerServer) -> None:
        host, _, port = server.address.rpartition(":")
        self.link = socket.create_connection((host, int(port)), LIMIT_S)

    def send(self, data: bytes) -> None:
        """Sends bytes."""
        self.link.sendall(data)

    def say(self, message: m.Message) -> bytes:
        """Sends a message; its bytes."""
        data = m.encode(message)
        self.send(data)
        return data

    def take(self, count: int) -> bytes | None:
        """So many bytes; `None` if the owner hung up."""
        data = b""
        while len(data) < count:
            try:
                more = self.link.recv(count - len(data))
            except ConnectionError:
                return None
            if not more:
                return None
            data += more
        return data

    def hear(self) -> bytes | None:
        """The next message with its length."""
        head = self.take(m.HEAD.size)
        if head is None:
            return None
        return head + (self.take(m.HEAD.unpack(head)[0]) or b"")

    def answer(self) -> object:
        """The next message of the handshake."""
        raw = self.hear()
        return None if raw is None else m.decode(m.ANSWER, raw[m.HEAD.size :])

    def greet(self, credentials: Credentials | None = None, **other: object) -> object:
        """Goes through the handshake as far as the owner goes along; what it said last."""
        wanted = attach(1)
        hello = self.say(hello_of(**other))
        raw = self.hear()
        if raw is None:
            return None
        answer = m.decode(m.ANSWER, raw[m.HEAD.size :])
        if not isinstance(answer, m.Challenge):
            return answer
        self.say(m.Proof((credentials or Credentials()).proof_of_reader(hello, raw)))
        answer = self.answer()
        if not isinstance(answer, m.Proof):
            return answer
        want = m.Want(wanted.fingerprint, wanted.layout, wanted.block_bytes)
        fields = {k: v for k, v in other.items() if k in want.__struct_fields__}
        self.say(msgspec.structs.replace(want, **fields))
        return self.answer()

    def close(self) -> None:
        """Hangs up."""
        self.link.close()

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def hello_of(**other: object) -> m.Hello:
    """How a reader begins."""
    hello = m.Hello(
        m.MAGIC, m.OLDEST_PROTOCOL, m.NEWEST_PROTOCOL, b"n" * m.NODE_BYTES, b"x" * m.NONCE_BYTES
    )
    fields = {k: v for k, v in other.items() if k in hello.__struct_fields__}
    return msgspec.structs.replace(hello, **fields)


def until(holds: object, limit_s: float = LIMIT_S) -> None:
    """Waits until `holds()`."""
    give_up = time.monotonic() + limit_s
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < give_up, "it did not come about"
        time.sleep(0.005)
