"""Many decode steps in one event give what one at a time would."""

from __future__ import annotations

import pytest
from small_cluster import DECODE, request

from kvist.sim.des.decoding import DecodeBatch
from kvist.sim.des.sequence import Sequence, longest_gaps_mean_s


def _sequence(number: int, tokens: int, output: int, first_token_s: float = 0.0) -> Sequence:
    sequence = Sequence(number, request(0, f"s{number}", tokens, output), 0.0, 64, 1)
    sequence.token_at(first_token_s)
    return sequence


def _play(batch: DecodeBatch, runs: list[int]) -> tuple[float, list[Sequence]]:
    now_s, done = 0.0, []
    for steps in runs:
        first_s, all_s = batch.step_s(), batch.run_s(steps)
        done += batch.commit(now_s + first_s, now_s + all_s, steps)
        now_s += all_s
    return now_s, done


def test_one_run_of_steps_takes_as_long_as_the_steps_one_by_one() -> None:
    results = []
    for runs in ([40], [1] * 40, [3, 17, 20]):
        batch = DecodeBatch(DECODE)
        members = [_sequence(0, 1000, 41), _sequence(1, 300, 100)]
        for sequence in members:
            batch.join(sequence)
        end_s, done = _play(batch, runs)
        assert done == members[:1]
        assert members[0].generated == 41
        assert batch.context_tokens == 300 + 41
        results.append((end_s, sum(g * n for g, n in members[0].gaps)))
    assert results[1] == pytest.approx(results[0], rel=1e-12)
    assert results[2] == pytest.approx(results[0], rel=1e-12)


def test_steps_after_is_the_step_that_is_under_way() -> None:
    batch = DecodeBatch(DECODE)
    batch.join(_sequence(0, 5000, 500))
    for steps in (1, 2, 7, 100, 499):
        end_s = batch.run_s(steps)
        assert batch.steps_after(end_s) == steps
        assert batch.steps_after(end_s * (1 + 1e-9)) == steps + 1
        assert batch.steps_before(end_s * (1 + 1e-9)) == steps
        assert batch.steps_before(end_s * (1 - 1e-9)) == steps - 1
    assert batch.steps_after(0.0) == 1
    assert batch.steps_before(0.0) == 0


def test_a_sequence_that_joins_later_has_a_first_gap_of_its_own() -> None:
    batch = DecodeBatch(DECODE)
    early, late = _sequence(0, 100, 50), _sequence(1, 100, 3, first_token_s=0.0)
    batch.join(early)
    now_s, _ = _play(batch, [10])
    late.last_token_s = now_s - 0.5  # its KV was half a second on its way
    batch.join(late)
    step_s = batch.step_s()
    done = batch.commit(now_s + step_s, now_s + batch.run_s(2), 2)
    assert done == [late]
    assert late.gaps[0] == (pytest.approx(0.5 + step_s), 1)
    assert sum(count for _, count in late.gaps) == 2
    assert late.generated == 3


def test_a_prefill_between_two_steps_is_part_of_the_gap() -> None:
    batch = DecodeBatch(DECODE)
    sequence = _sequence(0, 100, 12)
    batch.join(sequence)
    now_s, _ = _play(batch, [5])
    start_s = now_s + 2.0
    batch.commit(start_s + batch.step_s(), start_s + batch.run_s(6), 6)
    longest = max(gap for gap, _ in sequence.gaps)
    assert longest == pytest.approx(2.0 + DECODE.decode_s(1, 100 + 6), rel=1e-9)


def test_leaving_gives_the_tokens_and_gaps_until_then() -> None:
    batch = DecodeBatch(DECODE)
    stays, leaves, fresh = (_sequence(n, 100, 50) for n in range(3))
    batch.join(stays)
    batch.join(leaves)
    _play(batch, [10])
    batch.join(fresh)
    batch.leave(leaves)
    batch.leave(fresh)
    assert (leaves.generated, fresh.generated) == (11, 1)
    assert sum(count for _, count in leaves.gaps) == 10
    assert fresh.gaps == []
    assert batch.context_tokens == 111
    assert list(batch.members) == [stays]


@pytest.mark.parametrize(
    ("gaps", "mean_s"),
    [
        ([], 0.0),
        ([(0.1, 1)], 0.1),
        ([(0.1, 9), (1.0, 1)], 1.0),
        ([(0.1, 18), (1.0, 1), (0.5, 1)], 0.75),
        ([(0.1, 29), (1.0, 1)], 0.4),
        ([(0.1, 10), (0.2, 1)], 0.15),  # 10 % of 11 is two
    ],
)
def test_tbt_is_the_mean_of_the_longest_tenth_of_gaps(
    gaps: list[tuple[float, int]], mean_s: float
) -> None:
    assert longest_gaps_mean_s(gaps) == pytest.approx(mean_s)
