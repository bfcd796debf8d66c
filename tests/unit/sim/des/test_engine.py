"""One engine against what can be worked out by hand, and against theory."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from small_cluster import BLOCK_TOKENS, DECODE, PREFILL, cluster, engine, request, trace

from kvist.sim.des.cluster import simulate
from kvist.sim.des.report import End, Report
from kvist.sim.des.spec import ArrivalSpec, Handover, Prefilling, Role


@pytest.mark.parametrize("prefilling", list(Prefilling))
@pytest.mark.parametrize("tokens", [1, 63, 64, 640, 20_000])
def test_ttft_of_a_lone_request_is_the_cost_models_prefill(
    prefilling: Prefilling, tokens: int
) -> None:
    spec = cluster(engine=engine(prefilling=prefilling, prefix_cache=False))
    report = simulate(spec, trace(request(3.0, "a", tokens)))
    assert report.ttft_s.mean == pytest.approx(PREFILL.prefill_s(tokens, 0), rel=1e-9)
    assert report.finished == 1


def test_a_prefix_in_hbm_is_not_computed_again() -> None:
    spec = cluster(engine=engine())
    again = simulate(spec, trace(request(0, "a", 6401), request(100, "a", 6401)))
    first, second = again.served
    assert (first.cached_tokens, second.cached_tokens) == (0, 6400)
    assert second.ttft_s == pytest.approx(PREFILL.prefill_s(1, 6400), rel=1e-9)
    assert again.hit_tokens["hbm"] == 6400
    off = dataclasses.replace(spec, engine=engine(prefix_cache=False))
    assert simulate(off, trace(request(0, "a", 6401), request(100, "a", 6401))).hit_ratio == 0


def test_one_token_at_least_is_computed() -> None:
    report = simulate(cluster(), trace(request(0, "a", 640), request(100, "a", 640)))
    assert report.served[1].cached_tokens == 640 - BLOCK_TOKENS


def test_a_long_prompt_is_computed_in_chunks_that_each_pay_for_the_pass() -> None:
    spec = cluster(engine=engine(step_tokens=500))
    report = simulate(spec, trace(request(0, "a", 1200)))
    parts = PREFILL.prefill_s(500, 0) + PREFILL.prefill_s(500, 500) + PREFILL.prefill_s(200, 1000)
    assert report.ttft_s.mean == pytest.approx(parts, rel=1e-9)


def test_a_prompt_shares_what_is_computed_of_another_one_step_by_step() -> None:
    """The second is let in beside the last chunk of the first, whose blocks before it are there.

    It was computed from its start, since a prompt's blocks were known at its end only.
    """
    spec = cluster(engine=engine(step_tokens=1000))
    report = simulate(spec, trace(request(0, "a", 6401), request(0.01, "a", 6465)))
    first, second = report.served
    assert first.cached_tokens == 0
    assert second.cached_tokens == 6000 // BLOCK_TOKENS * BLOCK_TOKENS


def test_blocks_of_a_prompt_that_is_preempted_in_the_middle_are_kept() -> None:
    """Decodes grow until the prompt that is being computed has to give way; it finds its own."""
    spec = cluster(engine=engine(step_tokens=100, hbm_tokens=7000))
    decodes = [request(0, f"a{n}", 64, output=120) for n in range(8)]
    report = simulate(spec, trace(*decodes, request(0.2, "b", 6200)))
    assert (report.finished, report.preempted) == (9, 1)
    devices, chunk_s = spec.hardware.count, PREFILL.prefill_s(100, 6100)
    alone_s = 62 * PREFILL.a_s + PREFILL.b_s * 6200 + PREFILL.c_s * 6200**2
    spent_s = report.prefill_device_s / devices - 8 * PREFILL.prefill_s(64, 0)
    assert spent_s < alone_s + 10 * chunk_s


def test_decode_takes_a_step_of_the_cost_model_a_token() -> None:
    report = simulate(cluster(), trace(request(0, "a", 1000, output=6)))
    steps = sum(DECODE.decode_s(1, 1001 + i) for i in range(5))
    served = report.served[0]
    assert served.end_s - served.ttft_s == pytest.approx(steps, rel=1e-9)
    assert served.output_tokens == 6
    assert report.decode_device_s == pytest.approx(steps, rel=1e-9)


def _long_prompt_beside_a_decode(prefilling: Prefilling) -> Report:
    spec = cluster(engine=engine(prefilling=prefilling, step_tokens=500))
    return simulate(spec, trace(request(0, "a", 100, output=100), request(0.5, "b", 9000)))


def test_a_prefill_that_cannot_be_interrupted_stalls_every_decode() -> None:
    whole = _long_prompt_beside_a_decode(Prefilling.NON_INTERRUPTIBLE)
    chunks = _long_prompt_beside_a_decode(Prefilling.CHUNKED)
    stall_s = PREFILL.prefill_s(9000, 0)
    assert stall_s / 10 < whole.served[0].tbt_s < stall_s / 10 + 0.03  # one gap of the longest ten
    assert whole.itl_s.p99 > stall_s
    assert chunks.itl_s.p99 < PREFILL.prefill_s(500, 8500) + 0.03
    assert chunks.served[1].ttft_s > whole.served[1].ttft_s


def test_a_request_that_arrives_during_a_step_waits_for_its_end_only() -> None:
    spec = cluster(engine=engine(prefilling=Prefilling.NON_INTERRUPTIBLE))
    report = simulate(spec, trace(request(0, "a", 100, output=500), request(1.0, "b", 100)))
    wait_s = report.served[1].ttft_s - PREFILL.prefill_s(100, 0)
    assert 0 <= wait_s <= DECODE.decode_s(1, 200)


def test_a_full_hbm_preempts_the_latest_and_everybody_finishes() -> None:
    spec = cluster(engine=engine(hbm_tokens=1000))
    requests = [request(n * 0.01, f"r{n}", 200, output=400) for n in range(4)]
    report = simulate(spec, trace(*requests))
    assert report.finished == 4
    assert report.preempted > 0
    assert [s.output_tokens for s in report.served] == [400] * 4
    ends = [s.end_s for s in report.served]
    assert ends[0] == min(ends)


def test_a_request_larger_than_hbm_is_refused_at_once() -> None:
    report = simulate(cluster(engine=engine(hbm_tokens=1000)), trace(request(0, "a", 990, 20)))
    assert report.served[0].end is End.REJECTED
    assert report.refusals == {"too_long": 1}


def test_at_most_max_sequences_run_at_once() -> None:
    spec = cluster(engine=engine(max_sequences=2))
    report = simulate(spec, trace(*(request(0, f"r{n}", 64, output=11) for n in range(3))))
    first, second, third = report.served
    assert third.ttft_s > min(first.end_s, second.end_s)


def test_a_prefill_only_queue_waits_as_long_as_theory_says() -> None:
    """M/D/1: the mean wait is ρ·s / (2·(1 - ρ)) for Poisson arrivals and one service time s."""
    service_s, load, count = PREFILL.prefill_s(1000, 0), 0.7, 20_000
    stream, time_s, requests = random.Random(5), 0.0, []
    for n in range(count):
        time_s += stream.expovariate(load / service_s)
        requests.append(request(time_s, f"r{n}", 1000))
    serial = engine(prefilling=Prefilling.NON_INTERRUPTIBLE, step_tokens=1, prefix_cache=False)
    report = simulate(cluster(engine=serial), trace(*requests))
    wait_s = report.ttft_s.mean - service_s
    assert wait_s == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.05)
    assert report.prefill_device_s == pytest.approx(count * service_s, rel=1e-9)


@pytest.mark.parametrize("handover", list(Handover))
def test_kv_goes_from_the_prefill_to_the_decode_node(handover: Handover) -> None:
    spec = cluster(roles=(Role.PREFILL, Role.DECODE), engine=engine(handover=handover))
    report = simulate(spec, trace(request(0, "a", 4000, output=3)))
    size_bytes = spec.model.cache_bytes(4000)
    served, nic = report.served[0], spec.nic_bytes_per_s()
    assert report.links["nic_out"].moved_bytes == pytest.approx(size_bytes)
    assert report.links["nic_in"].moved_bytes == pytest.approx(size_bytes)
    assert served.ttft_s == pytest.approx(PREFILL.prefill_s(4000, 0), rel=1e-9)
    rest = size_bytes / spec.model.layers if handover is Handover.LAYERWISE else size_bytes
    sent_s = spec.links.nic_latency_s + rest / nic
    steps_s = DECODE.decode_s(1, 4001) + DECODE.decode_s(1, 4002)
    assert served.end_s - served.ttft_s == pytest.approx(sent_s + steps_s, rel=1e-6)


def test_a_request_of_one_token_ends_on_its_prefill_node() -> None:
    spec = cluster(roles=(Role.PREFILL, Role.DECODE))
    report = simulate(spec, trace(request(0, "a", 4000)))
    assert report.finished == 1
    assert report.links["nic_out"].moved_bytes == 0


def test_binned_arrivals_are_spread_over_their_bin() -> None:
    requests = [request(3.0 * (n // 30), f"r{n}", 100) for n in range(90)]
    spread = cluster(arrivals=ArrivalSpec(spread=True))
    times = [s.arrival_s for s in simulate(spread, trace(*requests), seed=1).served]
    assert times == sorted(times)
    assert times[29] < 3.0 < times[30] + 0.1
    assert max(b - a for a, b in itertools.pairwise(times)) < 0.21
    assert times[-1] < 9.0
    twice = dataclasses.replace(spread, arrivals=ArrivalSpec(rate_scale=2.0, limit=60))
    fast = [s.arrival_s for s in simulate(twice, trace(*requests), seed=1).served]
    assert fast == pytest.approx([t / 2 for t in times[:60]])


def test_exact_arrivals_come_a_little_later_by_seed() -> None:
    requests = [request(0.4 * n, f"r{n}", 100) for n in range(50)]
    late = cluster(arrivals=ArrivalSpec(jitter_s=1.0, rate_scale=2.0))
    times = {seed: _arrivals(simulate(late, trace(*requests), seed=seed)) for seed in (1, 2)}
    assert times[1] != times[2]
    for seed, found in times.items():
        assert found == _arrivals(simulate(late, trace(*requests), seed=seed))
        ordered = sorted(found)
        assert ordered[0] == 0.0
        # As the first may be 1 s late itself, which is where time begins.
        assert all(-0.5 <= at_s - 0.2 * n <= 0.5 for n, at_s in enumerate(ordered))
    on_time = cluster(arrivals=ArrivalSpec(rate_scale=2.0))
    found = _arrivals(simulate(on_time, trace(*requests), seed=1))
    assert found == pytest.approx([0.2 * n for n in range(50)])


def _arrivals(report: Report) -> list[float]:
    return [served.arrival_s for served in report.served]
