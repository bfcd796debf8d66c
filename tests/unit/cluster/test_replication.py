"""Replication: short blocks are offered once, by one node, in a bounded number, and to who may."""

from __future__ import annotations

from collections import Counter

from small import batches, chain, key, record, stored

from kvist.cluster.log import EventLog
from kvist.cluster.record import NodeState
from kvist.cluster.replication import Offer, Pace, Replicator, Scene
from kvist.cluster.view import ClusterView
from kvist.core.events import Cleared, Removed, Stored
from kvist.core.keys import Key
from kvist.core.outcome import Tier

PACE = Pace(looks=100, offers=10, fetch_s=2.0, again_s=10.0)
TIERS = (Tier.DRAM, Tier.SSD)


class Cluster:
    """Views and replicators of nodes that know everything of each other."""

    def __init__(self, *names: str, replicas: int = 2, domains: dict[str, str] | None = None):
        self.domains = domains or {}
        self.views = {name: ClusterView(own=name, replicas=replicas) for name in names}
        self.logs = {name: EventLog(block_tokens=16) for name in names}
        self.replicators = {
            name: Replicator(name, self.domains.get(name, name), group_blocks=4, pace=PACE)
            for name in names
        }
        self.version = 0
        for name in names:
            self.say(name)
            self.has(name)

    def say(self, name: str, state: NodeState = NodeState.ACTIVE, weight: int = 8) -> None:
        self.version += 1
        news = record(
            name,
            version=self.version,
            state=state,
            weight=weight,
            domain=self.domains.get(name, ""),
        )
        for view in self.views.values():
            view.meet(news, 0.0)

    def has(self, name: str, *events: Stored | Removed | Cleared) -> None:
        for event in events:
            self.replicators[name].take(event)
        for batch in batches(self.logs[name], [list(events)], node=name):
            for view in self.views.values():
                view.hear(batch, 0.0)

    def offers(self, name: str, now_s: float = 0.0, *, draining: bool = False) -> list[Offer]:
        view = self.views[name]
        scene = Scene(view.directory, view.membership, view.placement)
        return self.replicators[name].tick(now_s, scene, draining=draining)

    def all_offers(self, now_s: float = 0.0) -> list[Offer]:
        return [offer for name in self.views for offer in self.offers(name, now_s)]


def offered(offers: list[Offer]) -> Counter[Key]:
    return Counter(key for offer in offers for key in offer.keys)


def test_block_with_one_copy_is_offered_to_the_place_of_its_group() -> None:
    cluster = Cluster("a", "b", "c", "d")
    keys = chain(1, 9)
    cluster.has("a", Stored(tuple(keys), None, Tier.DRAM))
    offers = cluster.offers("a")
    placement = cluster.views["a"].placement
    for offer in offers:
        assert offer.source == "a"
        for k in offer.keys:
            group = keys[0] if keys.index(k) < 4 else keys[3]
            best = next(n for n, _ in placement.rank(group) if n != "a")
            assert offer.node == best
    assert offered(offers) == Counter(keys)


def test_enough_copies_anywhere_are_left_alone() -> None:
    """Copies that readers fetched and kept count, wherever they are."""
    cluster = Cluster("a", "b", "c")
    cluster.has("a", stored(1))
    cluster.has("c", stored(1, tier=Tier.SSD))
    assert cluster.all_offers() == []


def test_one_of_several_holders_makes_the_offer() -> None:
    cluster = Cluster("a", "b", "c", "d", replicas=3)
    for name in ("a", "b"):
        cluster.has(name, stored(*range(30)))
    assert offered(cluster.all_offers()).total() <= 30
    assert max(offered(cluster.all_offers()).values(), default=0) <= 1


def test_copies_in_one_domain_are_one_copy() -> None:
    racks = {"a": "r1", "b": "r1", "c": "r2"}
    cluster = Cluster("a", "b", "c", domains=racks)
    cluster.has("a", stored(1))
    cluster.has("b", stored(1))
    assert [o.node for o in cluster.all_offers()] == ["c"]


def test_without_another_domain_there_are_fewer_copies_and_no_offers() -> None:
    cluster = Cluster("a", "b", domains={"a": "r1", "b": "r1"})
    cluster.has("a", stored(1))
    assert cluster.all_offers() == []


def test_offer_is_not_repeated_while_it_may_be_under_way() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.has("a", stored(1))
    assert len(cluster.offers("a", 0.0)) == 1
    assert cluster.offers("a", 0.5) == []
    assert cluster.offers("a", 1.0) == []


def test_who_did_not_take_an_offer_is_left_alone_for_a_while() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.has("a", stored(1))
    (first,) = cluster.offers("a", 0.0)
    (second,) = cluster.offers("a", 2.5)
    assert second.node != first.node
    assert cluster.offers("a", 5.0) == []
    assert [o.node for o in cluster.offers("a", 10.5)] == [first.node]


def test_copy_that_was_evicted_elsewhere_is_noticed() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.has("a", stored(1))
    cluster.has("b", stored(1))
    assert cluster.all_offers() == []
    cluster.has("b", Removed((key(1),), Tier.DRAM))
    assert len(cluster.all_offers()) == 1


def test_work_of_one_tick_is_bounded() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.has("a", stored(*range(50)))
    per_tick = [offered(cluster.offers("a", 0.0)).total() for _ in range(7)]
    assert max(per_tick) <= PACE.offers
    assert sum(per_tick) == 50


def test_draining_node_gives_away_what_only_it_has_of_every_tier() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.has("a", stored(1), stored(2, tier=Tier.SSD), stored(3))
    cluster.has("b", stored(3))
    cluster.has("c", stored(3))
    cluster.say("a", NodeState.DRAINING)
    assert offered(cluster.offers("a", draining=True)).keys() == {key(1), key(2)}
    assert cluster.replicators["a"].alone is None
    cluster.has("b", stored(1), stored(2))
    cluster.replicators["a"].begin_round()
    cluster.offers("a", draining=True)
    assert cluster.replicators["a"].alone == 0


def test_draining_node_gets_nothing_and_its_copy_does_not_count() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.say("b", NodeState.DRAINING)
    cluster.has("a", stored(1))
    cluster.has("b", stored(1))
    assert [(o.source, o.node) for o in cluster.all_offers()] == [("a", "c")]


def test_blocks_that_are_here_no_more_are_not_offered() -> None:
    cluster = Cluster("a", "b")
    cluster.has("a", stored(1), stored(2), stored(1, tier=Tier.SSD))
    cluster.has("a", Removed((key(1), key(2)), Tier.DRAM))
    assert offered(cluster.offers("a")).keys() == {key(1)}
    cluster.has("a", stored(5), Cleared())
    assert cluster.offers("a", 20.0) == []


def test_blocks_in_hbm_are_no_copies_for_others() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.has("a", stored(1))
    cluster.has("b", stored(1, tier=Tier.HBM))
    assert len(cluster.offers("a")) == 1
    assert cluster.offers("b") == []
