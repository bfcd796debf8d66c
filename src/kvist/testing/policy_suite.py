"""What every eviction policy must do. Subclass, give `make_policy`, run with pytest."""

from __future__ import annotations

import random

from kvist.core.keys import Key
from kvist.policy.protocol import EvictionPolicy


def key(n: int) -> Key:
    """A key that is easy to recognise."""
    return n.to_bytes(32, "big")


class PolicySuite:
    """The contract of `EvictionPolicy`, one claim a test."""

    def make_policy(self) -> EvictionPolicy:
        """A new, empty policy."""
        raise NotImplementedError

    def test_a_new_policy_has_no_victims(self) -> None:
        policy = self.make_policy()
        assert list(policy.victims()) == []
        assert len(policy) == 0

    def test_victims_are_every_key_exactly_once(self) -> None:
        policy = self.make_policy()
        for n in range(50):
            policy.insert(key(n), key(n // 2) if n % 3 else None)
        assert sorted(policy.victims()) == [key(n) for n in range(50)]
        assert len(policy) == 50

    def test_looking_at_victims_changes_nothing(self) -> None:
        policy = self.make_policy()
        for n in range(20):
            policy.insert(key(n), None)
        first = list(policy.victims())
        half_way = policy.victims()
        next(half_way)
        del half_way
        assert list(policy.victims()) == first

    def test_a_victim_may_be_removed_while_others_are_skipped(self) -> None:
        policy = self.make_policy()
        for n in range(30):
            policy.insert(key(n), key(n - 1) if n % 5 else None)
        kept = []
        for n, victim in enumerate(policy.victims()):
            if n % 2:
                policy.remove(victim)
            else:
                kept.append(victim)
        assert len(kept) == 15
        assert sorted(policy.victims()) == sorted(kept)

    def test_inserting_twice_keeps_one(self) -> None:
        policy = self.make_policy()
        policy.insert(key(1), None)
        policy.insert(key(1), None)
        assert list(policy.victims()) == [key(1)]
        assert len(policy) == 1

    def test_absent_keys_are_ignored(self) -> None:
        policy = self.make_policy()
        policy.touch(key(1))
        policy.remove(key(1))
        assert len(policy) == 0

    def test_a_key_can_come_back(self) -> None:
        policy = self.make_policy()
        policy.insert(key(1), None)
        policy.remove(key(1))
        policy.insert(key(1), key(0))
        assert list(policy.victims()) == [key(1)]

    def test_keys_stay_equal_to_a_set_over_random_calls(self) -> None:
        rng = random.Random(7)
        policy, oracle = self.make_policy(), set[Key]()
        for _ in range(3000):
            n = rng.randrange(60)
            action = rng.randrange(4)
            if action == 0:
                policy.insert(key(n), key(n // 2))
                oracle.add(key(n))
            elif action == 1:
                policy.remove(key(n))
                oracle.discard(key(n))
            elif action == 2:
                policy.touch(key(n))
            else:
                victim = next(policy.victims(), None)
                assert (victim is None) == (not oracle)
                if victim is not None:
                    policy.remove(victim)
                    oracle.discard(victim)
            assert len(policy) == len(oracle)
        assert sorted(policy.victims()) == sorted(oracle)
