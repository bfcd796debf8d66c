"""Garbage and almost-messages between nodes: no crash, no growth, no lease, no wrong byte.

`KVIST_FUZZ_MUTATIONS` sets how many mutated messages each of the first two tests makes.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from node_process import attach, eventually
from peer_nodes import free_port, peer_node
from peer_thread import InUse, hello_of

from kvist.cluster.directory import Position
from kvist.core.errors import KvistError
from kvist.core.keys import Key
from kvist.core.outcome import Outcome
from kvist.native import checksum
from kvist.native.answer import BLOCK, HIT, MISS, POSITION
from kvist.node.peers import messages as m
from kvist.node.peers.credentials import Credentials
from kvist.node.peers.handshake import greet, receive
from kvist.node.peers.intake import Intake
from kvist.node.peers.member import Member
from kvist.node.peers.serving import ServeCounts, Serving
from kvist.node.peers.wire import Wire
from kvist.policy import LeafLru
from kvist.store import TieredStore
from kvist.store.breaker import Breaker
from kvist.testing.store_suite import RAW_BYTES, DictTier, content, key, put
from kvist.tiers.dram import PAGE_BYTES, Arena

MUTATIONS = int(os.environ.get("KVIST_FUZZ_MUTATIONS", "10000"))
SOCKET_MUTATIONS = 2000
GROWTH_BYTES = 64 << 20
SEED = 7
SOON_S = 0.5
_BUFFER_BYTES = 1 << 20
_KEYS = [key(n) for n in range(6)]
_POOL: list[Any] = [
    *(-1, 0, 1, 2, 3, 64, 255, 2**31, 2**32 - 1, 2**32, 2**64 - 1),
    *(0.0, -0.5, 1e308, float("nan"), float("inf"), 60.0),
    *(b"", b"\0" * 31, b"\0" * 32, key(1) * 65, key(3) * 5000, key(1) + key(1)),
    *("", "x", "x" * 5000, None, True, False, [], {}, [0]),
]
_ASKED: tuple[m.Message, ...] = (
    hello_of(),
    m.Proof(b""),
    m.Want(key(1), "", RAW_BYTES),
    m.Have(b"".join(_KEYS)),
    m.Read(b"".join(_KEYS[:4]), 1.0),
    m.Have(key(1)),
    m.Read(key(2) + key(9), 0.5),
    m.Carry("memory"),
    m.Lend(key(1) + key(4), 0.5),
    m.Returned(),
    m.Lend(key(2) + key(9), 0.0),
    m.Offer("other", 1, 1, key(1) + key(20), m.NO_PARENT + key(1), ("", "tenant")),
)


_MISS = BLOCK.pack(3, MISS, POSITION.size, 0, _KEYS[3]) + POSITION.pack(7, 9)


class InCluster:
    """What an owner in a cluster does besides; nothing that is offered is ever fetched."""

    def __init__(self, intake: Intake) -> None:
        self.taken = 0
        self._intake = intake

    def position(self) -> Position:
        return Position(1, 1)

    def take(self, fingerprint: bytes, offer: m.Offer) -> int:
        taken = self._intake.take(fingerprint, offer, most=100)
        self.taken += taken
        return taken


def mutated(chance: random.Random, data: bytes) -> bytes:
    """Bytes that are almost those of a message."""
    kind = chance.randrange(8)
    if kind < 4:  # another value in one field, in a frame that is right
        fields = list(msgspec.msgpack.decode(data[m.HEAD.size :]))
        fields[chance.randrange(len(fields))] = chance.choice(_POOL)
        if chance.random() < 0.1:
            fields.insert(chance.randrange(len(fields)), chance.choice(_POOL))
        body = msgspec.msgpack.encode(fields)
        return m.HEAD.pack(len(body)) + body
    spoiled = bytearray(data)
    at = chance.randrange(len(spoiled))
    if kind == 4:
        spoiled[at] ^= 1 << chance.randrange(8)
    elif kind == 5:
        del spoiled[at:]
    elif kind == 6:
        spoiled[at:at] = chance.randbytes(chance.randrange(1, 9))
    else:
        spoiled[:4] = chance.choice(
            [b"\xff\xff\xff\xff", b"\0\0\0\0", chance.randbytes(2) + b"\0\0"]
        )
    return bytes(spoiled)


def spoiled(chance: random.Random, parts: Sequence[bytes]) -> bytes:
    """A conversation of which one part, or a few, are almost right."""
    victims = {chance.randrange(len(parts)) for _ in range(chance.choice([1, 1, 2]))}
    return b"".join(mutated(chance, part) if i in victims else part for i, part in enumerate(parts))


def said(data: bytes) -> tuple[Wire, socket.socket]:
    """A connection on which the other side has said `data` and nothing more."""
    ours, theirs = socket.socketpair()
    for side in (ours, theirs):
        side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    theirs.sendall(data[:_BUFFER_BYTES])
    theirs.shutdown(socket.SHUT_WR)
    return Wire(ours), theirs


def test_owner_lives_through_almost_messages_and_keeps_no_lease() -> None:
    chance = random.Random(SEED)
    arena = Arena(8 * PAGE_BYTES, slot_bytes=RAW_BYTES)
    below = DictTier()
    below.blocks = {key(n): content(key(n)) for n in range(3, 6)}
    parts = [m.encode(message) for message in _ASKED]
    with TieredStore(arena, LeafLru(), below, raw_bytes=RAW_BYTES) as store:
        assert all(put(store, range(3)))
        in_use = {key(1): InUse(attach(1), store)}
        counts, cluster = ServeCounts(), InCluster(Intake(in_use.get, lambda node, at: False))
        for _ in range(MUTATIONS):
            wire, theirs = said(spoiled(chance, parts))
            until = time.monotonic() + SOON_S
            try:
                wanted = receive(
                    wire, Credentials(), b"o" * 16, lambda f: _layout(in_use.get(f)), until
                )
                served = store.own if wanted == attach(1) else None
                Serving(
                    wire, wanted.fingerprint, lambda served=served: served, counts, cluster=cluster
                ).run()
            except (KvistError, OSError):
                pass  # how every conversation ends
            wire.close()
            theirs.close()
            assert store.stats().leases == 0
        assert counts.sent_blocks > 0
        assert cluster.taken > 0
        store.check_integrity()
        assert store.room_blocks() == 8


def _layout(found: InUse | None) -> Any:
    return None if found is None else found.attach


def test_reader_lives_through_almost_answers_and_takes_no_wrong_byte() -> None:
    """What an owner says, spoiled: no hit has other bytes than the right ones."""
    chance = random.Random(SEED)
    blocks = [content(k) for k in _KEYS[:3]]
    headers = [BLOCK.pack(i, HIT, RAW_BYTES, checksum(b), _KEYS[i]) for i, b in enumerate(blocks)]
    greeting = [
        m.encode(message)
        for message in (
            m.Challenge(2, b"o" * 16, b"y" * 32, False),
            m.Proof(b""),
            m.Welcome(True),
        )
    ]
    hits = 0
    sure: list[Position] = []
    for n in range(MUTATIONS):
        reads = n % 2 == 0
        if reads:
            stream = b"".join(h + b for h, b in zip(headers, blocks, strict=True))
            data = bytearray(b"".join(greeting) + stream + _MISS)
            if chance.random() < 0.3:
                del data[chance.randrange(len(data)) :]
            else:
                at = (
                    chance.randrange(len(data))
                    if n % 4
                    else chance.randrange(sum(map(len, greeting)))
                )
                data[at] ^= 1 << chance.randrange(8)
        else:
            data = bytearray(spoiled(chance, [*greeting, m.encode(m.Held(b"\x0f"))]))
        wire, theirs = said(bytes(data))
        member = _member(wire, sure)
        outs = [bytearray(RAW_BYTES) for _ in range(4)]
        settled: dict[int, Outcome] = {}
        try:
            if reads:
                items = [(i, _KEYS[i], memoryview(outs[i])) for i in range(4)]
                until = time.monotonic() + SOON_S
                member.read(items, settled.update, until, lambda: True)
            else:
                member.probe(_KEYS)
        except (KvistError, OSError):
            pass
        for i, outcome in settled.items():
            if outcome is Outcome.HIT:
                hits += 1
                assert bytes(outs[i]) == content(_KEYS[i])
        member.close()
        wire.close()
        theirs.close()
    assert hits > 0
    assert Position(7, 9) in sure


def _member(wire: Wire, sure: list[Position] | None = None) -> Member:
    """A reader whose next connection is `wire`; what is surely not there is added to `sure`."""

    def open_wire(until: float) -> Wire:
        greet(wire, Credentials(), b"n" * 16, attach(1), until)
        return wire

    def lacks(key: Key, at: Position | None) -> None:
        if sure is not None and at is not None:
            sure.append(at)

    return Member(
        "peer",
        open_wire,
        Breaker(clock=time.monotonic, random=lambda: 0.5),
        streams=1,
        timeout_s=SOON_S,
        connect_s=SOON_S,
        lacks=lacks,
        rests=lambda: None,
    )


def test_real_node_lives_through_garbage_on_its_port(folder: Path) -> None:
    chance = random.Random(SEED)
    port = free_port()
    parts = [m.encode(message) for message in _ASKED]
    with peer_node(folder / "a.sock", listen=port) as node:
        with node.client() as store:
            assert all(put(store, range(3)))
        pid = node.process.pid
        files, before = _open_files(pid), _resident_bytes(pid)
        for _ in range(SOCKET_MUTATIONS):
            with socket.create_connection(("127.0.0.1", port), 10.0) as link:
                try:
                    link.sendall(spoiled(chance, parts))
                    link.shutdown(socket.SHUT_WR)
                    while link.recv(1 << 16):
                        pass
                except OSError:
                    pass  # it hung up before we did
        eventually(lambda: node.status()["peers"]["readers"] == 0)
        eventually(lambda: _open_files(pid) <= files)
        eventually(lambda: node.store_stats()["leases"] == 0)
        assert _resident_bytes(pid) - before < GROWTH_BYTES
        assert node.status()["peers"]["sent_blocks"] > 0
        node.assert_sound()


def _resident_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10


def _open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
