"""Whole conversations, mutated, against the node's own loop: every first message, both kinds of
stream. The node neither ends, nor grows, nor keeps a connection, a lease, a slot or a list.

`KVIST_FUZZ_MUTATIONS` sets how many messages are mutated: a fifth of it in whole conversations, a
fifth in requests about blocks. A failure names its seed, which `KVIST_FUZZ_SEED` takes.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from conversation import FIRSTS, REQUESTS
from test_cache_desk import REQUESTS as CACHE_REQUESTS
from test_fuzz import _POOL, NoWaiter, mutated

from kvist.core.errors import NoSpaceError
from kvist.core.events import KvEvent
from kvist.node import messages as m
from kvist.node.cache.desk import MOST_LISTS, CacheDesk
from kvist.node.cache.wire import decode_request
from kvist.node.keyspaces import Attach, Keyspace, Keyspaces
from kvist.node.place import Place
from kvist.node.protocol import ProtocolError, encode
from kvist.node.server import NodeServer
from kvist.policy import LeafLru
from kvist.store import TieredStore
from kvist.testing.store_suite import RAW_BYTES, DictTier, content, key, put
from kvist.tiers.dram import PAGE_BYTES, Arena

MUTATIONS = int(os.environ.get("KVIST_FUZZ_MUTATIONS", "50000"))
SEED = int(os.environ.get("KVIST_FUZZ_SEED", "7"))
ROUND = 1000
AT_ONCE = 16
WARM_ROUNDS = 3  # by then every cache and pool is as large as it gets
GROWTH_BYTES = 48 << 20
LIMIT_S = 20.0
ASKING = m.Control(m.MAGIC, 2, 2, "cache")
TEXTS = ["", "00", "ff" * 32, "ff" * 33, key(1).hex(), "dram", "hbm", "x" * 300, "\n", "null"]


def small_store(of: Attach, on_event: Callable[[KvEvent], None]) -> TieredStore:
    tier = DictTier()
    if of.block_bytes == RAW_BYTES:
        tier.blocks = {key(n): content(key(n)) for n in range(2, 6)}
    arena = Arena(8 * PAGE_BYTES, slot_bytes=min(of.block_bytes, 1 << 20))
    raw_bytes = min(of.block_bytes, 1 << 20)
    return TieredStore(arena, LeafLru(), tier, raw_bytes=raw_bytes, events=on_event)


def mutated_map(chance: random.Random, message: msgspec.Struct) -> bytes:
    """Bytes that are almost those of a message whose body is a map."""
    if chance.random() < 0.5:
        return mutated(chance, message) if chance.random() < 0.1 else _flipped(chance, message)
    fields = msgspec.msgpack.decode(encode(message)[4:])
    name = chance.choice(list(fields))
    fields[name] = chance.choice([*_POOL, *TEXTS, [key(n).hex() for n in range(3)]])
    if chance.random() < 0.2:
        del fields[chance.choice(list(fields))]
    body = msgspec.msgpack.encode(fields)
    return len(body).to_bytes(4, "little") + body


def _flipped(chance: random.Random, message: msgspec.Struct) -> bytes:
    data = bytearray(encode(message))
    for _ in range(chance.randrange(1, 4)):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(data)


class Fuzzed:
    """The node's loop, turned by hand, and the connections to it."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        place = Place(folder / "n.sock")
        self.server = NodeServer(
            place.listen(), lambda work, poke: Keyspaces(small_store, work, poke, most=2)
        )
        self.server._begin()
        self.chance, self.mutations = chance, 0

    def conversation(self) -> bytes:
        """A few messages, most of them right up to some point."""
        chance, data = self.chance, b""
        kind = chance.random()
        if kind < 0.3:  # the handshake itself
            first = chance.choice([*FIRSTS, ASKING])
            self.mutations += 1
            data = mutated(chance, first)
            return data if b"drain" not in data else b""
        if kind < 0.7:
            data = encode(FIRSTS[0])
            for _ in range(chance.randrange(1, 12)):
                message = chance.choice(REQUESTS)
                if chance.random() < 0.5:
                    data += encode(message)
                else:
                    self.mutations += 1
                    data += mutated(chance, message)
            return data
        request = chance.choice(CACHE_REQUESTS)
        self.mutations += 1
        return encode(ASKING) + mutated_map(chance, request)

    def talk(self) -> None:
        """Some conversations at once, each cut off at its end or a while before."""
        ours = []
        for _ in range(AT_ONCE):
            near, far = socket.socketpair()
            near.setblocking(False)
            self.server._admit(far)
            data = self.conversation()
            if self.chance.random() < 0.1:
                data = data[: self.chance.randrange(len(data) + 1)]
            try:
                near.send(data)
            except OSError as error:  # pragma: no cover - it was refused already
                raise AssertionError(f"nothing was refused yet: {error}") from error
            ours.append(near)
        for _ in range(self.chance.randrange(1, 6)):
            self.server._turn(0.0)
        for near in ours:
            near.close()

    def quiet(self) -> None:
        """Turns until nobody is connected."""
        until = time.monotonic() + LIMIT_S
        while self.server._peers or self.server.lives or self.server.keyspaces._opening:
            assert time.monotonic() < until, "a connection is left"
            self.server._turn(0.005)
        assert not self.server.stopping

    def assert_sound(self) -> None:
        """No lease, no slot that nobody owns, few lists."""
        for keyspace in self.server.keyspaces:
            assert not keyspace.sessions
            assert keyspace.store.stats().leases == 0
            keyspace.store.check_integrity()
        assert self.server._counter.desk.lists <= MOST_LISTS

    def close(self) -> None:
        self.server._end()
        self.server.keyspaces.close(1.0)


def _resident_bytes() -> int:
    gc.collect()
    text = Path("/proc/self/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    """Pytest keeps every record, and with it the message that it is about."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_mutated_conversations_leave_nothing_behind(folder: Path) -> None:
    fuzzed = Fuzzed(folder, random.Random(SEED))
    rounds = sizes = 0
    files = 0
    try:
        while fuzzed.mutations < MUTATIONS // 5:
            target = fuzzed.mutations + ROUND
            while fuzzed.mutations < target:
                fuzzed.talk()
            fuzzed.quiet()
            fuzzed.assert_sound()
            rounds += 1
            if rounds == WARM_ROUNDS:
                sizes, files = _resident_bytes(), len(os.listdir("/proc/self/fd"))
        assert rounds > WARM_ROUNDS, f"seed {SEED}: too few"
        assert _resident_bytes() - sizes < GROWTH_BYTES, f"seed {SEED}: it grows"
        assert len(os.listdir("/proc/self/fd")) <= files + 8, f"seed {SEED}: files are left open"
        near, far = socket.socketpair()
        with near:
            fuzzed.server._admit(far)
            near.send(encode(ASKING))
            fuzzed.server._turn(0.1)
            assert near.recv(1000)  # it still answers
    finally:
        fuzzed.close()


def test_almost_requests_about_blocks_leave_a_sound_store() -> None:
    chance = random.Random(SEED)
    of = Attach(bytes(32), "", RAW_BYTES)
    size = answered = 0
    with small_store(of, lambda event: None) as store:
        keyspace = Keyspace(of, store, NoWaiter(), deque(), set())  # type: ignore[arg-type]
        desk = CacheDesk(lambda: 0.0)
        for n in range(MUTATIONS // 5):
            if n % 50 == 0:
                try:
                    put(store, range(3))
                except NoSpaceError:
                    store.clear()  # all is pinned
            request = chance.choice(CACHE_REQUESTS)
            right = chance.random() < 0.3
            data = encode(request) if right else mutated_map(chance, request)
            try:
                meant = decode_request(data[4:])
            except ProtocolError:
                assert not right
                continue
            assert len(encode(desk.answer([keyspace], meant))) > 4
            answered += 1
            if n == MUTATIONS // 10:
                size = _resident_bytes()
        assert answered > MUTATIONS // 25
        assert desk.lists <= MOST_LISTS
        assert not size or _resident_bytes() - size < GROWTH_BYTES
        store.check_integrity()
        store.clear()
        assert store.room_blocks() == 8
