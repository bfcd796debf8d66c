"""A random walk over a tiered store, against a dict: never wrong bytes, never a leak."""

import contextlib

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
from kvist.core.outcome import Outcome, Tier
from kvist.policy import LeafLru, Lru
from kvist.store import Breaker, TieredStore
from kvist.store.leases import TieredReadLease, TieredWriteLease
from kvist.testing.store_suite import RAW_BYTES, WAIT_S, DictTier, content, key, ref
from kvist.tiers.dram import PAGE_BYTES, Arena

CAPACITY_BLOCKS = 6
RUNS = st.lists(st.integers(0, 11), min_size=1, max_size=5)


class StoreMachine(RuleBasedStateMachine):
    """Rules are what callers do; `committed` is every key that was ever made visible."""

    policy: type[Lru] | type[LeafLru] = LeafLru
    with_lower = True

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
            breaker=lambda: Breaker(
                clock=lambda: self.now_s, random=lambda: 0.5, threshold=2, probe_s=1, probe_max_s=1
            ),
        )
        self.committed: set[int] = set()

    @rule(target=writes, numbers=RUNS)
    def write(self, numbers: list[int]) -> tuple[list[int], TieredWriteLease | None]:
        before = self.store.stats().free_blocks
        try:
            lease = self.store.write([ref(n) for n in numbers])
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

    @rule(target=reads, numbers=RUNS)
    def read(self, numbers: list[int]) -> tuple[list[int], TieredReadLease | None]:
        try:
            return numbers, self.store.read([key(n) for n in numbers], deadline_s=1000)
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

    def teardown(self) -> None:
        self.store.check_integrity()
        self.tier.broken = self.tier.full = False
        self.tier.open.set()
        self.store.close()


class LruDramOnlyMachine(StoreMachine):
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
pytestmark = pytest.mark.timeout(100)
