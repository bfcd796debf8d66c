"""The parts that make a node a member: announcing, offers on their way in, names and settings."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from node_process import attach
from peer_thread import LIMIT_S, InUse, until

from kvist.assemble import node_cluster, node_peering
from kvist.config import check_cluster, load_config, preflight
from kvist.core.errors import ConfigError
from kvist.core.events import Cleared, KvEvent, Removed, Stored
from kvist.core.keys import Key
from kvist.core.outcome import BlockRef, Tier
from kvist.node.announcing import Announcing
from kvist.node.incarnation import begin_incarnation
from kvist.node.peers import messages as m
from kvist.node.peers.intake import Intake
from kvist.node.place import Place
from kvist.node.protocol import ProtocolError
from kvist.policy import LeafLru
from kvist.store import TieredStore
from kvist.testing.store_suite import RAW_BYTES, DictTier, content, key
from kvist.tiers.dram import PAGE_BYTES, Arena
from kvist.tiers.protocol import ListedBlock

SCOPE = b"s" * 32
SLOTS = 16


class Disk(DictTier):
    """Lists what it has, as far as the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = {key(n): content(key(n)) for n in range(4)}
        self.go_on = threading.Event()
        self.asked = threading.Event()

    def list_blocks(self, *, newest_first: bool = False) -> Iterator[ListedBlock]:
        for n in range(4):
            if n == 2:
                self.asked.set()
                assert self.go_on.wait(LIMIT_S)
            yield ListedBlock(key(n), key(n - 1) if n else None)
        yield ListedBlock(key(90), None, own=False)


@contextmanager
def _store(below: DictTier) -> Iterator[TieredStore]:
    arena = Arena(SLOTS * PAGE_BYTES, slot_bytes=RAW_BYTES)
    with TieredStore(arena, LeafLru(), below, raw_bytes=RAW_BYTES) as store:
        yield store


class Heard:
    """What was announced."""

    def __init__(self) -> None:
        self.events: list[tuple[KvEvent, bytes]] = []
        self.announcing = Announcing(lambda event, scope: self.events.append((event, scope)))

    def ended(self) -> bool:
        return not self.announcing._listings


def test_what_is_on_disk_at_the_start_is_announced_in_runs() -> None:
    disk, heard = Disk(), Heard()
    disk.go_on.set()
    with _store(disk) as store:
        heard.announcing.opened(SCOPE, store)
        until(heard.ended)
    assert heard.events == [(Stored(tuple(key(n) for n in range(4)), None, Tier.SSD), SCOPE)]


def test_what_leaves_while_the_disk_is_listed_is_not_announced_after_it_left() -> None:
    disk, heard = Disk(), Heard()
    with _store(disk) as store:
        heard.announcing.opened(SCOPE, store)
        assert disk.asked.wait(LIMIT_S)
        heard.announcing.heard(SCOPE, Removed((key(1), key(3)), Tier.SSD))
        heard.announcing.heard(SCOPE, Stored((key(3),), key(2), Tier.SSD))  # and comes back
        disk.go_on.set()
        until(heard.ended)
    assert [event for event, _ in heard.events[2:]] == [
        Stored((key(0),), None, Tier.SSD),
        Stored((key(2), key(3)), key(1), Tier.SSD),
    ]


@pytest.mark.parametrize("ending", ["closed", "cleared"])
def test_list_of_a_store_that_was_closed_or_cleared_is_void(ending: str) -> None:
    disk, heard = Disk(), Heard()
    with _store(disk) as store:
        heard.announcing.opened(SCOPE, store)
        assert disk.asked.wait(LIMIT_S)
        if ending == "closed":
            heard.announcing.closed(SCOPE)
        else:
            heard.announcing.heard(SCOPE, Cleared())
        disk.go_on.set()
        until(lambda: not any(t.name == "kvist-announce" for t in threading.enumerate()))
    assert heard.events == [(Cleared(), SCOPE)]


# -- offers ----------------------------------------------------------------------------------


class Lent(DictTier):
    """What other hosts have; nothing of it is this host's own."""

    def keeps(self, key: Key) -> bool:
        return False

    def holds(self, key: Key) -> bool:
        return False

    def lacks(self, key: Key) -> bool:
        return False


def _offer(numbers: range, *, tenants: tuple[str, ...] = ("t",), number: int = 3) -> m.Offer:
    parents = [key(n - 1) if n > 1 else m.NO_PARENT for n in numbers]
    keys = b"".join(key(n) for n in numbers)
    return m.Offer("a", 1, number, keys, b"".join(parents), tenants)


@contextmanager
def _intake(store: TieredStore, known: list[int]) -> Iterator[Intake]:
    found = {SCOPE: InUse(attach(1), store)}
    intake = Intake(found.get, lambda node, at: at.number <= known[0])
    intake.start()
    yield intake
    intake.stop()


def test_offered_blocks_are_fetched_with_parent_and_tenant_once_their_source_was_heard() -> None:
    below = Lent()
    below.blocks = {key(n): content(key(n)) for n in (1, 2)}
    known = [2]
    with _store(below) as store, _intake(store, known) as intake:
        assert intake.take(SCOPE, _offer(range(1, 3)), most=100) == 2
        assert store.stats().dram_blocks == 0
        known[0] = 3
        until(lambda: intake.fetched == 2)
        assert store.stats().dram_blocks == 2
        assert store.own.tenants([key(1), key(2), key(9)]) == ["t", "t", ""]
        assert [store.stat(key(n))[0].parent for n in (1, 2)] == [None, key(1)]
        assert intake.dropped == 0
        store.check_integrity()


def test_offer_that_contradicts_itself_or_names_a_closed_keyspace_is_not_taken() -> None:
    with _store(DictTier()) as store, _intake(store, [3]) as intake:
        with pytest.raises(ProtocolError, match="other numbers"):
            intake.take(SCOPE, _offer(range(3), tenants=("a", "b")), most=100)
        assert intake.take(b"x" * 32, _offer(range(3)), most=100) == 0


def test_offers_wait_in_a_bounded_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvist.node.peers import intake as module

    monkeypatch.setattr(module, "MOST_WAITING", 5)
    with _store(DictTier()) as store, _intake(store, [0]) as intake:
        assert intake.take(SCOPE, _offer(range(4)), most=100) == 4
        assert intake.take(SCOPE, _offer(range(10, 14)), most=100) == 1
        assert intake.dropped == 3


def test_no_more_is_taken_of_an_offer_than_the_node_accepts() -> None:
    with _store(DictTier()) as store, _intake(store, [0]) as intake:
        assert intake.take(SCOPE, _offer(range(4)), most=3) == 3
        assert intake.take(SCOPE, _offer(range(10, 14)), most=0) == 0
        assert intake.dropped == 5


def test_offered_blocks_that_do_not_come_are_dropped_in_time() -> None:
    now = [100.0]
    with _store(DictTier()) as store:
        found = {SCOPE: InUse(attach(1), store)}
        intake = Intake(found.get, lambda node, at: True, clock=lambda: now[0])
        assert intake.take(SCOPE, _offer(range(4)), most=100) == 4
        intake._step(SCOPE)
        assert intake.dropped == 0
        now[0] += 60.0
        intake._step(SCOPE)
        assert (intake.fetched, intake.dropped) == (0, 4)


def test_block_is_surely_not_here_only_if_it_is_in_no_tier() -> None:
    below = DictTier()
    below.blocks = {key(0): content(key(0))}
    with _store(below) as store, store.write([BlockRef(key(1), None)]):
        assert [store.own.lacks(key(n)) for n in range(3)] == [False, False, True]


# -- names, numbers, settings ----------------------------------------------------------------


def test_incarnation_grows_though_the_clock_goes_back(tmp_path: Path) -> None:
    path = tmp_path / "n.incarnation"
    assert begin_incarnation(path, 1000) == 1000
    assert begin_incarnation(path, 400) == 1001
    assert begin_incarnation(path, 5000) == 5000
    path.write_text("rubbish")
    assert begin_incarnation(path, 7000) == 7000
    assert [p.name for p in tmp_path.iterdir()] == ["n.incarnation"]


def test_incarnation_that_cannot_be_kept_is_the_clocks(tmp_path: Path) -> None:
    assert begin_incarnation(tmp_path / "absent" / "n", 1000) == 1000


@pytest.mark.parametrize(
    ("knobs", "path", "said"),
    [
        (["cluster.discovery=files"], "cluster.folder", "needs it"),
        (["cluster.discovery=redis"], "cluster.url", "needs it"),
        (["cluster.discovery=ray"], "cluster.url", "needs it"),
        (["cluster.discovery=static"], "cluster.nodes", "needs it"),
        (["cluster.name=a b"], "cluster.name", "no name of a node"),
        (["peers.members=127.0.0.1:1"], "peers.members", "find each other"),
        (["cluster.events=tcp://10.0.0.1:5557"], "cluster.events", "can be reached by others"),
        (["cluster.replay=tcp://10.0.0.1:0"], "cluster.replay", "can be reached"),
        (["cluster.replay=tcp://0.0.0.0:0"], "cluster.replay", "cannot connect to"),
        (
            ["peers.listen=10.0.0.1:7077", "peers.token_file=env:TOKEN"],
            "cluster.events",
            "other hosts cannot connect",
        ),
        (["cluster.host=h"], "cluster.events", "other hosts cannot connect"),
        (["cluster.events=somewhere"], "cluster.events", "no endpoint"),
        (["cluster.events=tcp://[::1"], "cluster.events", "no endpoint"),
        (["cluster.replay=tcp://127.0.0.1"], "cluster.replay", "no endpoint"),
        (["cluster.replay=tcp://127.0.0.1:99999"], "cluster.replay", "no endpoint"),
        (
            ["peers.listen=0.0.0.0:7077", "peers.token_file=env:TOKEN"],
            "peers.listen",
            "cannot connect to",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(knobs: list[str], path: str, said: str) -> None:
    base = [] if "discovery" in knobs[0] else ["cluster.discovery=files", "cluster.folder=/x"]
    sets = [f"node.{knob}" for knob in (*base, *knobs)]
    config = load_config(env={}, sets=sets).config
    with pytest.raises(ConfigError, match=said) as caught:
        check_cluster(config.node.cluster, config.node.peers)
    assert caught.value.path == f"$.node.{path}"
    assert caught.value.remedy
    (problem,) = preflight(load_config(env={}, sets=[*sets, "store.ssd.enabled=false"]).config)
    assert problem.path == f"node.{path}"


def test_secret_from_the_environment_seals_events_and_proves_readers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On ports that all hosts can reach, under the name by which they reach this one."""
    pytest.importorskip("zmq")
    monkeypatch.setenv("KVIST_TEST_TOKEN", "x" * 32)
    sets = [
        "node.peers.token_file=env:KVIST_TEST_TOKEN",
        "node.peers.listen=0.0.0.0:0",
        "node.cluster.discovery=files",
        f"node.cluster.folder={folder / 'found'}",
        "node.cluster.events=tcp://0.0.0.0:0",
        "node.cluster.replay=tcp://0.0.0.0:0",
        "node.cluster.host=kvist.example",
        "node.cluster.domain=rack",
    ]
    config = load_config(env={}, sets=sets).config
    place = Place(folder / "n.sock")
    peering = node_peering(config)
    assert peering.credentials.token == b"x" * 32
    join = node_cluster(config, place, peering)
    assert join is not None
    cluster = join("0.0.0.0:7077")
    try:
        own = cluster._loop.member.own
        assert own.blocks == "kvist.example:7077"
        assert own.events.startswith("tcp://kvist.example:")
        assert own.replay.startswith("tcp://kvist.example:")
        assert own.domain == "rack"
        assert cluster.position() is None
        monkeypatch.setenv("KVIST_TEST_TOKEN", "short")
        with pytest.raises(ConfigError, match="32 are the least"):
            node_cluster(config, place, peering)
    finally:
        cluster.close()


def test_two_nodes_of_a_host_have_two_names_and_one_keeps_its_own(folder: Path) -> None:
    pytest.importorskip("zmq")
    sets = ["node.cluster.discovery=static", "node.cluster.nodes=v=tcp://127.0.0.1:1"]
    config = load_config(env={}, sets=sets).config
    names = []
    for socket in ("a.sock", "b.sock", "a.sock"):
        join = node_cluster(config, Place(folder / socket), node_peering(config))
        assert join is not None
        cluster = join("")
        names.append(cluster.facts()["node"])
        cluster.close()
    assert names[0] == names[2] != names[1]


def test_node_beyond_this_host_is_not_read_from_without_a_proof(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("zmq")
    from kvist.cluster.record import NodeRecord, NodeState
    from kvist.node.clustered import Neighbour

    sets = ["node.cluster.discovery=static", "node.cluster.nodes=v=tcp://127.0.0.1:1"]
    config = load_config(env={}, sets=sets).config
    join = node_cluster(config, Place(folder / "a.sock"), node_peering(config))
    assert join is not None
    cluster = join("")
    places = {"near": "127.0.0.1:7", "far": "10.1.2.3:7", "odd": "nowhere", "none": ""}
    neighbours = [
        Neighbour(NodeRecord(name, 1, 1, NodeState.ACTIVE, blocks=place), suspect=False)
        for name, place in places.items()
    ]
    for _ in range(2):
        cluster._follow(neighbours)
    assert set(cluster._hosts) == {"near"}
    assert caplog.text.count("no blocks are read from node far") == 1
    assert caplog.text.count("no blocks are read from node odd") == 1
    cluster.close()
