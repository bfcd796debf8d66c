"""Learning: prefill, decode, transfer and overhead from what is observed."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from kvist.core.errors import ConfigError
from kvist.cost.decode import DecodeCoefficients, DecodeTimes
from kvist.cost.learner import LinearTimes
from kvist.cost.prefill import PrefillCoefficients, PrefillTimes
from kvist.cost.transfer import LoadOverhead, PathSpeed, TransferTimes

SEED = PrefillCoefficients(0.006, 4e-5, 3e-10)


def _work(rng: random.Random) -> tuple[int, int]:
    return int(2 ** rng.uniform(4, 14)), rng.choice([0, 0, rng.randrange(16000)])


def _errors(times: PrefillTimes, truth: PrefillCoefficients, rng: random.Random) -> float:
    found = [(times.prefill_s(*w), truth.prefill_s(*w)) for w in (_work(rng) for _ in range(200))]
    return statistics.median(abs(p / t - 1) for p, t in found)


@pytest.mark.parametrize(
    "truth",
    [
        PrefillCoefficients(0.006, 4e-5, 3e-10),
        PrefillCoefficients(0.05, 2e-3, 5e-8),
        PrefillCoefficients(0.0, 1e-5, 0.0),
        PrefillCoefficients(0.2, 4e-5, 3e-10),
        PrefillCoefficients(0.001, 3e-5, 6e-9),
    ],
    ids=["as-seeded", "50x-slower", "faster", "dear-pass", "dear-attention"],
)
@pytest.mark.parametrize("seed", range(3))
def test_prefill_is_within_fifteen_percent_after_fifty_noisy_passes(
    truth: PrefillCoefficients, seed: int
) -> None:
    """The first pass compiles (30×), every tenth meets a pause (5×), all have 10 % of noise."""
    rng, times = random.Random(seed), PrefillTimes(SEED)
    for i in range(50):
        new, cached = _work(rng)
        seconds = truth.prefill_s(new, cached) * rng.gauss(1, 0.1)
        factor = 30 if i == 0 else 5 if i % 10 == 9 else 1
        times.observe(new, cached, seconds * factor)
    assert _errors(times, truth, rng) <= 0.15


def test_a_lasting_change_is_believed_within_sixty_passes() -> None:
    rng, times = random.Random(5), PrefillTimes(SEED)
    for factor, passes in ((1.0, 100), (4.0, 60), (0.5, 60)):
        truth = SEED.scaled(factor)
        for _ in range(passes):
            work = _work(rng)
            times.observe(*work, truth.prefill_s(*work) * rng.gauss(1, 0.05))
        assert _errors(times, truth, rng) <= 0.15


def test_one_pause_moves_a_settled_prediction_little() -> None:
    rng, times = random.Random(2), PrefillTimes(SEED)
    for _ in range(60):
        work = _work(rng)
        times.observe(*work, SEED.prefill_s(*work) * rng.gauss(1, 0.03))
    before = times.prefill_s(2000, 0)
    times.observe(2000, 0, 100 * before)
    assert times.prefill_s(2000, 0) == pytest.approx(before, rel=0.1)


def test_first_pass_alone_changes_nothing() -> None:
    times = PrefillTimes(SEED)
    times.observe(1000, 0, 60.0)
    assert times.coefficients == SEED


def test_a_lone_pause_is_not_taken_for_a_change_but_a_row_of_them_is() -> None:
    times = PrefillTimes(SEED)
    sizes = [500, 2000, 8000, 1000, 4000]
    for i in range(40):
        times.observe(sizes[i % 5], 0, SEED.prefill_s(sizes[i % 5], 0))
    for i in range(4):
        times.observe(sizes[i], 0, 3 * SEED.prefill_s(sizes[i], 0))
    assert times.prefill_s(2000, 0) < 2 * SEED.prefill_s(2000, 0)
    times.observe(sizes[4], 0, 3 * SEED.prefill_s(sizes[4], 0))
    assert times.prefill_s(2000, 0) == pytest.approx(3 * SEED.prefill_s(2000, 0), rel=0.05)


def test_coefficients_stay_bounded_under_absurd_observations() -> None:
    rng, times = random.Random(3), PrefillTimes(SEED)
    for _ in range(300):
        new, cached = _work(rng)
        times.observe(new, cached, 10 ** rng.uniform(-9, 4))
        found = times.coefficients
        for seeded, value in ((SEED.a_s, found.a_s), (SEED.b_s, found.b_s), (SEED.c_s, found.c_s)):
            assert 0 <= value <= 200 * seeded * (1 + 1e-9)
        assert times.prefill_s(100, 0) > 0


def test_equal_passes_for_ever_keep_the_model_sane() -> None:
    """Passes that are all alike excite one direction only: the others must not wander off."""
    times = PrefillTimes(SEED)
    for _ in range(5000):
        times.observe(512, 0, SEED.prefill_s(512, 0) * 2)
    assert times.prefill_s(512, 0) == pytest.approx(2 * SEED.prefill_s(512, 0), rel=0.01)
    ratio = times.prefill_s(8192, 8192) / SEED.prefill_s(8192, 8192)
    assert 1 < ratio < 4


def test_learning_gives_the_same_bits_twice() -> None:
    def run() -> PrefillCoefficients:
        rng, times = random.Random(9), PrefillTimes(SEED)
        for _ in range(200):
            work = _work(rng)
            times.observe(*work, SEED.prefill_s(*work) * rng.gauss(1.5, 0.2))
        return times.coefficients

    assert run() == run()


def test_a_pass_over_several_requests_costs_one_fixed_part() -> None:
    rng, times = random.Random(4), PrefillTimes(SEED)
    truth = PrefillCoefficients(0.03, 8e-5, 9e-10)
    for _ in range(80):
        requests = [_work(rng) for _ in range(rng.randrange(1, 5))]
        seconds = sum(truth.prefill_s(*r) for r in requests) - truth.a_s * (len(requests) - 1)
        times.observe_pass(requests, seconds)
    assert _errors(times, truth, rng) <= 0.05


def test_empty_passes_are_ignored_and_bad_ones_refused() -> None:
    times = PrefillTimes(SEED)
    times.observe(0, 100, 1.0)
    times.observe(100, 0, 0.0)
    assert times.observed == 0
    assert times.prefill_s(0, 100) == 0
    for bad in ((-1, 0, 1.0), (1, -1, 1.0), (1, 0, -1.0), (1, 0, math.nan), (1, 0, math.inf)):
        with pytest.raises(ValueError, match="a pass of"):
            times.observe(*bad)
    for seed in ((0.0, 0.0, 0.0), (-1.0, 1.0, 1.0), (math.nan, 1.0, 1.0)):
        with pytest.raises(ConfigError, match="cannot start"):
            LinearTimes(seed)


def test_decode_learns_weights_sequences_and_context() -> None:
    truth = DecodeCoefficients(0.040, 1.5e-4, 3e-8)
    times, rng = DecodeTimes(DecodeCoefficients(0.018, 6e-5, 2.6e-8)), random.Random(1)
    for _ in range(60):
        batch = rng.randrange(1, 128)
        context = batch * rng.randrange(100, 8000)
        times.observe(batch, context, truth.decode_s(batch, context) * rng.gauss(1, 0.05))
    for batch, context in ((1, 1000), (32, 64000), (100, 400000)):
        assert times.decode_s(batch, context) == pytest.approx(
            truth.decode_s(batch, context), rel=0.1
        )
    assert times.observed == 60
    times.observe(0, 0, 1.0)
    assert times.observed == 60
    assert times.decode_s(0, 0) == 0


def test_bandwidth_and_latency_of_a_path_are_learned_apart() -> None:
    times, rng = TransferTimes({"ssd": PathSpeed(1e-4, 5e9)}), random.Random(0)
    truth = PathSpeed(0.003, 8e8)
    for _ in range(200):
        size = int(2 ** rng.uniform(10, 30))
        times.end(times.begin("ssd", size), truth.transfer_s(size) * rng.gauss(1, 0.05))
    for size in (4096, 2**20, 2**28):
        assert times.transfer_s(size, "ssd") == pytest.approx(truth.transfer_s(size), rel=0.25)


def test_what_is_queued_on_a_path_delays_what_comes_after() -> None:
    times = TransferTimes({"ssd": PathSpeed(0.001, 1e9), "peer": PathSpeed(0.001, 1e9)})
    alone = times.transfer_s(10**6, "ssd")
    first = times.begin("ssd", 10**9)
    assert times.transfer_s(10**6, "ssd") == pytest.approx(alone + 1)
    assert times.transfer_s(10**6, "peer") == pytest.approx(alone)
    second = times.begin("ssd", 10**6)
    assert second.ahead_bytes == 10**9
    times.end(first, 1.001)
    times.abandon(second)
    assert times.queued_bytes("ssd") == 0
    assert times.transfer_s(10**6, "ssd") == pytest.approx(alone)


def test_waiting_behind_others_does_not_look_like_a_slow_path() -> None:
    times = TransferTimes({"ssd": PathSpeed(0.001, 1e9)})
    for _ in range(50):
        booked = [times.begin("ssd", 10**8) for _ in range(10)]
        for place, transfer in enumerate(booked):
            times.end(transfer, 0.001 + 0.1 * (place + 1))
    assert times.speed("ssd").bytes_per_s == pytest.approx(1e9, rel=0.01)


def test_one_stall_does_not_condemn_a_path_and_a_lasting_one_does() -> None:
    times = TransferTimes({"ssd": PathSpeed(0.001, 1e9)})
    times.end(times.begin("ssd", 10**8), 100.0)
    assert times.speed("ssd").bytes_per_s > 0.5e9
    for _ in range(40):
        times.end(times.begin("ssd", 10**8), 10.0)
    assert times.speed("ssd").bytes_per_s == pytest.approx(1e7, rel=0.05)


def test_a_path_believed_dead_is_revived_by_what_arrives() -> None:
    times = TransferTimes({"peer": PathSpeed(0.01, 0.0)})
    assert times.transfer_s(1, "peer") == math.inf
    assert times.transfer_s(0, "peer") == 0
    times.end(times.begin("peer", 10**6), 0.1)
    assert times.speed("peer").bytes_per_s == pytest.approx(1e7)
    times.add_path("peer", PathSpeed(0.0, 5.0))
    assert times.state("peer").speed == PathSpeed(0.0, 5.0)
    assert times.paths == ("peer",)


def test_misuse_of_paths_is_refused() -> None:
    times = TransferTimes({"ssd": PathSpeed(0.001, 1e9)})
    with pytest.raises(ConfigError, match="unknown path 'sd'; known: ssd"):
        times.transfer_s(1, "sd")
    with pytest.raises(ConfigError, match="bytes_per_s must be 0 or more"):
        PathSpeed(0.1, math.nan)
    with pytest.raises(ValueError, match="-1 bytes"):
        times.begin("ssd", -1)
    booked = times.begin("ssd", 5)
    with pytest.raises(ValueError, match="nan s"):
        times.end(booked, math.nan)
    times.end(booked, 0.0)
    with pytest.raises(ValueError, match="not open"):
        times.abandon(booked)


def test_overhead_of_a_load_and_of_its_blocks_are_learned_apart() -> None:
    overhead, rng = LoadOverhead(per_load_s=1e-3, per_block_s=1e-5), random.Random(0)
    for _ in range(300):
        blocks = int(2 ** rng.uniform(0, 11))
        overhead.observe(blocks, 0.004 + blocks * 8e-5)
    for blocks in (1, 50, 1000):
        assert overhead.overhead_s(blocks) == pytest.approx(0.004 + blocks * 8e-5, rel=0.3)
    assert overhead.overhead_s(0) == 0
    with pytest.raises(ValueError, match="a load of 0 blocks"):
        overhead.observe(0, 1.0)


def test_the_first_interval_replaces_the_guess_and_later_ones_count_by_their_length() -> None:
    times = TransferTimes({"ssd": PathSpeed(1e-3, 5e9)})
    assert not times.measured("ssd")
    times.observe_rate("ssd", 10_000_000, 0.1)
    assert times.measured("ssd")
    assert times.speed("ssd").latency_s == 1e-3
    assert times.speed("ssd").bytes_per_s == pytest.approx(1e8)
    times.observe_rate("ssd", 200_000, 0.001)
    barely = times.speed("ssd").bytes_per_s
    assert 1.05e8 < barely < 1.2e8
    times.observe_rate("ssd", 200_000_000, 1.0)
    assert times.speed("ssd").bytes_per_s > 1.7e8


@pytest.mark.parametrize(("size", "busy"), [(0, 1.0), (1, 0.0), (1, math.inf)])
def test_an_interval_without_bytes_or_time_is_refused(size: int, busy: float) -> None:
    times = TransferTimes({"ssd": PathSpeed(1e-3, 5e9)})
    with pytest.raises(ValueError, match="bytes in"):
        times.observe_rate("ssd", size, busy)
