"""The directory: who has what, and what corrects it."""

from __future__ import annotations

from small import batches, chain, key, received, stored

from kvist.cluster.directory import MOST_NODES, Directory, Holder, Limits, Position
from kvist.cluster.log import EventLog
from kvist.cluster.wire import Batch
from kvist.core.events import Cleared, Removed, Stored
from kvist.core.outcome import Tier


def told(directory: Directory, node: str, *events: Stored | Removed | Cleared) -> EventLog:
    """A directory that has heard of a node with these events."""
    log = EventLog(block_tokens=16)
    for batch in batches(log, [list(events)], node=node):
        directory.take(batch, 0.0)
    return log


def test_holders_of_the_fastest_tier_come_first() -> None:
    directory = Directory()
    told(directory, "c", stored(1, tier=Tier.SSD), stored(1, tier=Tier.DRAM))
    told(directory, "a", stored(1, tier=Tier.SSD))
    told(directory, "b", stored(1, tier=Tier.DRAM))
    assert directory.holders(key(1)) == [
        Holder("b", Tier.DRAM),
        Holder("c", Tier.DRAM),
        Holder("a", Tier.SSD),
    ]
    assert directory.holders(key(2)) == []


def test_reach_is_the_run_from_the_start_for_each_node() -> None:
    directory, keys = Directory(), chain(1, 10)
    told(directory, "whole", Stored(tuple(keys), None, Tier.DRAM))
    told(directory, "head", Stored(tuple(keys[:4]), None, Tier.SSD))
    told(directory, "hole", Stored((*keys[:2], *keys[3:]), None, Tier.DRAM))
    told(directory, "tail", Stored(tuple(keys[1:]), None, Tier.DRAM))
    assert directory.reach(keys) == {"whole": 10, "head": 4, "hole": 2}


def test_block_that_left_one_tier_is_still_in_the_other() -> None:
    directory = Directory()
    told(
        directory,
        "a",
        stored(1, tier=Tier.DRAM),
        stored(1, tier=Tier.SSD),
        Removed((key(1),), Tier.DRAM),
    )
    assert directory.holders(key(1)) == [Holder("a", Tier.SSD)]


def test_dropped_node_has_nothing_and_its_number_serves_another() -> None:
    directory = Directory()
    told(directory, "a", stored(1, 2))
    told(directory, "b", stored(2))
    directory.drop("a")
    assert directory.holders(key(1)) == []
    assert directory.holders(key(2)) == [Holder("b", Tier.DRAM)]
    told(directory, "c", stored(3))
    assert directory.holders(key(1)) == []
    assert directory.holders(key(3)) == [Holder("c", Tier.DRAM)]


def test_restarted_node_has_only_what_it_says_anew() -> None:
    directory = Directory()
    told(directory, "a", stored(1, 2))
    for batch in batches(EventLog(block_tokens=16), [[stored(2)]], incarnation=5):
        directory.take(batch, 1.0)
    assert directory.holders(key(1)) == []
    assert directory.holders(key(2)) == [Holder("a", Tier.DRAM)]


def test_discovered_restart_voids_what_was_believed() -> None:
    directory = Directory()
    told(directory, "a", stored(1))
    directory.expect("a", 2, 0, 1.0)
    assert directory.holders(key(1)) == []
    assert [(a.incarnation, a.number) for a in directory.asks(1.0)] == [(2, 0)]


def test_miss_at_the_owner_removes_the_belief() -> None:
    directory = Directory()
    log = told(directory, "a", stored(1, tier=Tier.DRAM), stored(1, tier=Tier.SSD))
    assert directory.disbelieve("a", key(1), Position(1, log.number))
    assert directory.holders(key(1)) == []
    assert not directory.disbelieve("a", key(1), Position(1, log.number))
    assert directory.counts.corrections == 1


def test_miss_from_before_what_is_known_says_nothing() -> None:
    """The block came after the answer was given; the answer came after the event."""
    directory = Directory()
    log = told(directory, "a", stored(2))
    answered = Position(1, log.number)
    log.record(stored(1))
    directory.take(received(log.seal(0.0)), 0.0)
    assert not directory.disbelieve("a", key(1), answered)
    assert directory.holders(key(1)) == [Holder("a", Tier.DRAM)]


def test_miss_of_another_start_says_nothing() -> None:
    directory = Directory()
    told(directory, "a", stored(1))
    assert not directory.disbelieve("a", key(1), Position(0, 100))
    assert not directory.disbelieve("unheard", key(1), Position(1, 100))
    assert directory.holders(key(1)) == [Holder("a", Tier.DRAM)]


def test_keys_are_bounded_and_the_bound_is_counted() -> None:
    directory = Directory(Limits(most_keys=100))
    told(directory, "a", *(stored(n) for n in range(500)))
    assert len(directory) == 100


def test_nodes_are_bounded_and_those_refused_are_counted() -> None:
    directory = Directory()
    for n in range(MOST_NODES + 3):
        directory.take(Batch(f"n{n}", 1, 0, (Cleared(),)), 0.0)
    assert len(directory.nodes()) == MOST_NODES
    assert directory.counts.refused_nodes == 3


def test_memory_is_measured_in_bytes_a_key() -> None:
    directory = Directory()
    before = directory.memory_bytes
    told(directory, "a", Stored(tuple(chain(1, 20_000)), None, Tier.DRAM))
    assert before < directory.memory_bytes < 500 * 20_000
