"""Garbage and almost-messages: the node neither breaks, nor grows, nor keeps a lease.

`KVIST_FUZZ_MUTATIONS` sets how many mutated messages the first test makes (a hundred thousand).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from conversation import FIRSTS, REQUESTS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs
from node_process import NodeProcess, eventually
from node_thread import Raw

from kvist.core.errors import KvistError
from kvist.node import messages as m
from kvist.node.protocol import MOST_BYTES, Frames, ProtocolError, decode_request, encode
from kvist.node.sessions import MOST_ITEMS, MOST_LEASES, Session
from kvist.policy import LeafLru
from kvist.store import TieredStore
from kvist.testing.store_suite import RAW_BYTES, DictTier, content, key, put
from kvist.tiers.dram import PAGE_BYTES, Arena

MUTATIONS = int(os.environ.get("KVIST_FUZZ_MUTATIONS", "100000"))
EXAMPLES = 100
SOCKET_MUTATIONS = 4000
GROWTH_BYTES = 64 << 20
_POOL: list[Any] = [
    *(-1, 0, 1, 2, 3, 255, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1),
    *(0.0, -0.5, 1e308, float("nan"), float("inf"), 1e-300, 86400.0),
    *(b"", b"\0" * 31, key(0), key(1) + key(1), bytes(32) * 40, key(3) * 70000),
    *("", "x", "x" * 300, "\u0000", None, True, [], [0], [0, 0], [2**32], [[]], {}),
    *([7], [0, 1], [2, 1, 0], [None], [None, None], [None, -1], [5, 2**64 - 1]),
]


class Inline:
    """Slow work done at once."""

    def submit(self, call: Callable[[], object], then: Callable[[object], None]) -> None:
        try:
            result = call()
        except (KvistError, OSError) as error:
            result = error
        then(result)


class NoWaiter:
    """The test settles sessions itself."""

    def add(self, lease: object) -> None: ...
    def drop(self, lease: object) -> None: ...


class Line:
    """A connection after its handshake, as the server drives it."""

    def __init__(self, store: TieredStore) -> None:
        self.sent_bytes = 0
        self.session = Session(store, NoWaiter(), Inline(), self._send, lambda: 0.0)  # type: ignore[arg-type]
        self.frames = Frames(MOST_BYTES)

    def _send(self, reply: m.Reply) -> None:
        self.sent_bytes += len(encode(reply))

    def feed(self, data: bytes) -> bool:
        """Whether the connection goes on."""
        try:
            for body in self.frames.feed(data):
                self.session.handle(decode_request(body))
                self.session.settle()
        except ProtocolError:
            return False
        assert self.frames.held_bytes <= MOST_BYTES + len(data)
        assert self.session.leases <= MOST_LEASES
        assert self.session._items <= MOST_ITEMS
        return True


def meant(chance: random.Random, session: Session, message: m.Request) -> m.Request:
    """The message, about a lease that there is: else most would be refused at once."""
    held = [*session._reads, *session._writes]
    if isinstance(message, m.Commit | m.Release) and held and chance.random() < 0.8:
        wanted = list(session._writes) if isinstance(message, m.Commit) else held
        return structs.replace(message, lease=chance.choice(wanted or held))
    return message


def mutated(chance: random.Random, message: m.Message) -> bytes:
    """Bytes that are almost those of `message`."""
    data = bytearray(encode(message))
    kind = chance.randrange(8)
    if kind < 4:  # another value in one field, in a frame that is right
        fields = list(msgspec.msgpack.decode(bytes(data[4:])))
        fields[chance.randrange(len(fields))] = chance.choice(_POOL)
        if chance.random() < 0.1:
            fields.insert(chance.randrange(len(fields)), chance.choice(_POOL))
        body = msgspec.msgpack.encode(fields)
        return len(body).to_bytes(4, "little") + body
    at = chance.randrange(len(data))
    if kind == 4:
        data[at] ^= 1 << chance.randrange(8)
    elif kind == 5:
        del data[at:]
    elif kind == 6:
        data[at:at] = chance.randbytes(chance.randrange(1, 9))
    else:
        data[:4] = chance.choice([b"\xff\xff\xff\xff", b"\0\0\0\0", chance.randbytes(2) + b"\0\0"])
    return bytes(data)


def small_store() -> TieredStore:
    tier = DictTier()
    tier.blocks = {key(n): content(key(n)) for n in range(2, 6)}
    arena = Arena(8 * PAGE_BYTES, slot_bytes=RAW_BYTES)
    return TieredStore(arena, LeafLru(), tier, raw_bytes=RAW_BYTES)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.integers(0, 2**63))
def test_almost_messages_leave_no_lease_and_a_sound_store(seed: int) -> None:
    chance = random.Random(seed)
    with small_store() as store:
        left = MUTATIONS // EXAMPLES
        while left > 0:
            line = Line(store)
            alive = True
            while alive and left > 0:
                message = meant(chance, line.session, chance.choice(REQUESTS))
                if chance.random() < 0.7:
                    data = encode(message)
                else:
                    left -= 1
                    data = mutated(chance, message)
                alive = line.feed(data)
            line.session.close()
            assert store.stats().leases == 0
        store.clear()
        store.check_integrity()
        assert store.room_blocks() == 8


def _resident_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10


def _open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_real_node_lives_through_garbage_on_its_socket(node: NodeProcess) -> None:
    chance = random.Random(5)
    with node.client() as store:
        assert all(put(store, range(3)))
    pid = node.process.pid
    files, before = _open_files(pid), _resident_bytes(pid)
    done = 0
    while done < SOCKET_MUTATIONS:
        with Raw(node.path) as raw:
            greets = chance.random() < 0.9
            if greets and not isinstance(raw.hello(), m.Welcome):
                continue  # one that greeted with garbage has a keyspace for a moment
            try:
                for _ in range(chance.randrange(1, 12)):
                    done += 1
                    raw.link.sendall(mutated(chance, chance.choice(REQUESTS if greets else FIRSTS)))
            except (BrokenPipeError, ConnectionResetError):
                pass
    eventually(lambda: node.status()["clients"] == 0)
    eventually(lambda: node.status()["lingering"] == 0)
    eventually(lambda: _open_files(pid) <= files)
    assert node.store_stats()["leases"] == 0
    assert _resident_bytes(pid) - before < GROWTH_BYTES
    with node.client() as store:
        store.clear()
        assert all(put(store, range(3)))
