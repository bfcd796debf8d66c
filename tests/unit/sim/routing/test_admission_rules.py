"""The rules of admission under overload, on made-up traffic: the order that the paper found."""

from __future__ import annotations

import random

import pytest
from small_cluster import cluster, engine, request, trace

from kvist.sim.des.cluster import simulate
from kvist.sim.des.report import Report
from kvist.sim.des.routing_spec import AdmissionKind, Knows, RouterKind, RoutingSpec
from kvist.sim.des.spec import Role, Slo
from kvist.sim.traces import Trace

RULES = (AdmissionKind.BASELINE, AdmissionKind.EARLY, AdmissionKind.PREDICTIVE)
ROLES = (Role.PREFILL,) * 4 + (Role.DECODE,) * 4


def _traffic(seed: int) -> Trace:
    """1,500 prompts that nobody has, more than four nodes can compute or decode in time."""
    stream, at_s, requests = random.Random(seed), 0.0, []
    for number in range(1500):
        at_s += stream.expovariate(8.0)
        tokens = int(stream.lognormvariate(8.3, 0.7)) + 200
        output = int(stream.expovariate(1 / 150)) + 2
        requests.append(request(at_s, f"r{number}", tokens, output=output))
    return trace(*requests)


def _served(rule: AdmissionKind, traffic: Trace) -> Report:
    spec = cluster(
        8,
        roles=ROLES,
        slo=Slo(10.0, 0.0295),
        admission=rule,
        router=RouterKind.KVIST,
        routing=RoutingSpec(Knows.BOOKINGS),
        engine=engine(hbm_tokens=500_000, prefix_cache=False),
    )
    return simulate(spec, traffic)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_earlier_decode_is_foreseen_the_more_is_served_in_time(seed: int) -> None:
    traffic = _traffic(seed)
    reports = {rule: _served(rule, traffic) for rule in RULES}
    goodputs = [reports[rule].goodput_rps for rule in RULES]
    assert goodputs == sorted(goodputs)
    late = [reports[rule].refusals.get("tbt_late", 0) for rule in RULES]
    assert late == sorted(late, reverse=True)
    assert late[-1] < late[0] / 2
    waits = [reports[rule].ttft_s.mean for rule in RULES]
    assert waits == sorted(waits, reverse=True)
