"""The value policy: learning, leaves, ghosts; and the filters that stand beside it."""

import random

from kvist.core.hints import Hints
from kvist.policy import AdmitAll, ByValue, SecondSight, Value
from kvist.policy.hazard import AGES, HazardTable, age_bucket
from kvist.policy.weights import Weigh, weight_bucket, weight_of
from kvist.testing.policy_suite import key


class _Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_value_evicts_the_oldest_leaf_while_it_knows_nothing() -> None:
    clock = _Clock()
    policy = Value(clock)
    for n in range(4):
        clock.now_s = float(n)
        policy.insert(key(n), None)
    assert list(policy.victims()) == [key(n) for n in range(4)]


def test_value_evicts_children_before_parents() -> None:
    policy = Value(_Clock())
    for n in range(5):
        policy.insert(key(n), key(n - 1) if n else None)
    assert list(policy.victims()) == [key(n) for n in (4, 3, 2, 1, 0)]


def _taught(clock: _Clock, weigh: Weigh | None = None) -> Value:
    """A policy that saw: blocks 0..9 come back every minute, all others never."""
    policy = Value(clock, weigh=weigh)
    for minute in range(220):
        clock.now_s = 60.0 * minute
        policy.begin(Hints())
        for n in range(10):
            policy.insert(key(n), None)
        for n in range(10):
            policy.insert(key(1000 + 10 * minute + n), None)
    return policy


def test_value_prefers_what_came_back_to_what_never_did() -> None:
    clock = _Clock()
    policy = _taught(clock)
    order = list(policy.victims())
    assert set(order[-10:]) == {key(n) for n in range(10)}


def test_value_evicts_what_is_cheap_to_recompute_first() -> None:
    dear = {key(n) for n in range(0, 10, 2)}
    policy = _taught(_Clock(), lambda name: 8.0 if name in dear else 1.0)
    assert set(list(policy.victims())[-5:]) == dear


def test_weights_are_rounded_by_less_than_a_tenth() -> None:
    for weight in (1e-6, 0.3, 1.0, 7.7, 1e6):
        assert abs(weight_of(weight_bucket(weight)) / weight - 1) < 0.1
    assert weight_of(weight_bucket(0.0)) < 1e-9


def test_value_refuses_a_new_block_that_is_worth_less_than_all_others() -> None:
    clock = _Clock()
    policy = _taught(clock)
    for n in range(2200):
        policy.remove(key(1000 + n))
    assert sorted(policy.victims()) == [key(n) for n in range(10)]
    policy.remove(key(3))
    assert ByValue(policy).admits(key(3))  # a ghost is known by its uses
    assert not ByValue(policy).admits(key(9999))


def test_value_admits_anything_to_an_empty_cache() -> None:
    assert ByValue(Value(_Clock())).admits(key(1))


def test_value_keeps_its_leaves_when_ghosts_are_forgotten() -> None:
    """Forgetting a ghost once took a present block out of the index: nothing could be evicted."""
    clock = _Clock()
    policy = Value(clock, ghost_blocks=8)
    rng = random.Random(3)
    for step in range(4000):
        clock.now_s = step / 3
        n = rng.randrange(60)
        policy.insert(key(n), key(n // 2) if n else None)
        while len(policy) > 12:
            policy.remove(next(policy.victims()))
    assert len(list(policy.victims())) == len(policy) == 12


def test_value_forgets_ghosts_beyond_its_bound() -> None:
    policy = Value(_Clock(), ghost_blocks=50)
    for n in range(5000):
        policy.insert(key(n), key(n + 100_000))
        policy.remove(key(n))
    assert len(policy._nodes) <= 101


def test_value_gives_every_leaf_to_a_second_walk_while_the_first_waits() -> None:
    policy = Value(_Clock())
    for n in range(6):
        policy.insert(key(n), key(n - 1) if n % 3 else None)
    first = policy.victims()
    policy.remove(next(first))
    assert len(list(policy.victims())) == 5
    first.close()
    assert len(list(policy.victims())) == 5


def test_age_buckets_rise_and_end() -> None:
    buckets = [age_bucket(1.1**n) for n in range(300)]
    assert buckets == sorted(buckets)
    assert buckets[-1] == AGES - 1
    assert age_bucket(0.0) == 0


def test_hazard_rises_before_the_age_at_which_uses_come() -> None:
    table = HazardTable(1, 0.0)
    table.cohort.waiting[0] = 10.0
    table.ended[0][age_bucket(60.0)] = 90.0
    table.refresh(600.0)
    values = table.values[0]
    assert values[0] < values[age_bucket(50.0)]
    assert values[age_bucket(200.0)] < values[0]


def test_hazard_of_a_rare_class_leans_on_all_classes() -> None:
    table = HazardTable(2, 0.0)
    table.ended[0][5] = 1000.0
    table.cohort.waiting[:] = [1000.0, 1.0]
    table.refresh(600.0)
    assert table.values[1][0] > table.values[0][0] / 2


def test_hazard_merges_cohorts_and_still_counts_their_ends() -> None:
    table = HazardTable(1, 0.0)
    cohorts = []
    for n in range(1000):
        cohorts.append(table.cohort)
        table.cohort.waiting[0] = 2.0
        table.refresh(float(n))
    assert len(table._cohorts) < 200
    for n, cohort in enumerate(cohorts):
        table.ended_wait(cohort, 0, 1000.0 - n, 2)
    assert all(cohort.waiting == [0.0] for cohort in table._cohorts)
    began = [cohort.began_s for cohort in table._cohorts]
    assert began == sorted(began)


def test_second_sight_admits_what_it_remembers() -> None:
    sight = SecondSight(2)
    assert [sight.admits(key(n)) for n in (1, 1, 2, 3, 1, 3)] == [
        False,
        True,
        False,
        False,
        False,
        True,
    ]
    assert AdmitAll().admits(key(1))


def test_uses_of_a_cohort_that_was_merged_meanwhile_are_counted() -> None:
    """One request of so many blocks that the table is refreshed and merged while it lasts."""
    table = HazardTable(3, 0.0)
    first = second = table.cohort
    for n in range(200):
        table.cohort.root().waiting[1] += 1
        table.refresh(1.0 + n)
        second = table.cohort if n == 0 else second
    assert second.into is not None
    second.root().waiting[1] += 5
    table.ended_wait(second, 1, 100.0, 3)
    assert sum(c.root().waiting[1] for c in table._cohorts) == 202
    assert first.root() in table._cohorts
