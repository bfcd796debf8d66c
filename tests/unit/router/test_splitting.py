"""Where a prompt is computed beside prefill replicas, and that each booking ends on both sides."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_router import PREFILL, Held, ask, chosen, own, router

from kvist.cost.learner import WARM_UP
from kvist.router.admission import Limits
from kvist.router.admission import Rule as Admits
from kvist.router.conductor import KvistRouter, Setting
from kvist.router.protocol import Choice, Refused
from kvist.router.splitting import HandoverTimes, Rule, Splitting

POOLS = ("p:prefill", "q:prefill", "d:decode", "e:decode")
names = itertools.count()


def split(rule: Rule, *replicas: str, held: Held | None = None, **more: Any) -> KvistRouter:
    """A router of pools."""
    return router(
        *(replicas or POOLS), held=held, setting=Setting(splitting=Splitting(rule, **more))
    )


def decodes(made: KvistRouter, replica: str, requests: int) -> None:
    """So many requests decode at a replica, and only there."""
    others = frozenset("de") - {replica}
    for _ in range(requests):
        found = chosen(made.choose(ask(str(next(names)), 100, exclude=others), 0.0))
        assert found.replica == replica
        made.prefilled(found.booking, 0.0)
        made.first_token(found.booking, 0.0)


def test_cost_computes_a_prompt_where_nobody_is_held_up_by_it() -> None:
    made = split(Rule.COST)
    idle = chosen(made.choose(ask("1", 5000), 0.0))
    assert (idle.prefill, idle.split) == (None, "local: cheaper")
    decodes(made, "d", 3)
    decodes(made, "e", 3)
    busy = chosen(made.choose(ask("2", 5000), 0.0))
    assert (busy.prefill in {"p", "q"}, busy.split) == (True, "remote: cheaper")
    assert busy.ttft_s > PREFILL.prefill_s(5000, 0)  # and the handover


def test_cost_leaves_a_prompt_where_most_of_it_is_cached() -> None:
    held = Held()
    made = split(Rule.COST, held=held)
    decodes(made, "d", 8)
    decodes(made, "e", 8)
    assert chosen(made.choose(ask("1", 6400), 0.0)).prefill is not None
    held.found = {"e": own(6336)}
    found = chosen(made.choose(ask("2", 6400), 0.0))
    assert (found.replica, found.prefill, found.split) == ("e", None, "local: cheaper")


def test_cost_weighs_the_queue_of_the_prefill_replicas() -> None:
    made = split(Rule.COST, "p:prefill", "d:decode")
    decodes(made, "d", 1)
    where = [chosen(made.choose(ask(str(n), 5000), 0.0)).prefill for n in range(6)]
    assert where[0] == "p"
    assert None in where


def test_length_is_the_rule_of_dynamo() -> None:
    held = Held()
    made = split(Rule.LENGTH, "p:prefill", "d:decode", held=held, length_tokens=2048, queued=2)
    assert chosen(made.choose(ask("1", 2048), 0.0)).split == "local: short"
    held.found = {"d": own(6400)}
    assert chosen(made.choose(ask("2", 8448), 0.0)).split == "local: short"
    assert chosen(made.choose(ask("3", 8449), 0.0)).split == "remote: long"
    assert chosen(made.choose(ask("4", 9000), 0.0)).split == "remote: long"
    assert chosen(made.choose(ask("5", 9000), 0.0)).split == "local: queue"


@pytest.mark.parametrize(("rule", "where"), [(Rule.ALWAYS, "remote"), (Rule.NEVER, "local")])
def test_always_and_never_are_what_they_say(rule: Rule, where: str) -> None:
    made = split(rule)
    for tokens in (1, 100, 50_000):
        assert chosen(made.choose(ask(str(tokens), tokens), 0.0)).split == f"{where}: {rule.value}"


def test_what_cannot_be_split_and_what_has_no_prefill_replica_stays_with_one() -> None:
    made = split(Rule.ALWAYS)
    assert chosen(made.choose(ask("1", undivided=True), 0.0)).split == "local: undivided"
    for name in "pq":
        made.set_state(name, healthy=False)
    found = chosen(made.choose(ask("2"), 0.0))
    assert (found.prefill, found.split) == (None, "local: no-prefill")


def test_prefill_replicas_alone_answer_nothing() -> None:
    made = split(Rule.COST)
    for name in "de":
        made.set_state(name, healthy=False)
    assert made.choose(ask("1"), 0.0) == Refused("no-replica", 5.0)


def test_a_prompt_that_was_computed_elsewhere_leaves_its_queue_and_teaches_the_handover() -> None:
    made = split(Rule.ALWAYS, "p:prefill", "d:decode")
    before = chosen(made.choose(ask("0", 10_000), 0.0))
    made.finish(before.booking, 0.0)
    for n in range(20):
        now_s = 10.0 * n
        found = chosen(made.choose(ask(f"x{n}", 10_000), now_s))
        assert made.report("g", now_s).loads["p"].waiting == 1
        made.prefilled(found.booking, now_s + 1.0)
        assert "p" not in made.report("g", now_s + 1.0).loads
        made.prefilled(found.booking, now_s + 1.0)  # once is enough
        made.first_token(found.booking, now_s + 3.0)
        made.finish(found.booking, now_s + 4.0)
    after = chosen(made.choose(ask("y", 10_000), 1000.0))
    assert after.ttft_s - (after.prefill_s or math.inf) == pytest.approx(2.0, rel=0.1)
    assert after.prefill_s == pytest.approx(1.0, rel=0.1)
    assert before.ttft_s < 1.5


def test_nothing_is_said_of_a_prefill_before_its_replica_is_known() -> None:
    made = split(Rule.ALWAYS, "p:prefill", "d:decode")
    for n in range(WARM_UP):
        found = chosen(made.choose(ask(str(n), 10_000), 10.0 * n))
        assert found.prefill_s is None
        made.prefilled(found.booking, 10.0 * n + 4.0)
        made.finish(found.booking, 10.0 * n + 5.0)
    assert chosen(made.choose(ask("x", 10_000), 99.0)).prefill_s == pytest.approx(4.0, rel=0.1)


def test_a_prefill_that_was_given_up_is_work_of_the_replica_that_answers() -> None:
    made = split(Rule.ALWAYS, "p:prefill", "d:decode")
    found = chosen(made.choose(ask("1", 10_000), 0.0))
    made.prefilled(found.booking, 1.0, done=False)
    loads = made.report("g", 1.0).loads
    assert "p" not in loads
    assert (loads["d"].waiting, loads["d"].prefill_tokens) == (1, 10_000)
    made.first_token(found.booking, 2.0)
    assert made.report("g", 2.0).loads["d"].waiting == 0
    made.finish(found.booking, 3.0)
    assert made.report("g", 3.0).loads == {}


def test_a_request_is_judged_again_when_its_prompt_was_computed() -> None:
    limited = Setting(
        admission=Admits.BASELINE, limits=Limits(99.0, 0.025), splitting=Splitting(Rule.ALWAYS)
    )
    made = router("p:prefill", "d:decode", setting=limited)
    for n in range(60):
        found = chosen(made.choose(ask(str(n), 1000), 0.0))
        made.prefilled(found.booking, 0.1)
        refused = made.joins(found.booking)
        made.first_token(found.booking, 0.2)
        if refused is not None:
            break
    assert refused is not None
    assert refused.reason == "tbt"


def test_there_is_room_while_a_replica_of_either_pool_has_little_queued() -> None:
    made = router(
        "p:prefill", "d:decode", setting=Setting(hold_s=0.5, splitting=Splitting(Rule.COST))
    )
    for n in range(8):
        assert made.has_room(0.0) == (n < 2)
        made.choose(ask(str(n), 10_000), 0.0)
    always = router(
        "p:prefill", "d:decode", setting=Setting(hold_s=0.5, splitting=Splitting(Rule.ALWAYS))
    )
    always.choose(ask("x", 10_000), 0.0)
    assert not always.has_room(0.0)


def test_handover_times_are_learned() -> None:
    times = HandoverTimes(50_000.0)
    assert times.predict_s(50_000) == pytest.approx(1.0, rel=0.01)
    for n in range(30):
        times.observe(1000 * (n % 7), 0.1 + n % 7)
    assert times.predict_s(3000) == pytest.approx(3.1, rel=0.05)


@given(st.data())
def test_whatever_comes_in_whatever_order_nothing_stays_booked(data: st.DataObject) -> None:
    rule = data.draw(st.sampled_from(Rule))
    setting = Setting(
        admission=Admits.PREDICTIVE,
        limits=Limits(3.0, 0.1),
        splitting=Splitting(rule, length_tokens=500, queued=2),
    )
    made = router("a", "b:prefill", "c:decode", "f:prefill", setting=setting)
    bookings: list[int] = []
    now_s = 0.0
    for n in range(data.draw(st.integers(1, 40))):
        now_s += data.draw(st.sampled_from((0.0, 0.1, 2.0)))
        what = data.draw(
            st.sampled_from(("choose", "prefilled", "late", "joins", "first", "finish", "lose"))
        )
        booking = data.draw(st.sampled_from([*bookings, 999]))
        if what == "choose":
            more = {"undivided": n % 5 == 0}
            found = made.choose(ask(str(n), data.draw(st.integers(1, 9000)), "t", **more), now_s)
            if isinstance(found, Choice):
                bookings.append(found.booking)
        elif what in ("prefilled", "late"):
            made.prefilled(booking, now_s, done=what == "prefilled")
        elif what == "joins":
            made.joins(booking)
        elif what == "first":
            made.first_token(booking, now_s)
        elif what == "finish":
            made.finish(booking, now_s, failed=n % 2 == 0)
        else:
            made.set_state(data.draw(st.sampled_from("abcf")), healthy=n % 2 == 0)
    for booking in bookings:
        made.finish(booking, now_s)
    assert made.booked == 0
    assert made.report("g", now_s).loads == {}
    for replica in made._replicas.values():
        assert (len(replica.queue), len(replica.contexts), len(replica.blocks)) == (0, 0, 0)
        assert replica.queue.left_s(now_s) == replica.contexts.tokens == 0
