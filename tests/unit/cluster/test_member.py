"""A member: it joins, publishes, drains, leaves, and two of them learn of each other."""

from __future__ import annotations

from small import key, received, record, stored

from kvist.cluster.directory import Holder
from kvist.cluster.follower import Ask
from kvist.cluster.measures import measures
from kvist.cluster.member import Member, Outbox, Settings, Space
from kvist.cluster.membership import Timings
from kvist.cluster.record import NodeState, TierSpace
from kvist.cluster.view import ClusterView
from kvist.core.outcome import Tier
from kvist.metrics import BY_NAME

SETTINGS = Settings(slow_start_s=0.0, join_s=5.0, timings=Timings(beat_s=1.0))
ROOM = Space(1 << 30)


def member(name: str) -> Member:
    return Member(record(name), SETTINGS, 0.0, view=ClusterView(own=name))


def deliver(source: Member, out: Outbox, target: Member, now_s: float) -> None:
    for sealed in out.batches:
        target.hear(received(sealed, source.own.node, source.own.incarnation), now_s)


def met() -> tuple[Member, Member]:
    """Two active members that know each other."""
    a, b = member("a"), member("b")
    for one in (a, b):
        one.discovered([], 0.0)
    for now_s in (0.0, 1.1):
        for one, other in ((a, b), (b, a)):
            deliver(one, one.tick(now_s, now_s, ROOM), other, now_s)
    return a, b


def test_member_is_joining_until_it_has_caught_up() -> None:
    late = member("late")
    assert late.tick(0.0, 0.0, ROOM).batches
    assert late.own.state is NodeState.JOINING
    late.discovered([record("a")], 0.5)
    late.tick(1.0, 0.0, ROOM)
    assert late.own.state is NodeState.JOINING
    assert late.own.weight == 0
    a = member("a")
    deliver(a, a.tick(1.0, 0.0, ROOM), late, 1.5)
    late.tick(2.0, 0.0, ROOM)
    assert late.own.state is NodeState.ACTIVE
    assert late.own.weight > 0


def test_member_does_not_wait_for_ever_for_a_silent_one() -> None:
    late = member("late")
    late.discovered([record("dead")], 0.0)
    late.tick(4.9, 0.0, ROOM)
    assert late.own.state is NodeState.JOINING
    late.tick(5.0, 0.0, ROOM)
    assert late.own.state is NodeState.ACTIVE


def test_what_one_stores_the_other_knows() -> None:
    a, b = met()
    a.record(stored(1, tier=Tier.SSD))
    deliver(a, a.tick(1.2, 0.0, ROOM), b, 1.2)
    assert b.view.directory.holders(key(1)) == [Holder("a", Tier.SSD)]
    assert b.view.readers_choice(key(1)) == ["a"]


def test_record_is_sent_each_beat_and_batches_only_if_there_is_something() -> None:
    a, _ = met()
    assert a.tick(1.5, 0.0, ROOM).batches == []
    a.record(stored(1))
    (plain,) = a.tick(1.6, 0.0, ROOM).batches
    assert received(plain).record is None
    (beat,) = a.tick(2.2, 0.0, ROOM).batches
    assert received(beat).record == a.own


def test_lost_batch_is_asked_for_and_answered() -> None:
    a, b = met()
    a.record(stored(1))
    a.tick(1.2, 0.0, ROOM)
    deliver(a, a.tick(2.3, 0.0, ROOM), b, 2.3)
    (ask,) = b.tick(2.5, 0.0, ROOM).asks
    for sealed in a.answer(ask, 0.0):
        b.hear(received(sealed), 2.6)
    assert b.view.directory.holders(key(1)) == [Holder("a", Tier.DRAM)]
    assert b.view.complete


def test_ask_to_another_start_is_not_answered() -> None:
    a, _ = met()
    assert a.answer(Ask("a", 7, 0), 0.0) == []
    assert a.answer(Ask("b", 1, 0), 0.0) == []
    assert a.answer(Ask("a", 0, 0), 0.0)


def test_draining_member_offers_its_blocks_and_says_when_it_is_done() -> None:
    a, b = met()
    a.record(stored(1))
    deliver(a, a.tick(1.2, 0.0, ROOM), b, 1.2)
    a.drain()
    assert not a.drained
    out = a.tick(1.3, 0.0, ROOM)
    deliver(a, out, b, 1.3)
    assert not a.drained
    b.record(stored(1))
    deliver(b, b.tick(1.4, 0.0, ROOM), a, 1.4)
    for now_s in (1.5, 1.6, 1.7):
        a.tick(now_s, 0.0, ROOM)
    assert a.drained
    assert [r.node for r in b.view.membership.takers()] == ["b"]


def test_member_that_leaves_is_gone_at_once_with_all_its_blocks() -> None:
    a, b = met()
    a.record(stored(1))
    deliver(a, a.tick(1.2, 0.0, ROOM), b, 1.2)
    b.hear(received(a.leave(1.3, 0.0)), 1.3)
    assert "a" not in b.view.membership
    assert b.view.directory.holders(key(1)) == []


def test_silent_member_is_read_last_and_then_not_at_all() -> None:
    a, b = met()
    for one in (a, b):
        one.record(stored(1))
    c = ClusterView(own="c", timings=SETTINGS.timings)
    for one in (a, b):
        earlier = one.answer(Ask(one.own.node, 1, 0), 0.0)
        for sealed in [*earlier, *one.tick(1.2, 0.0, ROOM).batches]:
            c.hear(received(sealed, one.own.node), 1.2)
    assert c.readers_choice(key(1)) == ["a", "b"]
    c.tick(4.0)
    for sealed in b.tick(4.0, 0.0, ROOM).batches:
        c.hear(received(sealed, "b"), 4.0)
    c.tick(5.5)
    assert c.readers_choice(key(1)) == ["b", "a"]
    c.tick(12.0)
    assert c.readers_choice(key(1)) == ["b"]


def test_flood_of_events_is_sealed_before_the_next_tick() -> None:
    a, _ = met()
    for n in range(5000):
        a.record(stored(n))
    assert a.log.pending < 4096
    assert len(a.tick(1.2, 0.0, ROOM).batches) == 2


def test_stranger_without_a_record_is_not_followed() -> None:
    a, b = met()
    a.record(stored(1))
    (plain,) = a.tick(1.2, 0.0, ROOM).batches
    c = ClusterView(own="c")
    c.hear(received(plain), 1.2)
    assert c.directory.holders(key(1)) == []
    assert c.strangers == 1
    assert b.view.strangers == 0


def test_figures_have_names_that_are_declared() -> None:
    a, b = met()
    a.record(stored(1))
    deliver(a, a.tick(1.2, 0.0, ROOM), b, 1.2)
    figures = measures(b)
    assert {name.split(".")[0] for name in figures} <= set(BY_NAME)
    assert figures["kvist_directory_blocks"] == 1
    assert figures["kvist_cluster_nodes.active"] == 2
    assert figures["kvist_event_batches_total"] == 3


def test_full_member_offers_what_others_hold_of_its_coldest_blocks() -> None:
    a, b = met()
    full = Space(0, (TierSpace("ssd", 1 << 30, 1 << 30),))
    for n in range(16):
        a.record(stored(n))
    for now_s in (3.0, 4.1, 5.2):
        a.tick(now_s, 0.0, full)
    assert (a.own.full, a.own.weight, a.own.free_bytes) == (True, 0, 0)
    for n in range(16):
        b.record(stored(n))
    deliver(b, b.tick(6.0, 0.0, ROOM), a, 6.0)
    for now_s in (6.3, 7.4, 8.5):
        a.tick(now_s, 0.0, full)
    assert (a.own.free_bytes, a.own.weight > 0) == (1 << 27, True)
    assert (
        a.accepts([key(n) for n in range(100)], 1 << 20, 9.0) == 16
    )  # a part of its capacity, whatever it offers
    a.tick(10.0, 0.0, Space(0, full.tiers, takes=False))
    assert (a.own.free_bytes, a.own.weight) == (0, 0)


def test_member_with_room_accepts_all_and_one_that_drains_nothing() -> None:
    a, _ = met()
    many = [key(n) for n in range(1000)]
    roomy = Space(1 << 30, (TierSpace("ssd", 0, 1 << 30), TierSpace("dram", 1 << 20, 1 << 20)))
    a.tick(3.0, 0.0, roomy)
    assert (a.own.full, a.accepts(many, 1 << 20, 3.0)) == (False, 1000)
    a.drain()
    assert a.accepts(many, 1 << 20, 3.0) == 0
