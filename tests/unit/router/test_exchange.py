"""Several gateways: what they hear counts, fades, and does not make them herd."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter

import msgspec
import pytest
from small_router import ask, chosen, router

from kvist.router.conductor import KvistRouter
from kvist.router.exchange import (
    DRAWN_S,
    EXPIRES_S,
    MAX_GATEWAYS,
    LoadReport,
    OtherGateways,
    ReplicaLoad,
)

_SECOND = ReplicaLoad(1.0, 2, 1, 1000, 2, 3000, 10)


def _others() -> OtherGateways:
    return OtherGateways(random.Random(0))


def test_what_others_booked_counts_and_is_worked_off() -> None:
    others = _others()
    assert others.hear(LoadReport("g", 1, 1.0, {"a": _SECOND}), 10.0)
    assert others.load("a") == _SECOND
    assert others.load("b").requests == 0
    assert others.queue_s("a", 2, 10.0) == 1.0
    assert others.queue_s("a", 2, 10.4) == pytest.approx(0.6)
    assert others.queue_s("a", 2, 12.0) == 0.0


def test_an_older_report_or_one_too_many_is_not_taken() -> None:
    others = _others()
    assert others.hear(LoadReport("g", 2, 1.0, {"a": _SECOND}), 0.0)
    assert not others.hear(LoadReport("g", 1, 1.0, {}), 1.0)
    assert not others.hear(LoadReport("g", 2, 1.0, {}), 1.0)
    assert others.load("a") == _SECOND
    for n in range(MAX_GATEWAYS - 1):
        assert others.hear(LoadReport(str(n), 1, 0.0, {}), 1.0)
    assert not others.hear(LoadReport("one too many", 1, 0.0, {}), 1.0)
    assert len(others) == MAX_GATEWAYS


def test_a_silent_gateway_is_forgotten_with_its_load() -> None:
    others = _others()
    others.hear(LoadReport("g", 1, 1.0, {"a": _SECOND}), 0.0)
    others.forget_silent(EXPIRES_S)
    assert others.load("a") == _SECOND
    others.forget_silent(EXPIRES_S + 0.1)
    assert (others.load("a").requests, len(others)) == (0, 0)


def test_what_was_booked_since_is_drawn_and_wider_the_older_the_report() -> None:
    others = _others()
    others.hear(LoadReport("g", 1, 0.0, {}), 0.0)
    others.hear(LoadReport("g", 2, 4.0, {}), 1.0)  # four seconds of work a second
    for age_s in (0.1, 1.0):
        drawn = [others.queue_s("a", 8, 1.0 + age_s) for _ in range(2000)]
        assert sum(drawn) / len(drawn) == pytest.approx(4 * age_s / 8, rel=0.05)
        assert max(drawn) <= 2 * 4 * age_s / 8
    assert others.queue_s("a", 8, 1.0) == 0.0


def test_a_long_silence_is_not_filled_with_guesses() -> None:
    """A gateway that was killed books nothing, whatever its rate was before."""
    others = _others()
    others.hear(LoadReport("g", 1, 0.0, {}), 0.0)
    others.hear(LoadReport("g", 2, 4.0, {}), 1.0)
    drawn = [others.queue_s("a", 8, 1.0 + EXPIRES_S) for _ in range(2000)]
    assert max(drawn) <= 2 * 4 * DRAWN_S / 8


def test_the_only_other_gateway_is_forgotten_when_it_is_silent() -> None:
    """Nobody is left whose report could bring it to mind."""
    made = router("a", "b")
    booked = {name: ReplicaLoad(1.0, 100, 100, 1000, 100, 3000, 10) for name in ("a", "b")}
    made.hear(LoadReport("g", 1, 1.0, booked), 0.0)
    assert chosen(made.choose(ask("1", 5000), 0.1)).ttft_s > 1.0
    made.forget_silent(EXPIRES_S + 0.1)
    assert made.other_gateways == 0
    assert chosen(made.choose(ask("2", 5000), EXPIRES_S + 0.2)).ttft_s < 1.0


def test_a_report_survives_the_wire() -> None:
    made = router("a", "b")
    made.choose(ask("1", 5000), 0.0)
    report = made.report("g", 0.1)
    assert report.booked_s > 0
    packed = msgspec.msgpack.encode(report)
    assert msgspec.msgpack.decode(packed, type=LoadReport) == report


def _waited_s(exchange_s: float) -> float:
    """Mean wait of 400 requests that come to four gateways, for eight replicas at 90 % load."""
    stream, gateways = random.Random(4), [router(*"abcdefgh", seed=n) for n in range(4)]
    free_s: Counter[str] = Counter()  # when each replica is idle again
    firsts: list[tuple[float, int, KvistRouter, int]] = []
    waited_s, told_s = 0.0, 0.0
    for n in range(400):
        now_s = n * 0.07
        while firsts and firsts[0][0] <= now_s:
            end_s, _, owner, booking = heapq.heappop(firsts)
            owner.first_token(booking, end_s)
            owner.finish(booking, end_s)
        if now_s - told_s >= exchange_s:
            told_s = now_s
            _tell(gateways, now_s)
        gateway = stream.choice(gateways)
        one = chosen(gateway.choose(ask(str(n), 5000), now_s))
        start_s = max(now_s, free_s[one.replica])
        waited_s += start_s - now_s
        free_s[one.replica] = start_s + 0.51
        heapq.heappush(firsts, (start_s + 0.51, n, gateway, one.booking))
    return waited_s / 400


def _tell(gateways: list[KvistRouter], now_s: float) -> None:
    reports = [gateway.report(str(n), now_s) for n, gateway in enumerate(gateways)]
    for number, gateway in enumerate(gateways):
        for sender, report in enumerate(reports):
            if sender != number:
                assert gateway.hear(report, now_s)


def test_gateways_that_tell_each_other_wait_less_than_those_that_do_not() -> None:
    assert _waited_s(0.1) < 0.7 * _waited_s(math.inf)
