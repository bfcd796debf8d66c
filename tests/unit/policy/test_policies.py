"""Eviction orders against plain oracles, and what each order promises beyond the suite."""

import random

import pytest

from kvist.policy import LeafLru, Lru
from kvist.policy.protocol import NullPolicy
from kvist.testing.policy_suite import key


def test_lru_evicts_in_order_of_last_use() -> None:
    policy = Lru()
    for n in range(4):
        policy.insert(key(n), None)
    policy.touch(key(0))
    policy.insert(key(1), None)
    assert list(policy.victims()) == [key(2), key(3), key(0), key(1)]


@pytest.mark.parametrize("seed", range(3))
def test_lru_equals_a_sorted_list(seed: int) -> None:
    rng = random.Random(seed)
    policy = Lru()
    oracle: list[bytes] = []
    for _ in range(2000):
        k = key(rng.randrange(40))
        action = rng.randrange(3)
        if action == 0:
            policy.insert(k, None)
        elif action == 1:
            policy.touch(k)
        else:
            policy.remove(k)
        if k in oracle:
            oracle.remove(k)
            if action != 2:
                oracle.append(k)
        elif action == 0:
            oracle.append(k)
        assert list(policy.victims()) == oracle


def test_leaf_lru_evicts_children_before_parents() -> None:
    policy = LeafLru()
    for n in range(5):
        policy.insert(key(n), key(n - 1) if n else None)
    assert list(policy.victims()) == [key(n) for n in (4, 3, 2, 1, 0)]


def test_leaf_lru_evicts_the_coldest_branch_first() -> None:
    policy = LeafLru()
    policy.insert(key(0), None)
    policy.insert(key(1), key(0))
    policy.insert(key(2), key(0))
    policy.insert(key(3), key(1))
    policy.touch(key(2))
    policy.touch(key(3))
    policy.touch(key(2))
    order = []
    for victim in policy.victims():
        order.append(victim)
        policy.remove(victim)
    assert order == [key(3), key(1), key(2), key(0)]


def test_leaf_lru_offers_the_parent_of_a_skipped_child_last() -> None:
    policy = LeafLru()
    policy.insert(key(0), None)
    policy.insert(key(1), key(0))
    policy.insert(key(2), None)
    assert list(policy.victims()) == [key(1), key(2), key(0)]


def test_leaf_lru_keeps_an_inner_block_that_regains_a_child() -> None:
    policy = LeafLru()
    policy.insert(key(0), None)
    policy.insert(key(1), key(0))
    policy.remove(key(1))
    policy.insert(key(2), key(0))
    assert next(policy.victims()) == key(2)


def test_leaf_lru_counts_children_that_came_before_their_parent() -> None:
    policy = LeafLru()
    policy.insert(key(1), key(0))
    policy.insert(key(0), None)
    assert list(policy.victims()) == [key(1), key(0)]


def test_leaf_lru_survives_a_block_that_names_itself_as_parent() -> None:
    policy = LeafLru()
    policy.insert(key(0), key(0))
    assert list(policy.victims()) == [key(0)]


@pytest.mark.parametrize("seed", range(3))
def test_leaf_lru_equals_a_search_for_the_coldest_leaf(seed: int) -> None:
    rng = random.Random(seed)
    policy = LeafLru()
    parents: dict[bytes, bytes | None] = {}
    used: dict[bytes, int] = {}
    for now in range(3000):
        n = rng.randrange(50)
        action = rng.randrange(5)
        if action <= 1:
            policy.insert(key(n), key(n // 2) if n else None)
            parents.setdefault(key(n), key(n // 2) if n else None)
            used[key(n)] = now
        elif action == 2:
            policy.touch(key(n))
            if key(n) in used:
                used[key(n)] = now
        else:
            victim = next(policy.victims(), None)
            inner = set(parents.values())
            leaves = [k for k in parents if k not in inner]
            assert victim == min(leaves, key=used.__getitem__, default=None)
            if victim is not None and action == 3:
                policy.remove(victim)
                del parents[victim], used[victim]


def test_leaf_lru_does_not_collect_entries_of_removed_blocks() -> None:
    policy = LeafLru()
    for n in range(5000):
        policy.insert(key(n), None)
        policy.remove(key(n))
    assert len(policy._heap) < 200


def test_the_null_policy_never_has_a_victim() -> None:
    policy = NullPolicy()
    policy.insert(key(0), None)
    policy.touch(key(0))
    policy.remove(key(0))
    assert list(policy.victims()) == []
    assert len(policy) == 0
