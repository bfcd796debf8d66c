"""Which part of a long prompt makes steps too long for those that decode beside it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_router import ask, speeds

from kvist.cost.decode import DecodeTimes
from kvist.cost.prefill import PrefillCoefficients, PrefillTimes
from kvist.router.candidates import NOTHING, Prefix
from kvist.router.exchange import OtherGateways
from kvist.router.lengths import Distribution
from kvist.router.replicas import Replica, Speeds, View
from kvist.router.serving import Step, stalling_s

TIMES = PrefillCoefficients(0.01, 1e-4, 1e-8)


def _chunks_s(prompt: int, cached: int, step: Step) -> float:
    """Chunk by chunk."""
    total_s, done = 0.0, cached
    while done < prompt:
        chunk_s = TIMES.prefill_s(min(step.tokens, prompt - done), done)
        if TIMES.prefill_s(step.tokens, done) + step.beside_s > step.limit_s:
            total_s += chunk_s
        done += step.tokens
    return total_s


@given(
    st.integers(1, 100_000),
    st.integers(0, 50_000),
    st.sampled_from((256, 1000, 4096)),
    st.floats(0, 0.5),
    st.floats(0.05, 3.0),
)
def test_it_is_the_time_of_the_chunks_that_are_too_long(
    prompt: int, cached: int, tokens: int, beside_s: float, limit_s: float
) -> None:
    step = Step(tokens, beside_s, limit_s)
    one_s = TIMES.prefill_s(tokens, prompt)  # where it begins may fall within a chunk
    found_s = stalling_s(prompt, cached, TIMES, step)
    assert found_s == pytest.approx(_chunks_s(prompt, cached, step), abs=2 * one_s)


def test_no_step_is_too_long_where_time_does_not_grow_with_depth() -> None:
    flat = PrefillCoefficients(0.01, 1e-4, 0.0)
    assert stalling_s(100_000, 0, flat, Step(1000, 0.0, 0.2)) == 0.0
    every = stalling_s(100_000, 0, flat, Step(1000, 0.1, 0.2))
    assert every == pytest.approx(100 * 0.11)


def _view(*, live: int = 0, prompt: int = 100_000, **changes: object) -> View:
    known: dict[str, object] = {"step_tokens": 1000, "tbt_s": 0.5, **changes}
    made = speeds(loads=True)
    own = Speeds(
        PrefillTimes(TIMES),
        DecodeTimes(made.decode.coefficients),
        64,
        made.loading,
        **known,  # type: ignore[arg-type]
    )
    replica = Replica("a", "both", own, OtherGateways(random.Random(0)))
    for n in range(live):
        replica.contexts.expect(n, 1000, 0.0, Distribution())
        replica.contexts.begin(n, 0.0)
    return View(
        replica, ask("1", prompt), (), NOTHING, replicas=1, stays=False, now_s=0.0, decode_s=1.0
    )


def test_a_view_tells_it_of_what_is_not_cached_while_some_decode() -> None:
    whole_s = _view(live=4).stalls_s(NOTHING)
    assert 0 < whole_s < TIMES.prefill_s(100_000, 0) + 1.0
    assert 0 < _view(live=4).stalls_s(Prefix(0, 0, 0, 90_000)) < whole_s
    assert _view(live=4, prompt=1000).stalls_s(NOTHING) == 0.0


@pytest.mark.parametrize(
    "view",
    [_view(), _view(live=4, step_tokens=None), _view(live=4, tbt_s=float("inf"))],
    ids=["nobody decodes", "steps are not known", "nothing is promised"],
)
def test_nothing_stalls_where_it_cannot_be_told(view: View) -> None:
    assert view.stalls_s(NOTHING) == 0.0
