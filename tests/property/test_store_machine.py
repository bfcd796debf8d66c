"""A random walk over a tiered store, against a dict: never wrong bytes, never a leak."""

import contextlib
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

from kvist.core.errors import NoSpaceError, TierError
from kvist.core.hints import Finish, Hints
from kvist.core.outcome import Outcome, Tier
from kvist.policy import LeafLru, Lru, SecondSight
from kvist.store import Breaker, Quota, TieredStore
from kvist.store.leases import TieredReadLease, TieredWriteLease
from kvist.testing.store_suite import RAW_BYTES, WAIT_S, DictTier, content, key, ref
from kvist.tiers.dram import PAGE_BYTES, Arena

CAPACITY_BLOCKS = 6
TENANTS = st.sampled_from(["", "a", "b"])
RUNS = st.lists(st.integers(0, 11), min_size=1, max_size=5)


class StoreMachine(RuleBasedStateMachine):
    """Rules are what callers do; `committed` is every key that was ever made visible."""

    policy: type[Lru] | type[LeafLru] = LeafLru
    with_lower = True
    ttl_s: float | None = None
    quota = Quota()
    remembered_blocks = 0  # of the insert filter; none where there is none

    reads = Bundle("reads")
    writes = Bundle("writes")

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.tier = DictTier()
        self.store = TieredStore(
            Arena(CAPACITY_BLOCKS * PAGE_BYTES, slot_bytes=RAW_BYTES),
            self.policy(),
            self.tier if self.with_lower else None,
            raw_bytes=RAW_BYTES,
            clock=lambda: self.now_s,
            ttl_s=self.ttl_s,
            quota=self.quota,
            insert_filter=SecondSight(self.remembered_blocks) if self.remembered_blocks else None,
            breaker=lambda: Breaker(
                clock=lambda: self.now_s, random=lambda: 0.5, threshold=2, probe_s=1, probe_max_s=1
            ),
        )
        self.committed: set[int] = set()

    @rule(target=writes, numbers=RUNS, tenant=TENANTS)
    def write(self, numbers: list[int], tenant: str) -> tuple[list[int], TieredWriteLease | None]:
        before = self.store.stats().free_blocks
        try:
            lease = self.store.write([replace(ref(n), tenant=tenant) for n in numbers])
        except NoSpaceError:
            assert self.store.stats().free_blocks >= before
            return numbers, None
        assert len(lease) == len(numbers)
        return numbers, lease

    @rule(written=consumes(writes), chosen=st.sets(st.integers(0, 4)))
    def commit_and_release(
        self, written: tuple[list[int], TieredWriteLease | None], chosen: set[int]
    ) -> None:
        numbers, lease = written
        if lease is None:
            return
        with lease:
            for i, n in enumerate(numbers):
                if i in chosen and not lease.present(i):
                    lease.buffer(i)[:] = content(key(n))
                    if lease.commit(i):
                        self.committed.add(n)
                        assert self.store.match([key(n)]).tiers == (Tier.DRAM,)

    @rule(target=reads, numbers=RUNS, tenant=TENANTS)
    def read(self, numbers: list[int], tenant: str) -> tuple[list[int], TieredReadLease | None]:
        keys = [key(n) for n in numbers]
        try:
            return numbers, self.store.read(keys, deadline_s=1000, tenant=tenant)
        except NoSpaceError:
            return numbers, None

    @rule(leased=consumes(reads), wait=st.booleans())
    def check_and_release(
        self, leased: tuple[list[int], TieredReadLease | None], wait: bool
    ) -> None:
        numbers, lease = leased
        if lease is None:
            return
        with lease:
            for i, n in enumerate(numbers):
                wait = wait and self.tier.open.is_set()  # the clock stands still in a wait
                if (lease.wait(i) if wait else lease.outcome(i)) is Outcome.HIT:
                    assert n in self.committed
                    assert bytes(lease.buffer(i)) == content(key(n))
            assert not wait or lease.ready()

    @rule(numbers=RUNS)
    def match(self, numbers: list[int]) -> None:
        run = len(self.store.match([key(n) for n in numbers]))
        assert set(numbers[:run]) <= self.committed

    @rule(numbers=RUNS, tenant=TENANTS, deadline_s=st.sampled_from([0.0, 2.0, 1000.0]))
    def prefetch(self, numbers: list[int], tenant: str, deadline_s: float) -> None:
        before = self.store.stats().prefetch_asked
        keys = [key(n) for n in numbers]
        taken = self.store.prefetch(keys, deadline_s=deadline_s, tenant=tenant)
        assert taken <= 1  # an eighth of DRAM, but one at least
        assert self.store.stats().prefetch_asked - before <= len(set(numbers))

    @rule(numbers=RUNS, finish=st.sampled_from(Finish))
    def end_request(self, numbers: list[int], finish: Finish) -> None:
        self.store.ended([key(n) for n in numbers], Hints(finish))

    @rule(by_s=st.sampled_from([1.0, 2.0, 4.0]))
    def pass_time(self, by_s: float) -> None:
        self.advance(by_s)

    @rule(numbers=RUNS)
    def ask_where(self, numbers: list[int]) -> None:
        for n in numbers:
            assert not self.store.stat(key(n)) or n in self.committed
        listed = [info.key for info in self.store.list(20, Tier.DRAM)]
        assert len(set(listed)) == len(listed)

    @rule(numbers=RUNS)
    def evict(self, numbers: list[int]) -> None:
        try:
            self.store.evict([key(n) for n in numbers])
        except TierError:
            assert self.tier.broken

    @rule()
    def clear(self) -> None:
        try:
            self.store.clear()
        except TierError:
            assert self.tier.broken
        assert self.store.stats().dram_blocks == 0

    @rule(numbers=RUNS, pin=st.booleans())
    def pin(self, numbers: list[int], pin: bool) -> None:
        keys = [key(n) for n in numbers[:2]]
        (self.store.pin if pin else self.store.unpin)(keys)

    @precondition(lambda self: self.with_lower)
    @rule(
        fault=st.sampled_from(["broken", "full", "forgetful"]),
        on=st.booleans(),
        pass_s=st.sampled_from([0.0, 3.0]),
    )
    def change_fault(self, fault: str, on: bool, pass_s: float) -> None:
        setattr(self.tier, fault, on)
        self.advance(pass_s)

    @precondition(lambda self: self.with_lower)
    @rule(hang=st.booleans())
    def hang_or_answer(self, hang: bool) -> None:
        if hang:
            self.tier.open.clear()
        else:
            self.tier.open.set()

    @rule(numbers=RUNS)
    def read_in_vain(self, numbers: list[int]) -> None:
        with (
            contextlib.suppress(NoSpaceError),
            self.store.read([key(n) for n in numbers], deadline_s=0) as lease,
        ):
            assert lease.ready()

    @precondition(lambda self: self.tier.open.is_set() and not (self.tier.broken or self.tier.full))
    @rule()
    def flush(self) -> None:
        self.advance(3)  # lets a probe through
        if self.store.flush(WAIT_S):
            assert self.store.stats().dirty_blocks == 0

    def advance(self, by_s: float) -> None:
        self.now_s += by_s
        with self.store._desk.lock:  # threads look at the clock when woken
            self.store._desk.write_work.notify_all()

    @invariant()
    def nothing_leaks(self) -> None:
        self.store.check_integrity()
        for n_bytes in list(self.tier.blocks.items()):
            assert n_bytes[1] == content(n_bytes[0])
        stats = self.store.stats()
        over = stats.prefetch_loaded + stats.prefetch_dropped
        assert stats.prefetch_asked == over + stats.prefetching_blocks
        assert stats.prefetch_used <= stats.prefetch_asked
        tenants = self.store._table.tenants
        for tenant, held in list(tenants.held.items()) if tenants else []:
            assert held <= self.quota.most_blocks(tenant, CAPACITY_BLOCKS)

    def teardown(self) -> None:
        self.store.check_integrity()
        self.tier.broken = self.tier.full = False
        self.tier.open.set()
        self.store.close()


class LruDramOnlyMachine(StoreMachine):
    policy = Lru
    with_lower = False


class LimitedMachine(StoreMachine):
    """Blocks expire, tenants have shares, and the tier below gets what was seen twice."""

    ttl_s = 5.0
    quota = Quota(0.5, {"b": 0.7})
    remembered_blocks = 6


class LimitedDramOnlyMachine(LimitedMachine):
    policy = Lru
    with_lower = False


LIMITS = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestTiered = StoreMachine.TestCase
TestTiered.settings = LIMITS
TestDramOnly = LruDramOnlyMachine.TestCase
TestDramOnly.settings = LIMITS
TestLimited = LimitedMachine.TestCase
TestLimited.settings = LIMITS
TestLimitedDramOnly = LimitedDramOnlyMachine.TestCase
TestLimitedDramOnly.settings = LIMITS
pytestmark = pytest.mark.timeout(100)
