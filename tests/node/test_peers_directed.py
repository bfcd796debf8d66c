"""Reading by the directory: whom it names is read from, and what was wrong in it is taken back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from node_process import attach
from peer_nodes import key, ref
from peer_thread import owner as empty_owner
from peer_thread import peering, until

from kvist.cluster.directory import Directory, Position
from kvist.cluster.wire import Batch
from kvist.core.events import Cleared, Removed, Stored
from kvist.core.keys import Key
from kvist.core.outcome import Outcome, Tier
from kvist.node.peers import messages as m
from kvist.node.peers.directed import Directed, Host
from kvist.node.peers.peering import Address
from kvist.node.peers.server import PeerServer
from kvist.node.peers.tier import PeerTier
from kvist.store import TieredStore
from kvist.testing.store_suite import RAW_BYTES, content

KEYS = [key(n) for n in range(4)]  # what the owner holds
INCARNATION = 5


class Told:
    """A directory that the test writes; what readers take back is counted."""

    def __init__(self) -> None:
        self.directory = Directory()
        self.missed_keys: list[Key] = []
        self._number = 0

    def say(self, node: str, *events: Stored | Removed) -> None:
        """A node publishes."""
        first = () if self._number else (Cleared(),)
        self.directory.take(Batch(node, INCARNATION, self._number, (*first, *events)), 0.0)
        self._number += 1

    def holders(self, key: Key) -> list[str]:
        return self.directory.fetchable(key)

    def missed(self, node: str, key: Key, at: Position) -> None:
        self.missed_keys.append(key)
        self.directory.disbelieve(node, key, at)


class At:
    """An owner's side of a cluster that has published up to a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def position(self) -> Position:
        return Position(INCARNATION, self.number)

    def take(self, fingerprint: bytes, offer: m.Offer) -> int:
        return 0


@contextlib.contextmanager
def owner(cluster: At | None = None) -> Iterator[tuple[PeerServer, TieredStore]]:
    """An owner that holds `KEYS`, too."""
    with empty_owner(cluster=cluster) as (server, store):
        with store.write([ref(n) for n in range(4)]) as lease:
            for i, name in enumerate(KEYS):
                lease.buffer(i)[:] = content(name)
                assert lease.commit(i)
        yield server, store


@contextlib.contextmanager
def _lender(told: Told, **servers: PeerServer) -> Iterator[tuple[PeerTier, Directed]]:
    made = peering(next(iter(servers.values())))
    directed = Directed(
        told, lambda place, lacks: made.member(Address.parse(place), attach(1), lacks)
    )
    directed.follow({name: Host(server.address, False) for name, server in servers.items()})
    lender = made.tier(directed)
    yield lender, directed
    lender.close()


def _read(lender: PeerTier, keys: list[Key]) -> list[Outcome]:
    outs = [bytearray(RAW_BYTES) for _ in keys]
    outcomes = dict(lender.read_many(list(zip(keys, map(memoryview, outs), strict=True))))
    for i, outcome in outcomes.items():
        assert outcome is Outcome.MISS or bytes(outs[i]) == content(keys[i])
    return [outcomes[i] for i in range(len(keys))]


def test_directory_says_who_has_a_run_and_nobody_is_asked() -> None:
    told = Told()
    with owner(cluster=At(0)) as (server, _), _lender(told, a=server) as (lender, _directed):
        assert lender.contains_run(KEYS) == 0
        told.say("a", Stored(tuple(KEYS[:3]), None, Tier.DRAM))
        assert lender.contains_run(KEYS) == 3
        assert lender.known_run(KEYS[1:]) == 2
        assert not lender.contains(KEYS[3])
        assert server.facts()["readers"] == 0
        assert _read(lender, KEYS[:3]) == [Outcome.HIT] * 3


def test_what_a_holder_has_in_a_remote_only_is_not_read_from_it() -> None:
    told = Told()
    with owner(cluster=At(0)) as (server, _), _lender(told, a=server) as (lender, _directed):
        told.say("a", Stored(tuple(KEYS), None, Tier.REMOTE))
        assert lender.contains_run(KEYS) == 0


def test_wrong_belief_is_taken_back_and_the_holder_is_not_asked_again() -> None:
    told = Told()
    with owner(cluster=At(0)) as (server, store), _lender(told, a=server) as (lender, _directed):
        told.say("a", Stored(tuple(KEYS), None, Tier.DRAM))
        assert store.evict(KEYS[:2]) == 2
        assert _read(lender, KEYS) == [Outcome.MISS] * 2 + [Outcome.HIT] * 2
        assert sorted(told.missed_keys) == sorted(KEYS[:2])
        assert lender.contains_run(KEYS) == 0
        assert lender.contains_run(KEYS[2:]) == 2
        asked = server.counts.absent_blocks
        assert _read(lender, KEYS[:2]) == [Outcome.MISS] * 2
        assert server.counts.absent_blocks == asked
        told.say("a", Stored(tuple(KEYS[:2]), None, Tier.DRAM))
        assert lender.contains_run(KEYS) == 4


def test_answer_that_is_older_than_what_was_heard_changes_no_belief() -> None:
    """The block came back, and that was heard before the answer that it is not there."""
    told = Told()
    with owner(cluster=At(0)) as (server, store), _lender(told, a=server) as (lender, _directed):
        told.say("a", Stored(tuple(KEYS), None, Tier.DRAM))
        told.say("a", Stored(tuple(KEYS), None, Tier.SSD))
        store.evict(KEYS[:1])
        assert _read(lender, KEYS[:1]) == [Outcome.MISS]
        assert told.missed_keys == KEYS[:1]
        assert lender.contains_run(KEYS) == 4


def test_holder_that_is_in_no_cluster_or_was_busy_is_spared_for_a_while_and_believed() -> None:
    told = Told()
    with owner() as (server, store), _lender(told, a=server) as (lender, _directed):
        told.say("a", Stored(tuple(KEYS), None, Tier.DRAM))
        store.evict(KEYS[:1])
        assert _read(lender, KEYS[:1]) == [Outcome.MISS]
        assert told.missed_keys == []
        assert lender.contains_run(KEYS) == 0
        assert lender.contains_run(KEYS[1:]) == 3
        until(lambda: lender.contains_run(KEYS) == 4)


def test_silent_holder_is_read_from_only_where_nobody_else_has_it() -> None:
    told, other = Told(), Told()
    other.directory, other._number = told.directory, 0
    with (
        owner(cluster=At(0)) as (first, _),
        owner(cluster=At(0)) as (second, _),
        _lender(told, a=first, b=second) as (lender, directed),
    ):
        told.say("a", Stored(tuple(KEYS), None, Tier.DRAM))
        other.say("b", Stored(tuple(KEYS[:2]), None, Tier.DRAM))
        directed.follow({"a": Host(first.address, True), "b": Host(second.address, False)})
        assert [len(directed.owners(k)) for k in KEYS] == [1, 1, 1, 1]
        assert _read(lender, KEYS) == [Outcome.HIT] * 4
        assert (first.counts.sent_blocks, second.counts.sent_blocks) == (2, 2)


def test_node_that_left_is_read_from_no_more_and_one_that_failed_is_tried_again() -> None:
    told = Told()
    with owner(cluster=At(0)) as (server, _), _lender(told, a=server) as (lender, directed):
        told.say("a", Stored(tuple(KEYS), None, Tier.DRAM))
        hosts = {"a": Host(server.address, False)}
        (member,) = directed.owners(KEYS[0])
        member._fail("it is made to look so", for_now=True)
        assert lender.contains_run(KEYS) == 0

        def back() -> bool:
            directed.follow(hosts)
            return lender.contains_run(KEYS) == 4

        until(back)
        directed.follow({})
        assert lender.contains_run(KEYS) == 0
        assert _read(lender, KEYS[:1]) == [Outcome.MISS]
        directed.follow(hosts)
        assert _read(lender, KEYS) == [Outcome.HIT] * 4


def test_closed_beliefs_follow_nobody() -> None:
    told = Told()
    with owner(cluster=At(0)) as (server, _), _lender(told, a=server) as (lender, directed):
        told.say("a", Stored(tuple(KEYS), None, Tier.DRAM))
        lender.close()
        directed.follow({"a": Host(server.address, False)})
        assert directed.owners(KEYS[0]) == []
