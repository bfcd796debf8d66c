"""What replicas have of a prefix: tiers, nodes beside engines, predictions, losses, bounds."""

from __future__ import annotations

import random

import pytest
from publishers import FINGERPRINT, WIDTH, Engine, Lives, Node, new_index, prompt

from kvist.cluster.directory import Limits
from kvist.cluster.follower import Ask
from kvist.cluster.record import NodeRecord, NodeState
from kvist.cluster.view import ClusterView
from kvist.core.events import Cleared, Removed, Stored
from kvist.core.keys import RequestScope, seed_bytes
from kvist.core.outcome import Tier
from kvist.metrics import BY_NAME
from kvist.native import chain_keys, digest
from kvist.router.index import Prefix, PrefixIndex

TOKENS = prompt(1, 6)


def keys_of(tokens: list[int]) -> list[bytes]:
    seed = digest(seed_bytes(FINGERPRINT, RequestScope()))
    return chain_keys(seed, tokens, WIDTH)


KEYS = keys_of(TOKENS)


def stored(keys: list[bytes], tier: Tier) -> Stored:
    return Stored(tuple(keys), None, tier)


def test_keys_are_those_that_connectors_give() -> None:
    assert new_index().keys([*TOKENS, 1]) == KEYS


def test_each_tier_counts_what_is_faster_too() -> None:
    index, node = new_index(), Node("n")
    index.attach("r", engine="n")
    tiers = (Tier.HBM, Tier.DRAM, Tier.DRAM, Tier.SSD, Tier.HBM, Tier.REMOTE)
    index.take(node.says(*(stored([k], t) for k, t in zip(KEYS, tiers, strict=True))), 0.0)
    assert index.match(KEYS) == {"r": Prefix(1, 3, 5, 6)}


def test_replica_sees_its_engine_and_its_node_together() -> None:
    index, engine, node = new_index(), Engine("e1"), Node("n")
    index.attach("one", engine="e1", node="n")
    index.attach("two", engine="e2", node="n")
    index.attach("far")
    index.take(
        engine.says(engine.stored(TOKENS, last=2), engine.stored(TOKENS, first=2, last=3)), 0.0
    )
    index.take(node.says(stored(KEYS[2:5], Tier.DRAM), stored(KEYS[5:], Tier.PEER)), 0.0)
    assert index.match(KEYS) == {"one": Prefix(3, 5, 5, 6)}
    index.take(node.says(stored(KEYS[:2], Tier.SSD)), 0.0)
    assert index.match(KEYS) == {"one": Prefix(3, 5, 5, 6), "two": Prefix(0, 0, 5, 6)}


def test_replica_that_is_detached_has_nothing_and_its_node_stays() -> None:
    index, engine, node = new_index(), Engine("one"), Node("n")
    index.attach("one", node="n")
    index.attach("two", node="n")
    index.take(engine.says(engine.stored(TOKENS)), 0.0)
    index.take(node.says(stored(KEYS[:2], Tier.DRAM)), 0.0)
    index.detach("one")
    index.detach("unknown")
    assert index.match(KEYS) == {"two": Prefix(0, 2, 2, 2)}
    assert len(index) == 2


def test_many_requests_are_answered_as_one_by_one() -> None:
    index, engine = new_index(), Engine("e")
    index.attach("e")
    index.take(engine.says(engine.stored(TOKENS, last=4)), 0.0)
    requests = [KEYS, KEYS[:3], keys_of(prompt(9, 4)), []]
    assert index.match_many(requests) == [index.match(keys) for keys in requests]
    assert index.match_many(requests)[0] == {"e": Prefix(4, 4, 4, 4)}


def test_prediction_covers_the_time_before_the_first_event() -> None:
    index, engine = new_index(), Engine("e")
    index.attach("e")
    index.take(engine.says(), 0.0)
    index.predict("e", KEYS, 0.0)
    assert index.match(KEYS) == {"e": Prefix(6, 6, 6, 6)}
    index.take(engine.says(engine.stored(TOKENS, last=4)), 1.0)
    index.asks(100.0)
    assert index.match(KEYS) == {"e": Prefix(4, 4, 4, 4)}


@pytest.mark.parametrize("seed", range(10))
def test_prediction_lives_for_its_life_and_at_most_twice_that(seed: int) -> None:
    rng, index, engine = random.Random(seed), new_index(lives=Lives(5.0, 50.0)), Engine("heard")
    life_of = {"heard": 5.0, "silent": 50.0}
    for replica in life_of:
        index.attach(replica)
    index.take(engine.says(), 0.0)
    told: list[tuple[str, bytes, float]] = []
    now_s = 0.0
    for n in range(200):
        replica, key = rng.choice(list(life_of)), digest(b"%d" % n)
        now_s += rng.choice((0.1, 1.0, 4.0, 30.0))
        index.predict(replica, [key], now_s)
        told.append((replica, key, now_s))
        for who, old, then_s in told:
            held = who in index.match([old])
            age_s, life_s = now_s - then_s, life_of[who]
            assert held if age_s < life_s else not held or age_s < 2 * (life_s + 30.0)


def test_predictions_end_by_the_clock_without_new_ones() -> None:
    index = new_index(lives=Lives(5.0, 50.0))
    index.attach("silent")
    index.predict("silent", KEYS, 0.0)
    index.asks(49.0)
    assert index.match(KEYS) == {"silent": Prefix(6, 6, 6, 6)}
    index.asks(60.0)
    index.asks(111.0)
    assert index.match(KEYS) == {}
    assert len(index) == 0


def test_removal_ends_a_prediction_of_the_same_block() -> None:
    index, engine = new_index(), Engine("e")
    index.attach("e")
    index.take(engine.says(engine.stored(TOKENS)), 0.0)
    index.predict("e", KEYS, 0.0)
    index.take(engine.says(engine.removed(engine.hashes(TOKENS)[3:])), 0.1)
    assert index.match(KEYS) == {"e": Prefix(3, 3, 3, 3)}


def test_prediction_for_an_unknown_replica_is_ignored() -> None:
    index = new_index()
    index.predict("nobody", KEYS, 0.0)
    assert (len(index), index.match(KEYS)) == (0, {})


def test_predicted_blocks_are_nobodys_to_fetch() -> None:
    """A prediction is no tier: whoever asks the directory for a holder is not sent there."""
    index = new_index()
    index.attach("r")
    index.predict("r", KEYS, 0.0)
    assert index.holders(KEYS[0]) == []
    assert index.fetchable(KEYS[0]) == []
    assert index.reach(KEYS) == {}
    assert dict(index.contents())[KEYS[0][:16]] == {}


def test_lost_messages_are_asked_for_and_nothing_is_lost() -> None:
    index, node = new_index(), Node("n")
    index.attach("r", engine="n")
    said = [node.says(stored([key], Tier.DRAM)) for key in KEYS]
    for batch in (said[0], said[3], said[4]):
        index.take(batch, 0.0)
    assert index.match(KEYS) == {"r": Prefix(0, 1, 1, 1)}
    assert index.asks(1.0) == [Ask("n", 1, 1)]
    for batch in node.since(1):
        index.take(batch, 1.0)
    assert index.match(KEYS) == {"r": Prefix(0, 6, 6, 6)}
    assert (index.gaps, index.complete) == (1, True)


def test_dump_stands_for_what_cannot_be_replayed() -> None:
    index, node = new_index(), Node("n", most_batches=1)
    index.attach("r", engine="n")
    node.says(stored(KEYS, Tier.SSD), Removed((KEYS[5],), Tier.SSD))
    late = node.says(stored(KEYS[:1], Tier.DRAM))
    index.take(late, 0.0)
    assert index.match(KEYS) == {}
    for batch in node.since(0):
        index.take(batch, 0.0)
    assert index.match(KEYS) == {"r": Prefix(0, 1, 5, 5)}


def test_lost_message_of_a_stock_engine_costs_what_hangs_on_it() -> None:
    """It cannot dump: what is known begins at the oldest message that it still has."""
    index, engine = new_index(), Engine("e")
    index.attach("e")
    index.take(engine.says(engine.stored(TOKENS, last=2)), 0.0)
    engine.says(engine.stored(TOKENS, first=2, last=3))
    index.take(engine.says(engine.stored(TOKENS, first=3), engine.stored(prompt(2, 3))), 0.0)
    assert index.match(KEYS) == {"e": Prefix(2, 2, 2, 2)}
    (ask,) = index.asks(1.0)
    assert ask == Ask("e", 0, 1)
    index.answered("e", 1.0)
    assert index.match(KEYS) == {}
    assert index.match(keys_of(prompt(2, 3))) == {"e": Prefix(3, 3, 3, 3)}
    assert index.feed.counts.orphans == 3


def test_cleared_node_leaves_its_replicas_with_their_engines() -> None:
    index, engine, node = new_index(), Engine("r"), Node("n")
    index.attach("r", node="n")
    index.take(engine.says(engine.stored(TOKENS, last=1)), 0.0)
    index.take(node.says(stored(KEYS, Tier.DRAM)), 0.0)
    assert index.match(KEYS) == {"r": Prefix(1, 6, 6, 6)}
    index.take(node.says(Cleared()), 0.0)
    assert index.match(KEYS) == {"r": Prefix(1, 1, 1, 1)}


def test_number_of_a_publisher_that_is_gone_serves_another() -> None:
    index, old, new = new_index(), Engine("old"), Engine("new")
    index.attach("old")
    index.take(old.says(old.stored(TOKENS)), 0.0)
    index.drop("old")
    assert index.match(KEYS) == {}
    index.attach("new")
    index.take(new.says(new.stored(TOKENS, last=2)), 0.0)
    assert index.match(KEYS) == {"new": Prefix(2, 2, 2, 2)}


def test_keys_never_exceed_the_bound_and_evictions_are_counted() -> None:
    index, engine = new_index(limits=Limits(most_keys=100)), Engine("e")
    index.attach("e")
    for who in range(50):
        index.take(engine.says(engine.stored(prompt(who, 10))), 0.0)
        index.predict("e", keys_of(prompt(100 + who, 10)), 0.0)
        assert len(index) <= 100
    figures = index.measures()
    assert figures["kvist_router_index_evicted_total"] == 900
    assert figures["kvist_router_index_predicted_total"] == 500


def test_index_is_the_directory_of_a_cluster_view() -> None:
    index = new_index()
    view = ClusterView(directory=index)
    index.attach("r", engine="e", node="n")
    node = Node("n", incarnation=5)
    record = NodeRecord("n", incarnation=5, version=1, state=NodeState.ACTIVE)
    view.meet(record, 0.0)
    view.hear(node.says(stored(KEYS, Tier.SSD)), 0.0)
    assert index.match(KEYS) == {"r": Prefix(0, 0, 6, 6)}
    view.tick(1000.0)
    view.tick(2000.0)
    assert index.match(KEYS) == {}


def test_every_figure_is_a_declared_metric() -> None:
    index: PrefixIndex = new_index()
    assert {name.split(".")[0] for name in index.measures()} <= set(BY_NAME)
