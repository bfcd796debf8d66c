"""What each layer does when its medium does not do well."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from kvist.adapters.layers import (
    Blow,
    BreakerLayer,
    ChaosLayer,
    CountLayer,
    Operation,
    RetryLayer,
    ThrottleLayer,
    TimeoutLayer,
)
from kvist.adapters.memory import MemoryAdapter, MemoryMedium
from kvist.adapters.protocol import Fetched, Got, NewObject, Page, PutReport, StorageAdapter, Wanted
from kvist.core.errors import ClosedError, TierError, TierFullError, TierTimeout
from kvist.testing.adapter_suite import (
    OBJECT_BYTES,
    all_names,
    fetch,
    new_object,
    probe,
    suite_name,
    suite_object,
)

WAIT_S = 20.0
FAILURES = [
    TierError(errno.EIO, "broken"),
    TierTimeout(errno.ETIMEDOUT, "late"),
    TierFullError(errno.ENOSPC, "full"),
    ClosedError("closed"),
]


class Clock:
    """Time that passes only when somebody rests."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.rests: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def rest(self, pause_s: float) -> None:
        self.rests.append(pause_s)
        self.now_s += pause_s


class Flaky(MemoryAdapter):
    """Fails the next calls with given errors; `gate` holds calls back."""

    def __init__(self, medium: MemoryMedium | None = None) -> None:
        super().__init__(medium)
        self.failures: list[Exception] = []
        self.calls = 0
        self.gate: threading.Event | None = None
        self.passed = threading.Event()

    def _meet(self) -> None:
        self.calls += 1
        if self.gate is not None:
            self.gate.wait(30)
        if self.failures:
            raise self.failures.pop(0)

    def get(self, wanted: Sequence[Wanted]) -> list[Fetched]:
        self._meet()
        answers = super().get(wanted)
        self.passed.set()
        return answers

    def put(self, objects: Sequence[NewObject]) -> PutReport:
        self._meet()
        return super().put(objects)

    def delete(self, names: Sequence[str]) -> None:
        self._meet()
        super().delete(names)

    def list_page(self, prefix: str, *, cursor: str | None = None, limit: int = 1000) -> Page:
        self._meet()
        return super().list_page(prefix, cursor=cursor, limit=limit)


def each_call(adapter: StorageAdapter) -> list[Callable[[], object]]:
    return [
        lambda: adapter.get([Wanted(suite_name(1))]),
        lambda: adapter.put([new_object(1)]),
        lambda: adapter.delete([suite_name(9)]),
        lambda: adapter.list_page(""),
    ]


def test_retry_repeats_every_operation_until_it_works() -> None:
    clock, flaky = Clock(), Flaky()
    layer = RetryLayer(flaky, retries=2, clock=clock, draw=lambda: 1.0, rest=clock.rest)
    for call in each_call(layer):
        flaky.failures = [FAILURES[0], FAILURES[1]]
        call()
    assert layer.retried == 8
    assert clock.rests == [0.05, 0.1] * 4
    assert probe(layer, [1]) == [True]


def test_retry_gives_up_after_its_number_and_after_its_time() -> None:
    clock, flaky = Clock(), Flaky()
    layer = RetryLayer(flaky, retries=2, clock=clock, draw=lambda: 1.0, rest=clock.rest)
    flaky.failures = [TierError(errno.EIO, f"{n}") for n in range(5)]
    with pytest.raises(TierError, match="2"):
        layer.get([Wanted(suite_name(1))])
    assert len(flaky.failures) == 2
    hasty = RetryLayer(
        flaky, retries=50, budget_s=1.0, clock=clock, draw=lambda: 1.0, rest=clock.rest
    )
    flaky.failures = [TierError(errno.EIO, "never")] * 50
    began_s = clock.now_s
    with pytest.raises(TierError):
        hasty.get([Wanted(suite_name(1))])
    assert clock.now_s - began_s <= 1.0
    assert hasty.given_up == 1


@pytest.mark.parametrize("failure", FAILURES[2:], ids=["full", "closed"])
def test_retry_does_not_repeat_what_cannot_change(failure: Exception) -> None:
    flaky = Flaky()
    flaky.failures = [failure]
    with pytest.raises(type(failure)):
        RetryLayer(flaky).put([new_object(1)])
    assert flaky.calls == 1


def test_timeout_ends_every_call_that_hangs() -> None:
    flaky = Flaky()
    flaky.gate = threading.Event()
    layer = TimeoutLayer(flaky, timeout_s=0.05)
    for call in each_call(layer):
        with pytest.raises(TierTimeout):
            call()
    assert layer.late == 4
    flaky.gate.set()


def test_call_that_was_abandoned_never_touches_the_callers_memory() -> None:
    """The worst fault that a timeout can make: bytes of a late read in a slot that was reused."""
    flaky = Flaky()
    flaky.put([new_object(1)])
    flaky.gate = threading.Event()
    layer = TimeoutLayer(flaky, timeout_s=0.05)
    out = memoryview(bytearray(b"\xee" * OBJECT_BYTES))
    with pytest.raises(TierTimeout):
        layer.get([Wanted(suite_name(1), (out,))])
    flaky.gate.set()
    assert flaky.passed.wait(WAIT_S)
    assert bytes(out) == b"\xee" * OBJECT_BYTES


def test_put_that_was_abandoned_stores_what_it_was_given() -> None:
    flaky = Flaky()
    flaky.gate = threading.Event()
    layer = TimeoutLayer(flaky, timeout_s=0.05)
    data = bytearray(suite_object(1))
    with pytest.raises(TierTimeout):
        layer.put([NewObject(suite_name(1), (memoryview(data),))])
    data[:] = bytes(OBJECT_BYTES)
    flaky.gate.set()
    give_up = time.monotonic() + WAIT_S
    while probe(flaky, [1]) != [True]:
        assert time.monotonic() < give_up
    assert fetch(flaky, 1) == suite_object(1)


def test_medium_that_holds_all_threads_is_not_called_again() -> None:
    flaky = Flaky()
    flaky.gate = threading.Event()
    layer = TimeoutLayer(flaky, timeout_s=0.02, threads=3)
    for _ in range(6):
        with pytest.raises(TierTimeout):
            layer.get([Wanted(suite_name(1))])
    assert flaky.calls == 3
    flaky.gate.set()


def test_timeout_passes_errors_on() -> None:
    flaky = Flaky()
    layer = TimeoutLayer(flaky, timeout_s=10.0)
    for failure in FAILURES:
        flaky.failures = [failure]
        with pytest.raises(type(failure)) as caught:
            layer.get([Wanted(suite_name(1))])
        assert caught.value is failure


def test_throttle_spaces_calls_by_their_bytes() -> None:
    clock = Clock()
    layer = ThrottleLayer(
        MemoryAdapter(), bytes_per_s=10 * OBJECT_BYTES, clock=clock, rest=clock.rest
    )
    for n in range(10):
        layer.put([new_object(n)])
    assert clock.rests == []  # one second's worth at once
    layer.put([new_object(n) for n in range(20, 25)])
    assert clock.rests == pytest.approx([0.5])
    assert fetch(layer, 1) == suite_object(1)
    assert sum(clock.rests) == pytest.approx(0.6)
    layer.get([Wanted(suite_name(1))])
    layer.delete([suite_name(1)])
    assert sum(clock.rests) == pytest.approx(0.6)


def test_throttle_refuses_what_would_wait_too_long() -> None:
    clock = Clock()
    layer = ThrottleLayer(
        MemoryAdapter(), bytes_per_s=OBJECT_BYTES, most_wait_s=2.0, clock=clock, rest=clock.rest
    )
    layer.put([new_object(n) for n in range(5)])  # larger than a burst: passes, in debt
    with pytest.raises(TierTimeout):
        layer.put([new_object(9)])
    assert layer.refused == 1
    clock.now_s += 4.0
    layer.put([new_object(9)])


def test_breaker_opens_probes_and_closes() -> None:
    clock, flaky = Clock(), Flaky()
    layer = BreakerLayer(flaky, failures=3, open_s=4.0, clock=clock, draw=lambda: 0.5)
    flaky.failures = [TierError(errno.EIO, "broken")] * 4
    for _ in range(3):
        with pytest.raises(TierError, match="broken"):
            layer.get([Wanted(suite_name(1))])
    assert not layer.passes()
    for _ in range(5):
        with pytest.raises(TierError, match="left alone"):
            layer.get([Wanted(suite_name(1))])
    assert flaky.calls == 3
    clock.now_s += 4.0
    assert layer.passes()
    with pytest.raises(TierError, match="broken"):
        layer.get([Wanted(suite_name(1))])
    clock.now_s += 4.1  # the pause has doubled
    assert not layer.passes()
    clock.now_s += 4.0
    layer.get([Wanted(suite_name(1))])
    assert layer.passes()
    assert layer.opened == 1


def test_breaker_takes_old_failures_and_full_media_for_no_fault() -> None:
    clock, flaky = Clock(), Flaky()
    layer = BreakerLayer(flaky, failures=2, window_s=10.0, clock=clock)
    for _ in range(4):
        flaky.failures = [TierError(errno.EIO, "broken")]
        with pytest.raises(TierError):
            layer.get([Wanted(suite_name(1))])
        clock.now_s += 11.0
        flaky.failures = [TierFullError(errno.ENOSPC, "full")]
        with pytest.raises(TierFullError):
            layer.put([new_object(1)])
    assert layer.passes()


def test_count_knows_calls_bytes_and_failures() -> None:
    flaky = Flaky()
    layer = CountLayer(flaky)
    layer.put([new_object(1), new_object(2)])
    layer.put([new_object(1)])
    assert fetch(layer, 1) is not None
    assert fetch(layer, 7) is None
    flaky.failures = [TierError(errno.EIO, "broken")]
    with pytest.raises(TierError):
        layer.list_page("")
    counts = layer.counts()
    assert counts[Operation.PUT].moved_bytes == 2 * OBJECT_BYTES
    assert counts[Operation.GET].moved_bytes == OBJECT_BYTES
    assert [counts[o].calls for o in Operation] == [2, 2, 0, 1]
    assert counts[Operation.LIST].failed == 1


@pytest.mark.parametrize("blow", list(Blow))
def test_each_blow_strikes_and_the_seed_decides_all(blow: Blow) -> None:
    def play(seed: int) -> list[object]:
        clock = Clock()
        layer = ChaosLayer(MemoryAdapter(), seed=seed, chances={blow: 0.5}, rest=clock.rest)
        seen: list[object] = []
        for n in range(40):
            try:
                layer.put([new_object(n)])
                seen.append(fetch(layer, n))
                seen.append(all_names(layer, "aa/"))
            except TierError as error:
                seen.append(str(error))
        assert layer.struck[blow] > 0
        assert set(layer.struck) - {b for b in Blow if not layer.struck[b]} == {blow}
        layer.heal()
        layer.put([new_object(99)])
        assert fetch(layer, 99) == suite_object(99)
        return [*seen, tuple(clock.rests)]

    assert play(1) == play(1)
    assert play(1) != play(2)


def test_chaos_really_spoils_bytes() -> None:
    for blow in (Blow.CUT, Blow.FLIP):
        layer = ChaosLayer(MemoryAdapter(), seed=3, chances={blow: 1.0})
        layer.put([new_object(1)])
        layer.heal()
        assert fetch(layer, 1) != suite_object(1)
        healthy = MemoryAdapter()
        healthy.put([new_object(1)])
        reading = ChaosLayer(healthy, seed=3, chances={blow: 1.0})
        assert fetch(reading, 1) != suite_object(1)


def test_forgotten_object_is_absent_to_one_call_only() -> None:
    layer = ChaosLayer(MemoryAdapter(), seed=1, chances={Blow.FORGET: 1.0})
    layer.put([new_object(1)])
    assert layer.get([Wanted(suite_name(1))]) == [Fetched(Got.ABSENT)]
    layer.heal()
    assert probe(layer, [1]) == [True]
