"""Replication: short blocks are offered once, by one node, in a bounded number, and to who may."""

from __future__ import annotations

from collections import Counter

from small import batches, chain, key, record, stored

from kvist.cluster.log import EventLog
from kvist.cluster.record import NodeState
from kvist.cluster.replication import Allowance, Offer, Pace, Replicator, Scene
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

    def say(
        self,
        name: str,
        state: NodeState = NodeState.ACTIVE,
        weight: int = 8,
        *,
        full: bool = False,
    ) -> None:
        self.version += 1
        news = record(
            name,
            version=self.version,
            state=state,
            weight=weight,
            domain=self.domains.get(name, ""),
            full=full,
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


# -- where nobody has room ---------------------------------------------------------------------


def nobody_takes(*names: str) -> Cluster:
    """A cluster whose first node has twenty blocks, key(0) the coldest, that nobody takes."""
    cluster = Cluster(*names)
    for name in names:
        cluster.say(name, weight=0)
    cluster.has(names[0], *(stored(n) for n in range(20)))
    assert cluster.offers(names[0]) == []
    return cluster


def test_full_node_is_offered_the_hotter_half_only() -> None:
    cluster = nobody_takes("a", "b")
    cluster.say("b", full=True)
    given = [cluster.offers("a") for _ in range(3)]
    assert offered([o for offers in given for o in offers]).keys() == {
        key(n) for n in range(10, 20)
    }


def test_node_with_room_comes_before_full_ones_and_gets_cold_blocks_too() -> None:
    cluster = nobody_takes("a", "b", "c")
    cluster.say("b", full=True)
    cluster.say("c")
    given = [o for _ in range(3) for o in cluster.offers("a")]
    assert {o.node for o in given} == {"c"}
    assert offered(given).keys() == {key(n) for n in range(20)}


def test_copies_that_nobody_has_room_for_are_made_up_by_full_nodes() -> None:
    cluster = nobody_takes("a", "b", "c")
    for name in ("a", "b", "c"):
        cluster.views[name] = ClusterView(own=name, replicas=3)
    for name in ("a", "b", "c"):
        cluster.say(name, weight=0)
    cluster.say("b", full=True)
    cluster.say("c")
    cluster.replicators["a"].begin_round()
    targets: dict[Key, set[str]] = {}
    for _ in range(4):
        for offer in cluster.offers("a"):
            for k in offer.keys:
                targets.setdefault(k, set()).add(offer.node)
    assert all(targets[key(n)] == {"c"} for n in range(10))
    assert all(targets[key(n)] == {"b", "c"} for n in range(10, 20))


def test_block_that_was_read_is_hot_again() -> None:
    cluster = nobody_takes("a", "b")
    cluster.has("a", stored(0, tier=Tier.SSD), Removed((key(0),), Tier.DRAM), stored(0))
    cluster.say("b", full=True)
    given = [o for _ in range(3) for o in cluster.offers("a")]
    assert key(0) in offered(given)
    assert key(1) not in offered(given)


def test_what_is_found_on_disk_at_the_start_is_no_hotter_than_its_place() -> None:
    cluster = Cluster("a", "b")
    cluster.say("b", full=True)
    cluster.has("a", *(stored(n, tier=Tier.SSD) for n in range(20)))
    given = [o for _ in range(4) for o in cluster.offers("a")]
    assert offered(given).keys() == {key(n) for n in range(10, 20)}


def copied_once_by_exchange() -> Cluster:
    """Block 19 of a got a copy on the full node b, which has dropped it again since."""
    cluster = nobody_takes("a", "b")
    cluster.say("b", full=True)
    assert key(19) in offered([o for _ in range(3) for o in cluster.offers("a")])
    cluster.replicators["b"].expect([key(19)])
    cluster.has("b", stored(19))
    for _ in range(3):
        cluster.offers("a", 3.0)
    cluster.has("b", Removed((key(19),), Tier.DRAM))
    return cluster


def test_copy_that_a_full_node_dropped_is_not_made_again_until_the_block_is_used() -> None:
    cluster = copied_once_by_exchange()
    given = offered([o for now_s in (20.0, 20.1, 20.2) for o in cluster.offers("a", now_s)])
    assert given.keys() == {key(n) for n in range(10, 19)}
    cluster.has("a", stored(19, tier=Tier.SSD), Removed((key(19),), Tier.DRAM), stored(19))
    given = offered([o for now_s in (40.0, 40.1, 40.2) for o in cluster.offers("a", now_s)])
    assert key(19) in given


def test_node_with_room_gets_what_a_full_one_dropped() -> None:
    cluster = copied_once_by_exchange()
    cluster.say("b")
    given = [o for now_s in (20.0, 20.1, 20.2) for o in cluster.offers("a", now_s)]
    assert key(19) in offered(given)


def test_what_came_by_an_offer_is_not_offered_on_to_full_nodes_until_it_is_used() -> None:
    cluster = nobody_takes("a", "b")
    cluster.say("b", full=True)
    cluster.replicators["a"].expect([key(30), key(31)])
    cluster.has("a", stored(30), stored(31))
    cluster.has("a", stored(31, tier=Tier.SSD), Removed((key(31),), Tier.DRAM), stored(31))
    given = offered([o for _ in range(4) for o in cluster.offers("a")])
    assert key(31) in given
    assert key(30) not in given


def test_node_that_drains_offers_everything_to_full_nodes_too() -> None:
    cluster = nobody_takes("a", "b")
    cluster.say("b", full=True)
    cluster.say("a", NodeState.DRAINING, weight=0)
    given = [o for _ in range(3) for o in cluster.offers("a", draining=True)]
    assert offered(given).keys() == {key(n) for n in range(20)}


def test_node_yields_its_coldest_blocks_as_far_as_others_hold_them() -> None:
    cluster = nobody_takes("a", "b", "c")
    yields = []
    for n in (None, 0, 1):  # an eighth of twenty blocks are those from 0 to 2
        if n is not None:
            cluster.has("b", stored(n))
        cluster.replicators["a"].begin_round()
        for _ in range(2):
            cluster.offers("a")
        yields.append(cluster.replicators["a"].yielding)
    assert yields == [0.0, 0.0, 2 / 3]


def test_copies_in_the_own_domain_are_no_reason_to_yield() -> None:
    cluster = Cluster("a", "b", domains={"a": "r", "b": "r"})
    for name in ("a", "b"):
        cluster.has(name, *(stored(n) for n in range(16)))
    for _ in range(3):
        cluster.offers("a")
    assert cluster.replicators["a"].yielding == 0.0


def test_allowance_is_a_part_of_the_capacity_each_minute() -> None:
    allowance = Allowance(Pace(), 0.0)
    assert allowance.take(100, 1, 640, 0.0) == 10
    assert allowance.take(100, 1, 640, 0.0) == 0
    assert allowance.take(100, 1, 640, 30.0) == 5
    assert allowance.take(3, 1, 640, 1000.0) == 3
    assert allowance.take(100, 1, 640, 1000.0) == 7  # what is not taken does not add up
    assert Allowance(Pace(), 0.0).take(5, 100, 640, 0.0) == 1  # a small node takes one now and then
