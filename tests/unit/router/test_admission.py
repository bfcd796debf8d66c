"""The rules, and what is foreseen of a decode pool."""

from __future__ import annotations

import functools
import random

import pytest
from small_router import DECODE, ask, chosen, router, speeds

from kvist.cost.learner import WARM_UP
from kvist.router.admission import Admission, Limits, Rule, share_of_limits
from kvist.router.bookings import Work
from kvist.router.conductor import KvistRouter, Setting
from kvist.router.decode_load import LOOKED_AT, REACH, step_at_s, step_now_s
from kvist.router.exchange import LoadReport, OtherGateways, ReplicaLoad
from kvist.router.lengths import Distribution, Groups
from kvist.router.protocol import Choice, Refused
from kvist.router.replicas import Replica

NEVER = Distribution(0.001)  # nothing ended yet


def _replica(
    live: int = 0, coming: int = 0, *, at_s: float = 0.0, times: Distribution = NEVER
) -> Replica:
    made = Replica("d", "decode", speeds(), OtherGateways(random.Random(0)))
    for n in range(live + coming):
        made.contexts.expect(n, 10_000, at_s, times)
    for n in range(live):
        made.contexts.begin(n, 0.0)
    return made


def _lasting(*seconds: float) -> Distribution:
    times = Distribution(0.001)
    for value in seconds:
        times.add(value)
    return times


def test_a_step_now_counts_those_that_decode() -> None:
    made = _replica(live=3, coming=5)
    assert step_now_s(made) == DECODE.decode_s(3, 30_000)
    assert step_now_s(made, 1, 500) == DECODE.decode_s(4, 30_500)


def test_what_is_in_prefill_counts_if_its_first_token_comes_before() -> None:
    made = _replica(live=1, coming=2, at_s=5.0)
    before, after = (step_at_s(made, 10_000, at_s, 0.0) for at_s in (4.9, 5.0))
    assert before == pytest.approx(DECODE.decode_s(2, 20_000))
    assert after == pytest.approx(DECODE.decode_s(4, 40_000))


def test_who_comes_late_is_overtaken_by_some_that_are_not_booked_yet() -> None:
    # Ten decode for 20 s each, so one comes every 2 s; four are booked and have come by 8 s.
    made = _replica(live=10, coming=4, at_s=2.0, times=_lasting(*[20.0] * 50))
    steps = [step_at_s(made, 10_000, at_s, 0.0) for at_s in (8.0, 12.0, 18.0)]
    expected = [DECODE.decode_s(n, n * 10_000) for n in (15, 17, 20)]
    assert steps == pytest.approx(expected, rel=0.01)


def test_of_very_many_some_stand_for_all() -> None:
    """Each request looked at all ten thousand that were there: milliseconds of everybody's time."""
    times = _lasting(*[10.0] * 50, *[100.0] * 50)
    for live in (LOOKED_AT, LOOKED_AT + 1, 10 * LOOKED_AT):
        step_s = step_at_s(_replica(live=live, times=times), 0, 30.0, 0.0)
        came = live / 55 * 30
        assert step_s == pytest.approx(_step_s(1 + live / 2 + came, live / 2 + came), rel=0.02)


def test_what_decodes_now_is_gone_by_the_share_that_ends_until_then() -> None:
    made = _replica(live=10, times=_lasting(*[10.0] * 50, *[100.0] * 50))
    came = 10 / 55 * 30  # at the mean of 55 s, of which none is booked yet
    half = step_at_s(made, 0, 30.0, 0.0)
    assert half == pytest.approx(_step_s(1 + 5 + came, 5 + came), rel=0.02)
    # What outlived the short ones is one of the long.
    old = step_at_s(made, 0, 50.0, 20.0)
    assert old == pytest.approx(_step_s(1 + 10 + came, 10 + came), rel=0.02)
    gone = step_at_s(made, 0, 300.0, 0.0)
    assert gone == pytest.approx(_step_s(1 + 10 * came, 10 * came), rel=0.02)


def _step_s(batch: float, contexts: float) -> float:
    return DECODE.d0_s + DECODE.d1_s * batch + DECODE.d2_s * contexts * 10_000


def test_what_a_request_has_waited_counts_against_its_limit() -> None:
    made = Admission(Rule.PREDICTIVE, Limits(10.0, 1.0), Groups(0.001))
    judged = functools.partial(made.at_door, queue_s=0.0, decode=_replica(), now_s=0.0)
    at_door = functools.partial(judged, serve_s=2.0)
    assert at_door(ask("fine", waited_s=7.4)) is None
    late = at_door(ask("late", waited_s=9.5))
    assert late == Refused("ttft", pytest.approx(2.0))
    assert at_door(ask("urgent", waited_s=9.5, priority=1)) is None
    assert at_door(ask("again", waited_s=9.5, admitted=True)) is None
    assert judged(ask("endless", waited_s=0.1), serve_s=12.0) is None  # nobody would be in time


def test_others_requests_count_in_every_step() -> None:
    others = OtherGateways(random.Random(0))
    others.hear(LoadReport("g", 1, 0.0, {"d": ReplicaLoad(0, 4, 0, 0, 4, 40_000, 0)}), 0.0)
    made = Replica("d", "decode", speeds(), others)
    assert step_now_s(made) == pytest.approx(DECODE.decode_s(4, 40_000))


def _judge(rule: Rule, *, tbt_s: float, ttft_s: float = 1.0, **more: object) -> Refused | None:
    times = Groups(0.001)
    for _ in range(30):
        times.observe("", "", 10.0)
    admission = Admission(rule, Limits(ttft_s, tbt_s), times)
    made = _replica(live=100, coming=100, at_s=5.0)
    queue_s = 5.5 if ttft_s > 1 else 0.1
    return admission.at_door(ask("r", **more), queue_s, 0.5, made, 0.0)


def test_each_rule_looks_at_decode_when_it_says() -> None:
    # Now 100 decode: 0.13 s a step. In six seconds all of them and 100 more: 0.24 s.
    assert _judge(Rule.NONE, tbt_s=0.01, ttft_s=0.1) is None
    assert _judge(Rule.BASELINE, tbt_s=0.01) is None
    assert _judge(Rule.EARLY, tbt_s=0.14, ttft_s=9.0) is None
    early = _judge(Rule.EARLY, tbt_s=0.12, ttft_s=9.0)
    assert early is not None
    assert early.reason == "tbt"
    predictive = _judge(Rule.PREDICTIVE, tbt_s=0.14, ttft_s=9.0)
    assert predictive == Refused("tbt", pytest.approx(10.0, rel=0.06))
    assert _judge(Rule.PREDICTIVE, tbt_s=0.26, ttft_s=9.0) is None


def test_retry_after_is_bounded_on_both_sides() -> None:
    admission = Admission(Rule.BASELINE, Limits(1.0, 1.0), Groups())
    waits = [admission.at_door(ask("r"), q, 0.01, _replica(), 0.0) for q in (1.0, 30.94, 1e6)]
    assert [w.retry_after_s for w in waits if w] == pytest.approx([1.0, 30.0, 60.0])


def test_an_idle_replica_takes_what_it_cannot_do_in_time() -> None:
    admission = Admission(Rule.PREDICTIVE, Limits(1.0, 0.001), Groups())
    assert admission.at_door(ask("r"), 0.0, 50.0, _replica(), 0.0) is None
    assert admission.before_decode(ask("r"), _replica(live=1, coming=1)) is None
    busy = _replica(coming=1)
    assert admission.at_door(ask("r"), 0.0, 50.0, busy, 0.0) == Refused("tbt", 1.0)


def test_shares_of_limits_grow_with_priority() -> None:
    assert [share_of_limits(p) for p in (-5, -1, 0, 1, 9)] == [0.8, 0.8, 0.95, 1.5, 1.5]


def test_a_computed_prompt_is_judged_again_by_its_decode_replica() -> None:
    setting = Setting(admission=Rule.BASELINE, limits=Limits(100.0, 0.025))
    made = router("p:prefill", "d:decode", setting=setting)
    bookings = []
    for n in range(30):
        one = chosen(made.choose(ask(str(n), 1000), 0.0))
        made.first_token(one.booking, 1.0)
        bookings.append(one.booking)
    late = [made.joins(booking) for booking in bookings]
    assert late[0] == Refused("tbt", 1.0)
    made.finish(bookings[0], 2.0, failed=True)
    assert made.joins(bookings[0]) is None  # is over
    moved = made.choose(ask("moved", 1000, admitted=True), 2.0)
    assert isinstance(moved, Choice)
    assert made.joins(moved.booking) is None


def test_a_replica_that_does_both_is_judged_by_itself_alone() -> None:
    setting = Setting(admission=Rule.EARLY, limits=Limits(100.0, 0.0226))
    made = router("a", setting=setting)
    for n in range(9):
        found = made.choose(ask(str(n), 1000), 0.0)
        if isinstance(found, Choice):
            made.first_token(found.booking, 0.5)
    assert made.booked == 7  # an eighth would make a step of 0.0216 s, beyond 95 % of it
    made.add("b")
    assert isinstance(made.choose(ask("more", 1000), 1.0), Choice)


def _decoding(made: KvistRouter, count: int) -> list[int]:
    """So many bookings that have their first token, which came at once; all are let in."""
    found = [chosen(made.choose(ask(str(n), 1000), 0.0)).booking for n in range(count)]
    for booking in found:
        made.first_token(booking, 0.0)
    return found


def test_a_guess_of_decode_times_refuses_nothing_until_steps_were_timed() -> None:
    """Ten thousand idle streams: 429, since a step of so many was guessed to take a second."""
    setting = Setting(admission=Rule.PREDICTIVE, limits=Limits(100.0, 0.03))
    known = router("a", setting=setting)
    with pytest.raises(AssertionError, match="tbt"):
        _decoding(known, 200)
    made = router("a", setting=setting, guessed=True)
    bookings = _decoding(made, 200)
    for n in range(1, WARM_UP + 2):  # the first look only begins
        made.finish(chosen(made.choose(ask(f"before{n}"), 0.0)).booking, 0.0)
        made.progress(bookings[0], 1 + 10 * n, 0.5 * n)  # 50 ms a step
    assert made.choose(ask("after"), 3.0) == Refused("tbt", 1.0)


def test_a_step_is_foreseen_up_to_a_few_times_the_largest_batch_that_was_timed() -> None:
    setting = Setting(admission=Rule.PREDICTIVE, limits=Limits(100.0, 0.03))
    made = router("a", setting=setting, guessed=True)
    bookings = _decoding(made, 10)
    for n in range(1, WARM_UP + 2):  # the first look only begins
        made.progress(bookings[0], 1 + 10 * n, 10 * n * DECODE.decode_s(10, 10_000))
    # A batch of 40 is predicted to take 0.028 s, one of 80 more than the limit.
    assert REACH * 10 == 40
    _decoding(made, 100)
    # What was timed is foreseen in full.
    for n in range(WARM_UP + 1, 3 * WARM_UP):
        made.progress(bookings[0], 1 + 10 * n, 100.0 + 10 * n * DECODE.decode_s(110, 110_000))
    assert isinstance(made.choose(ask("after"), 200.0), Refused)


def test_work_given_up_teaches_no_speed() -> None:
    made = _replica()
    before = made.speeds.prefill.coefficients
    for n in range(20):
        made.queues(n, Work(1.0, 1000, 0), float(n))
        made.computed(n, Work(1.0, 1000, 0), n + 0.5, done=False)
    assert made.speeds.prefill.coefficients == before
    assert made.speeds.prefill.observed == 0
