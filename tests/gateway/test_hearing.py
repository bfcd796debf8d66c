"""A gateway's ears by themselves: who is heard, from where, and what cannot harm them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
from gateway_thread import eventually

from kvist.cluster.discovery.static import StaticDiscovery
from kvist.cluster.log import Sealed
from kvist.cluster.record import Holds, NodeRecord, NodeState
from kvist.cluster.wire import encode_payload, topic_of
from kvist.core.errors import TierError
from kvist.core.events import Stored
from kvist.core.outcome import Tier
from kvist.gateway.hearing import Everybody, Hearing, Home
from kvist.native import digest
from kvist.node.events import EventPorts
from kvist.router.index import PrefixIndex
from kvist.router.prefixes import IndexedPrefixes
from kvist.router.turns import Turns

WIDTH = 4
LOCAL = "tcp://127.0.0.1:*"
REPLICA = "http://127.0.0.1:8001"
KEYS = tuple(digest(b"%d" % n) for n in range(4))


@pytest.fixture
def ports() -> Iterator[EventPorts]:
    """Where somebody publishes."""
    found = EventPorts(LOCAL, LOCAL)
    yield found
    found.close()


def new_prefixes() -> IndexedPrefixes:
    """Of one replica, whose engine is `engine`."""
    lock = Turns()
    index = PrefixIndex(block_tokens=WIDTH, fingerprint=bytes(32), pause=lock.pause)
    return IndexedPrefixes(index, engines={REPLICA: "engine"}, lock=lock)


def record(name: str, events: str, replay: str = "", **more: object) -> NodeRecord:
    """A publisher."""
    return msgspec.structs.replace(
        NodeRecord(name, incarnation=0, version=0, state=NodeState.ACTIVE),
        events=events,
        replay=replay,
        **more,
    )


@contextmanager
def hearing(prefixes: IndexedPrefixes, everybody: Everybody, home: Home) -> Iterator[Hearing]:
    """Threads that hear everybody."""
    found = Hearing(prefixes, {REPLICA: home}, everybody, "")
    found.start()
    try:
        yield found
    finally:
        began_s = time.monotonic()
        found.close()
        found.close()
        assert time.monotonic() - began_s < 30


def test_garbage_is_counted_and_the_next_message_is_heard(ports: EventPorts) -> None:
    prefixes, dice = new_prefixes(), random.Random(5)
    event = {
        "type": "BlockStored",
        "block_hashes": [b"a" * 32, 7],
        "parent_block_hash": None,
        "token_ids": list(range(2 * WIDTH)),
        "block_size": WIDTH,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    good = msgspec.msgpack.encode([0.0, [event], 0])
    strange = [
        event | {"block_size": -1},
        event | {"block_hashes": []},
        event | {"block_hashes": [b""], "token_ids": [1]},
        event | {"token_ids": [1, 2, 3]},
        event | {"extra_keys": "x"},
        event | {"extra_keys": [[["a"]], 5]},
        event | {"parent_block_hash": 1 << 63},
        event | {"group_idx": -5},
        event | {"lora_name": "x" * 10_000},
        {"type": "BlockRemoved", "block_hashes": [b"", -1], "medium": "GPU"},
        {"type": "BlockRemoved", "block_hashes": [b"", -1], "medium": "nowhere"},
    ]
    payloads = [msgspec.msgpack.encode([0.0, [one], 0]) for one in strange]
    payloads += [bytes(dice.randbytes(dice.randrange(200))) for _ in range(200)]
    payloads += [good[: dice.randrange(len(good))] for _ in range(50)]
    for _ in range(200):
        spoiled = bytearray(good)
        spoiled[dice.randrange(len(good))] = dice.randrange(256)
        payloads.append(bytes(spoiled))
    number = [0]

    def publish(payload: bytes) -> None:
        ports.publish(b"", [Sealed(number[0], payload)])
        number[0] += 1

    everybody = Everybody([record("engine", ports.events)], None)
    with hearing(prefixes, everybody, Home("engine", "127.0.0.1")) as ears:
        eventually(lambda: publish(good) or ears.state(REPLICA) == "heard")
        for payload in payloads:
            publish(payload)
        last = list(range(1000, 1000 + 2 * WIDTH))
        keys = prefixes.keys(last, "", "")
        events = [{"type": "AllBlocksCleared"}, event | {"token_ids": last}]

        def is_heard() -> bool:
            publish(msgspec.msgpack.encode([0.0, events, 0]))
            return bool(prefixes.match(keys))

        eventually(is_heard)
        assert prefixes.match(keys)[REPLICA].hbm_tokens == 2 * WIDTH
        assert ears.measures()["kvist_event_unreadable_total"] > 50


def test_engines_are_heard_though_discovery_fails(ports: EventPorts) -> None:
    class Failing(StaticDiscovery):
        def members(self) -> list[NodeRecord]:
            raise TierError("away")

    prefixes = new_prefixes()
    everybody = Everybody([record("engine", ports.events)], Failing([]))
    with hearing(prefixes, everybody, Home("engine", "127.0.0.1")) as ears:
        payload = encode_payload((Stored(KEYS, None, Tier.HBM),), ts=0.0, block_tokens=WIDTH)

        def is_heard() -> bool:
            ports.publish(b"", [Sealed(0, payload)])
            return bool(prefixes.match(KEYS))

        eventually(is_heard)
        assert ears.measures()["kvist_discovery_failures_total"] >= 1


@pytest.mark.parametrize(
    ("host", "named", "nodes", "expected"),
    [
        ("127.0.0.1", "", ["tcp://127.0.0.1:1"], "n0"),
        ("localhost", "", ["tcp://127.0.0.1:1", "tcp://10.0.0.9:1"], "n0"),
        ("::1", "", ["ipc:///run/x"], "n0"),
        ("10.0.0.9", "", ["tcp://10.0.0.1:1", "tcp://10.0.0.9:1"], "n1"),
        ("10.0.0.9", "", ["tcp://10.0.0.9:1", "tcp://10.0.0.9:2"], ""),
        ("10.0.0.9", "n1", ["tcp://10.0.0.9:1", "tcp://10.0.0.9:2"], "n1"),
        ("10.0.0.9", "", ["tcp://127.0.0.1:1"], ""),
    ],
    ids=str,
)
def test_replica_reads_from_the_node_of_its_host(
    host: str, named: str, nodes: list[str], expected: str
) -> None:
    prefixes, placed = new_prefixes(), dict[str, str]()
    place: Callable[[dict[str, str]], None] = placed.update
    prefixes.place = place  # type: ignore[method-assign, assignment]
    listed = StaticDiscovery([f"n{n}={events}" for n, events in enumerate(nodes)])
    ears = Hearing(prefixes, {REPLICA: Home("engine", host, named)}, Everybody([], listed), "")
    ears.look()
    ears.close()
    assert placed.get(REPLICA, "") == expected


def test_keyspace_of_the_nodes_is_taken_over_when_it_is_told(ports: EventPorts) -> None:
    prefixes = new_prefixes()
    before = prefixes.keys(list(range(WIDTH)), "", "")
    own = NodeRecord("n", incarnation=5, version=1, state=NodeState.ACTIVE, events=ports.events)
    told = msgspec.structs.replace(own, version=2, holds=Holds(WIDTH, ("0f" * 32,)))
    listed = StaticDiscovery([f"n={ports.events}?replay={ports.replay}"])
    with hearing(prefixes, Everybody([], listed), Home("engine", "127.0.0.1")):
        payload = encode_payload((), ts=0.0, block_tokens=WIDTH, record=told)

        def is_named() -> bool:
            ports.publish(topic_of("n", 5), [Sealed(0, payload)])
            return prefixes.keys(list(range(WIDTH)), "", "") != before

        eventually(is_named)
