"""`bench/quality/measures.py`: divergence, perplexity and agreement against cases done by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvist.bench.quality.measures import agreed_tokens, compare, log_softmax, perplexity

HALF_HALF = np.log(np.array([[0.5, 0.5]], dtype=np.float32))
QUARTER = np.log(np.array([[0.25, 0.75]], dtype=np.float32))


def test_kl_of_equal_predictions_is_zero() -> None:
    logits = np.random.default_rng(1).normal(0, 8, (40, 1000)).astype(np.float32)
    found = compare(logits, logits.copy(), list(range(40)))
    assert (found.kl_nats == 0).all()
    assert found.same_top.all()


def test_kl_does_not_depend_on_the_offset_of_the_logits() -> None:
    logits = np.random.default_rng(2).normal(0, 4, (3, 50)).astype(np.float32)
    shifted = (logits.astype(np.float64) + 16).astype(np.float32)  # exact enough in float32
    assert compare(logits, shifted, [0, 0, 0]).kl_nats.max() < 1e-10


def test_kl_and_surprise_equal_the_case_done_by_hand() -> None:
    found = compare(HALF_HALF, QUARTER, [1])
    by_hand = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert found.kl_nats[0] == pytest.approx(by_hand, rel=1e-6)
    assert found.surprise_nats[0] == pytest.approx(-math.log(0.75), rel=1e-6)


def test_kl_is_of_the_reference_to_the_other_and_not_the_reverse() -> None:
    back = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert compare(QUARTER, HALF_HALF, [0]).kl_nats[0] == pytest.approx(back, rel=1e-6)


def test_tokens_that_cannot_be_are_free_and_those_that_became_impossible_cost_everything() -> None:
    never = np.array([[0.0, -np.inf]], dtype=np.float32)
    both = np.array([[0.0, 0.0]], dtype=np.float32)
    assert compare(never, both, [0]).kl_nats[0] == pytest.approx(math.log(2))
    assert compare(both, never, [0]).kl_nats[0] == math.inf


def test_predictions_that_are_not_numbers_are_infinitely_far_and_agree_with_nothing() -> None:
    broken = np.array([[np.nan, 0.0], [0.0, 1.0]], dtype=np.float32)
    found = compare(np.array([[0.0, 1.0], [0.0, 1.0]], dtype=np.float32), broken, [1, 1])
    assert found.kl_nats.tolist() == [math.inf, 0.0]
    assert found.surprise_nats[0] == math.inf
    assert found.same_top.tolist() == [False, True]


def test_logits_of_different_shapes_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="2 targets"):
        compare(HALF_HALF, QUARTER, [0, 1])


def test_probabilities_sum_to_one_however_large_the_logits() -> None:
    logits = np.array([[1e4, 1e4 - 1, -1e4]], dtype=np.float32)
    assert np.exp(log_softmax(logits)).sum() == pytest.approx(1)


def test_perplexity_of_a_fair_choice_is_the_number_of_choices() -> None:
    assert perplexity(np.full(7, math.log(10))) == pytest.approx(10)
    # By hand: tokens of probability 1/2 and 1/8 are on average 1/4.
    assert perplexity(np.array([math.log(2), math.log(8)])) == pytest.approx(4)
    assert perplexity(np.array([math.inf, 1.0])) == math.inf


def test_answers_agree_up_to_the_first_token_that_differs() -> None:
    assert agreed_tokens([1, 2, 3], [1, 2, 3]) == 3
    assert agreed_tokens([1, 2, 3], [1, 9, 3]) == 1
    assert agreed_tokens([1, 2, 3], [1, 2]) == 2
    assert agreed_tokens([], [1]) == 0
