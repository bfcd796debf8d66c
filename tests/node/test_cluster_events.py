"""Event streams over real sockets: real losses heal, strangers and liars are refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import zmq

from kvist.cluster.directory import Holder
from kvist.cluster.discovery.memory import Board, MemoryDiscovery
from kvist.cluster.discovery.static import StaticDiscovery
from kvist.cluster.follower import Ask
from kvist.cluster.log import EventLog
from kvist.cluster.member import Member, Settings, Space
from kvist.cluster.membership import Timings
from kvist.cluster.record import NodeRecord, NodeState
from kvist.cluster.replication import Offer
from kvist.cluster.view import ClusterView
from kvist.cluster.wire import END_NUMBER, topic_of
from kvist.core.errors import ConfigError
from kvist.core.events import Removed, Stored
from kvist.core.outcome import Tier
from kvist.native import digest
from kvist.node.clustered import ClusterLoop, Duties, Rhythm
from kvist.node.events import EventLines, EventPorts, secret_of

LOCAL = "tcp://127.0.0.1:*"
WAIT_S = 60.0
ROOM = Space(1 << 30)
SETTINGS = Settings(
    slow_start_s=0.0,
    join_s=2.0,
    most_batches=8,
    timings=Timings(beat_s=0.2, suspect_s=30.0, expire_s=60.0),
)


def key(n: int) -> bytes:
    return digest(b"%d" % n)


class Node:
    """A loop with its sockets; the test steps it, or lets it run."""

    def __init__(self, name: str, board: Board, secret: str, most_queued: int) -> None:
        self.ports = EventPorts(LOCAL, LOCAL, secret=secret, most_queued=most_queued)
        record = NodeRecord(
            name,
            incarnation=time.time_ns(),
            version=0,
            state=NodeState.JOINING,
            events=self.ports.events,
            replay=self.ports.replay,
        )
        self.offers: list[Offer] = []
        self.member = Member(record, SETTINGS, time.monotonic(), view=ClusterView(own=name))
        self.loop = ClusterLoop(
            self.member,
            self.ports,
            MemoryDiscovery(board, time.monotonic),
            duties=Duties(lambda: ROOM, self.offers.extend),
            lines=EventLines(secret=secret, most_queued=most_queued),
            rhythm=Rhythm(tick_s=0.0),
        )

    def holders(self, n: int) -> list[Holder]:
        with self.loop.lock:
            return self.member.view.directory.holders(key(n))


@pytest.fixture
def open_node() -> Iterator[Callable[..., Node]]:
    board = Board()
    with ExitStack() as stack:

        def made(name: str, secret: str = "", most_queued: int = 1000) -> Node:
            node = Node(name, board, secret, most_queued)
            stack.callback(node.loop.close)
            return node

        yield made


def step_until(done: Callable[[], bool], *nodes: Node) -> None:
    """Steps the nodes in turn until it is so."""
    give_up = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < give_up, "it did not come to that"
        for node in nodes:
            node.loop.look()
            node.loop.step(0.005)


def met(*nodes: Node) -> None:
    def all_know_all() -> bool:
        return all(
            len(n.member.view.membership.takers()) == len(nodes) and n.member.view.complete
            for n in nodes
        )

    step_until(all_know_all, *nodes)


def test_what_one_node_stores_the_other_knows(open_node: Callable[..., Node]) -> None:
    a, b = open_node("a"), open_node("b")
    met(a, b)
    a.loop.record(Stored((key(1), key(2)), None, Tier.DRAM))
    step_until(lambda: b.holders(2) == [Holder("a", Tier.DRAM)], a, b)
    a.loop.record(Removed((key(1),), Tier.DRAM))
    step_until(lambda: b.holders(1) == [], a, b)
    assert b.holders(2) == [Holder("a", Tier.DRAM)]


def test_nodes_run_on_threads_and_offer_what_is_short(open_node: Callable[..., Node]) -> None:
    a, b = open_node("a"), open_node("b")
    for node in (a, b):
        node.loop.start()
    a.loop.record(Stored((key(1),), None, Tier.SSD))
    offered = threading.Event()
    give_up = time.monotonic() + WAIT_S
    while not a.offers and time.monotonic() < give_up:
        offered.wait(0.02)
    assert [(o.source, o.node, o.keys) for o in a.offers] == [("a", "b", (key(1),))]


def test_batches_that_a_slow_reader_lost_are_asked_for(open_node: Callable[..., Node]) -> None:
    """The reader does not read while more is published than sockets and replay buffer can hold."""
    a, b = open_node("a", most_queued=4), open_node("b", most_queued=4)
    met(a, b)
    kept, keys = 20, 3000
    for n in range(150):
        run = tuple(digest(b"%d %d" % (n, i)) for i in range(keys))
        a.loop.record(Stored(run, None, Tier.DRAM))
        a.loop.step(0.0)
        if n >= kept:
            a.loop.record(Removed(run, Tier.DRAM))
            a.loop.step(0.0)

    def same() -> bool:
        return b.member.view.directory.position("a") == a.member.position and not (
            a.member.log.pending
        )

    step_until(same, a, b)
    directory = b.member.view.directory
    assert directory.gaps > 0
    assert a.member.log.dumps > 0
    assert len(directory) == kept * keys


def test_restarted_node_is_followed_anew(open_node: Callable[..., Node]) -> None:
    a, b = open_node("a"), open_node("b")
    met(a, b)
    a.loop.record(Stored((key(1),), None, Tier.DRAM))
    step_until(lambda: bool(b.holders(1)), a, b)
    again = open_node("a")
    again.loop.record(Stored((key(2),), None, Tier.SSD))
    step_until(lambda: b.holders(2) == [Holder("a", Tier.SSD)], again, b)
    assert b.holders(1) == []


def test_node_that_leaves_is_gone_before_it_is_silent(open_node: Callable[..., Node]) -> None:
    a, b, c = open_node("a"), open_node("b"), open_node("c")
    met(a, b, c)
    c.loop.close()
    step_until(lambda: "c" not in b.member.view.membership, b)


def test_stock_subscriber_reads_us_as_it_reads_vllm() -> None:
    """A SUB and a REQ-like socket that know nothing of Kvist, as in vLLM's example subscriber."""
    ports = EventPorts(LOCAL, LOCAL)
    log = EventLog(block_tokens=16)
    context = zmq.Context.instance()
    with context.socket(zmq.DEALER) as replay:
        replay.setsockopt(zmq.LINGER, 0)
        replay.connect(ports.replay)
        sealed = []
        for n in range(3):
            log.record(Stored((key(n),), None, Tier.DRAM))
            sealed.append(log.seal(0.0))
        replay.send_multipart([b"", (1).to_bytes(8, "big")])
        give_up = time.monotonic() + WAIT_S
        while not ports.answer(b"topic", lambda number: log.since(number, 0.0)):
            assert time.monotonic() < give_up
        got = []
        while not got or got[-1][2] != END_NUMBER:
            assert replay.poll(WAIT_S * 1000)
            got.append(replay.recv_multipart())
    assert got == [
        *([b"", b"topic", s.number.to_bytes(8, "big"), s.payload] for s in sealed[1:]),
        [b"", b"", END_NUMBER, b""],
    ]
    ports.close()


def test_asks_that_are_none_are_refused_and_the_port_goes_on() -> None:
    ports = EventPorts(LOCAL, LOCAL)
    context = zmq.Context.instance()
    with context.socket(zmq.DEALER) as replay:
        replay.setsockopt(zmq.LINGER, 0)
        replay.connect(ports.replay)
        for frames in ([b"x"], [b"", b"short"], [b"", bytes(8), b"more"], [b"", bytes(8)]):
            replay.send_multipart(frames)
        give_up = time.monotonic() + WAIT_S
        answered = 0
        while answered < 4:
            assert time.monotonic() < give_up
            answered += ports.answer(b"topic", lambda number: [])
        assert replay.poll(WAIT_S * 1000)
        assert replay.recv_multipart() == [b"", b"", END_NUMBER, b""]
    assert ports.refused == 3
    ports.close()


def test_node_that_speaks_for_another_is_not_heard() -> None:
    ports, lines = EventPorts(LOCAL, LOCAL), EventLines()
    liar = NodeRecord(
        "liar",
        incarnation=1,
        version=1,
        state=NodeState.ACTIVE,
        events=ports.events,
        replay=ports.replay,
    )
    lines.follow([liar])
    log = EventLog(block_tokens=16)
    log.seal(0.0)
    give_up = time.monotonic() + WAIT_S
    while not lines.unreadable:
        assert time.monotonic() < give_up
        lines.ask(Ask("liar", 1, 0))
        ports.answer(topic_of("honest", 1), lambda number: log.since(number, 0.0))
        assert list(lines.receive()) == []
    lines.close()
    ports.close()


def test_nobody_hears_a_port_with_a_secret_without_it(open_node: Callable[..., Node]) -> None:
    if not zmq.has("curve"):
        pytest.skip("this libzmq was built without CURVE")
    secret = secret_of(b"ours")
    a, b = open_node("a", secret), open_node("b", secret)
    stranger, enemy = open_node("stranger"), open_node("enemy", secret_of(b"theirs"))
    step_until(lambda: len(a.member.view.membership) == 4, a, b, stranger, enemy)
    a.loop.record(Stored((key(1),), None, Tier.DRAM))
    step_until(lambda: bool(b.holders(1)), a, b, stranger, enemy)
    for _ in range(20):
        for node in (a, stranger, enemy):
            node.loop.step(0.005)
    assert stranger.holders(1) == []
    assert enemy.holders(1) == []


def test_port_that_others_can_reach_demands_a_secret() -> None:
    for endpoint in ("tcp://*:0", "tcp://0.0.0.0:0", "tcp://192.0.2.1:0", "tcp://[::]:0"):
        with pytest.raises(ConfigError, match="can be reached by others"):
            EventPorts(endpoint, LOCAL)
    with pytest.raises(ConfigError, match="Z85"):
        EventPorts(LOCAL, LOCAL, secret="short")


def test_two_nodes_of_one_name_are_told_once(
    open_node: Callable[..., Node], caplog: pytest.LogCaptureFixture
) -> None:
    a, b, newer = open_node("a"), open_node("b"), open_node("a")
    step_until(lambda: "another node is called a" in caplog.text, a, b, newer)
    for _ in range(10):
        for node in (a, newer):
            node.loop.look()
            node.loop.step(0.005)
    assert caplog.text.count("another node is called a") == 1


def test_discovery_that_fails_is_counted_and_the_loop_goes_on(
    open_node: Callable[..., Node],
) -> None:
    from kvist.core.errors import TierError

    a, b = open_node("a"), open_node("b")
    met(a, b)

    def fail(*_: object, **__: object) -> None:
        raise TierError("no discovery today")

    a.loop._discovery.announce = fail  # type: ignore[method-assign]
    a.loop.record(Stored((key(1),), None, Tier.DRAM))
    step_until(lambda: bool(b.holders(1)), a, b)
    assert a.loop.discovery_failures > 0


def test_listed_node_that_was_silent_for_long_comes_back(open_node: Callable[..., Node]) -> None:
    """Nobody announces: the list has addresses only, and the node was buried meanwhile."""
    a, b = open_node("a"), open_node("b")
    for one, other in ((a, b), (b, a)):
        place = f"{other.member.own.node}={other.ports.events}?replay={other.ports.replay}"
        one.loop._discovery = StaticDiscovery([place])
    a.loop.record(Stored((key(1),), None, Tier.DRAM))
    step_until(lambda: bool(b.holders(1)), a, b)
    with b.loop.lock:
        b.member.view.tick(time.monotonic() + 61.0)
    assert "a" not in b.member.view.membership
    assert b.holders(1) == []
    step_until(lambda: bool(b.holders(1)), a, b)
