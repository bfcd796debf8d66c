"""The router's index over real sockets: engines and nodes are heard, losses are asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvist.cluster.discovery.static import StaticDiscovery
from kvist.cluster.log import EventLog, Sealed
from kvist.cluster.record import NodeRecord
from kvist.cluster.wire import topic_of
from kvist.core.errors import TierError
from kvist.core.events import Stored
from kvist.core.outcome import Tier
from kvist.native import digest
from kvist.node.events import EventLines, EventPorts
from kvist.router.index import Prefix, PrefixIndex
from kvist.router.listener import Listener

LOCAL = "tcp://127.0.0.1:*"
WAIT_S = 60.0
PACE_S = 0.02
WIDTH = 4
TOKENS = list(range(6 * WIDTH))


class Engine:
    """A stock engine: hashes of its own, numbers from 0, and a buffer that it replays."""

    topic = b"kv@pod@model"

    def __init__(self) -> None:
        self.ports = EventPorts(LOCAL, LOCAL)
        self._sealed: list[Sealed] = []

    def store(self, first: int, last: int) -> None:
        names = [digest(b"engine %d" % n) for n in range(last)]
        event = {
            "type": "BlockStored",
            "block_hashes": names[first:],
            "parent_block_hash": names[first - 1] if first else None,
            "token_ids": TOKENS[first * WIDTH : last * WIDTH],
            "block_size": WIDTH,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }
        sealed = Sealed(len(self._sealed), msgspec.msgpack.encode([0.0, [event], 0]))
        self._sealed.append(sealed)
        self.ports.publish(self.topic, [sealed])

    def answer(self) -> None:
        self.ports.answer(self.topic, lambda number: self._sealed[number:])


class Node:
    """A Kvist node, listed by its address."""

    def __init__(self) -> None:
        self.ports = EventPorts(LOCAL, LOCAL)
        self.log = EventLog(block_tokens=WIDTH)

    def store(self, keys: list[bytes]) -> None:
        self.log.record(Stored(tuple(keys), None, Tier.DRAM))
        self.ports.publish(topic_of("node", 7), [self.log.seal(0.0)])

    def answer(self) -> None:
        self.ports.answer(topic_of("node", 7), lambda number: self.log.since(number, 0.0))


@pytest.fixture
def publishers() -> Iterator[tuple[Engine, Node]]:
    engine, node = Engine(), Node()
    yield engine, node
    engine.ports.close()
    node.ports.close()


def _until(done: Callable[[], bool], step: Callable[[], None]) -> None:
    give_up = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < give_up, "it did not come to that"
        step()


def test_what_was_published_before_anybody_listened_is_known(
    publishers: tuple[Engine, Node],
) -> None:
    engine, node = publishers
    index = PrefixIndex(block_tokens=WIDTH, fingerprint=bytes(32))
    index.attach("replica", engine="engine", node="node")
    keys = index.keys(TOKENS)
    engine.store(0, 2)
    node.store(keys[2:4])
    listed = StaticDiscovery(
        [
            f"engine={engine.ports.events}?replay={engine.ports.replay}",
            f"node={node.ports.events}?replay={node.ports.replay}",
        ]
    )
    lines = EventLines()
    listener = Listener(index, lines, listed, threading.Lock())

    def step() -> None:
        listener.look(time.monotonic())
        listener.step(time.monotonic())
        engine.answer()
        node.answer()

    due_s = 0.0

    def subscribed() -> bool:  # more is published until a first message is heard
        nonlocal due_s
        if time.monotonic() >= due_s:  # no flood: sockets that are full lose what is new
            engine.store(2, 3)
            node.store(keys[4:5])
            due_s = time.monotonic() + PACE_S
        return index.match(keys) == {"replica": Prefix(3, 5, 5, 5)}

    try:
        _until(subscribed, step)
        node.store(keys[5:])
        _until(lambda: index.match(keys) == {"replica": Prefix(3, 6, 6, 6)}, step)
    finally:
        lines.close()


def test_failing_discovery_is_counted_and_changes_nothing() -> None:
    class Failing(StaticDiscovery):
        def members(self) -> list[NodeRecord]:
            raise TierError("away")

    lines = EventLines()
    index = PrefixIndex(block_tokens=WIDTH, fingerprint=bytes(32))
    listener = Listener(index, lines, Failing([]), threading.Lock())
    listener.look(0.0)
    listener.step(0.0)
    assert listener.discovery_failures == 1
    assert index.nodes() == []
