"""The swing of loads: what is in opposite phase, what is a trend, what swings not at all."""

from __future__ import annotations

import math

import pytest

from kvist.sim.des.report import End, Served
from kvist.sim.routing.swing import swing


def _served(arrival_s: float, prefill_s: float, decode_s: float) -> Served:
    end_s = arrival_s + prefill_s + decode_s
    return Served(arrival_s, 1000, 10, End.FINISHED, prefill_s, 0.01, end_s, 0)


def test_bursts_that_come_to_decode_when_prefill_is_empty_are_in_opposite_phase() -> None:
    bursts = [_served(60.0 * n, 30.0, 30.0) for n in range(40) for _ in range(20)]
    found = swing(bursts)
    assert found.correlation < -0.9
    assert found.amplitude == pytest.approx(10.0, abs=0.5)  # 0, 20, 0, 20


def test_a_steady_stream_does_not_swing() -> None:
    found = swing([_served(n * 0.5, 2.0, 10.0) for n in range(4000)])
    assert found.amplitude < 0.5
    assert found.decode[1000] == pytest.approx(20, abs=1)
    assert found.prefill[1000] == pytest.approx(4, abs=1)


def test_slow_growth_of_the_traffic_is_no_swing() -> None:
    times = [60.0 * math.sqrt(n) for n in range(4000)]
    assert swing([_served(at_s, 2.0, 20.0) for at_s in times]).amplitude < 1.0


def test_a_request_without_a_first_token_never_decodes() -> None:
    refused = Served(0.0, 10, 0, End.REJECTED, math.inf, 0.0, 50.0, 0)
    found = swing([refused, *(_served(float(n), 0.5, 0.0) for n in range(100))])
    assert found.decode.max() == 0
    assert found.prefill[10] >= 1
    assert swing([]).amplitude == 0.0
