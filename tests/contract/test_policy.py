"""Every eviction policy passes the published suite."""

from kvist.policy import LeafLru, Lru
from kvist.policy.protocol import EvictionPolicy
from kvist.testing.policy_suite import PolicySuite


class TestLru(PolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return Lru()


class TestLeafLru(PolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return LeafLru()
