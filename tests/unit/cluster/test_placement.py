"""Placement: a prefix stays together, domains differ, and only what must move moves."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import chain, key, record

from kvist.cluster.placement import (
    FULL_WEIGHT_BYTES,
    Placement,
    first_of,
    group_keys,
    own_weight,
)
from kvist.cluster.record import NodeRecord

GROUPS = [key(n) for n in range(60)]


@st.composite
def clusters(draw: st.DrawFn) -> list[NodeRecord]:
    count = draw(st.integers(2, 12))
    racks = draw(st.integers(1, 12))
    return [
        record(
            f"n{n}",
            weight=draw(st.sampled_from((1, 8, 64, 1024))),
            domain=f"rack{draw(st.integers(0, racks))}",
        )
        for n in range(count)
    ]


def placed(nodes: list[NodeRecord], replicas: int) -> dict[bytes, set[str]]:
    placement = Placement(nodes, replicas=replicas)
    return {group: set(placement.places(group)) for group in GROUPS}


@given(clusters(), st.integers(1, 4), st.data())
def test_only_what_must_move_moves(
    nodes: list[NodeRecord], replicas: int, data: st.DataObject
) -> None:
    """Read backwards it is a join: a newcomer takes from others, who swap nothing among them."""
    gone = data.draw(st.sampled_from(nodes))
    before = placed(nodes, replicas)
    after = placed([n for n in nodes if n is not gone], replicas)
    for group in GROUPS:
        assert before[group] - after[group] <= {gone.node}
        if gone.node not in before[group]:
            assert before[group] == after[group]


@given(clusters(), st.data())
def test_weight_that_grows_only_draws_groups_to_it(
    nodes: list[NodeRecord], data: st.DataObject
) -> None:
    grown = data.draw(st.integers(0, len(nodes) - 1))
    more = list(nodes)
    more[grown] = record(
        nodes[grown].node, weight=nodes[grown].weight * 4, domain=nodes[grown].domain
    )
    before, after = placed(nodes, 1), placed(more, 1)
    for group in GROUPS:
        assert after[group] - before[group] <= {nodes[grown].node}


@given(clusters(), st.integers(1, 4))
def test_replicas_are_in_distinct_domains_and_as_many_as_there_can_be(
    nodes: list[NodeRecord], replicas: int
) -> None:
    domains = {n.node: n.failure_domain for n in nodes}
    for places in placed(nodes, replicas).values():
        assert len({domains[node] for node in places}) == len(places)
        assert len(places) == min(replicas, len(set(domains.values())))


def test_order_in_which_nodes_are_known_does_not_matter() -> None:
    nodes = [record(f"n{n}", weight=1 + n) for n in range(9)]
    assert placed(nodes, 3) == placed(nodes[::-1], 3)


def test_share_of_groups_follows_the_weight() -> None:
    nodes = [record("a", weight=10), record("b", weight=30), record("c", weight=60)]
    placement = Placement(nodes, replicas=1)
    counts = Counter(placement.places(key(n))[0] for n in range(6000))
    shares = {node: count / 6000 for node, count in counts.items()}
    assert shares == pytest.approx({"a": 0.1, "b": 0.3, "c": 0.6}, abs=0.03)


def test_nodes_without_weight_get_nothing() -> None:
    placement = Placement([record("a", weight=0), record("b")], replicas=2)
    assert placement.places(key(1)) == ["b"]


def test_further_places_leave_out_domains_that_have_a_copy() -> None:
    nodes = [record(f"n{n}", domain=f"rack{n % 3}") for n in range(9)]
    placement = Placement(nodes, replicas=3)
    for group in GROUPS:
        assert placement.further(group, {"rack0", "rack1", "rack2"}) == []
        (node,) = placement.further(group, {"rack0", "rack1"})
        assert int(node[1:]) % 3 == 2
        (other,) = placement.further(group, {"rack0", "rack1"}, without=frozenset([node]))
        assert other != node
        assert int(other[1:]) % 3 == 2


def test_prefix_is_cut_once_and_what_follows_stays_together() -> None:
    keys = chain(1, 10)
    assert group_keys(keys, 4) == [keys[0]] * 4 + [keys[3]] * 6
    assert group_keys(keys[:3], 4) == [keys[0]] * 3
    assert group_keys(keys, 1) == [keys[0]] * 10
    assert group_keys([], 4) == []
    with pytest.raises(ValueError, match="at least 1"):
        group_keys(keys, 0)


def test_everybody_names_the_same_one_of_several_nodes() -> None:
    names = [f"n{n}" for n in range(8)]
    chosen = [first_of(group, names) for group in GROUPS]
    assert chosen == [first_of(group, names[::-1]) for group in GROUPS]
    assert len(set(chosen)) > 4
    assert first_of(key(1), []) is None


def test_newcomer_grows_into_its_weight_by_steps() -> None:
    free = 100 * FULL_WEIGHT_BYTES
    grown = [own_weight(free, age_s=t / 10, slow_start_s=8.0) for t in range(100)]
    assert grown[0] == 64
    assert grown[-1] == 8 * 64
    assert grown == sorted(grown)
    assert len(set(grown)) == 8


def test_weight_changes_seldom_with_free_space() -> None:
    weights = [own_weight(n * FULL_WEIGHT_BYTES, age_s=9, slow_start_s=1) for n in range(1000)]
    assert weights[0] == 0
    assert len(set(weights)) == 11


def test_replicas_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Placement([], replicas=0)
