"""Every eviction policy passes the published suite."""

from kvist.policy import (
    Arc,
    Belady,
    EvictionPolicy,
    Fifo,
    Gdsf,
    LeafLru,
    Lirs,
    Lru,
    S3Fifo,
    Sieve,
    Value,
    WTinyLfu,
)
from kvist.testing.policy_suite import PolicySuite

CAPACITY_BLOCKS = 20


class TestLru(PolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return Lru()


class TestLeafLru(PolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return LeafLru()


class TestFifo(PolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return Fifo()


class TestSieve(PolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return Sieve()


class TestS3Fifo(PolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return S3Fifo(CAPACITY_BLOCKS)


class TestArc(PolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return Arc(CAPACITY_BLOCKS)


class TestWTinyLfu(PolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return WTinyLfu(CAPACITY_BLOCKS)


class TestGdsf(PolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return Gdsf()


class TestLirs(PolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return Lirs(CAPACITY_BLOCKS)


class TestBelady(PolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return Belady([])


class TestValue(PolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return Value(lambda: 0.0)


class TestValueWithFewGhosts(PolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return Value(lambda: 0.0, ghost_blocks=3)
