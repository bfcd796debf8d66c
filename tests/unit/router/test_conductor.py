"""The router: what it chooses from its bookings, and that every booking is closed."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_router import PREFILL, Held, ask, chosen, own, router

from kvist.core.errors import ConfigError
from kvist.router.admission import Limits, Rule
from kvist.router.candidates import Prefix
from kvist.router.conductor import KvistRouter, Setting
from kvist.router.protocol import Choice, Need, Refused, Router


def test_it_is_a_router_and_books_what_it_chose() -> None:
    made: Router = router("a", "b")
    first = chosen(made.choose(ask("1", 10_000), 0.0))
    second = chosen(made.choose(ask("2", 10_000), 0.0))
    assert {first.replica, second.replica} == {"a", "b"}
    assert first.ttft_s == pytest.approx(PREFILL.prefill_s(10_000, 0))
    assert made.booked == 2
    third = chosen(made.choose(ask("3", 10_000), 0.0))
    assert third.ttft_s == pytest.approx(2 * first.ttft_s)
    assert third.reason.startswith("kvist: queue 1.010 s, serve 1.010 s, 0 of 10000")


def test_requests_that_come_together_do_not_take_the_same_replica() -> None:
    made = router(*"abcdefgh")
    taken = Counter(chosen(made.choose(ask(str(n), 5000), 0.0)).replica for n in range(64))
    assert set(taken.values()) == {8}


def test_a_prefix_draws_a_request_until_its_queue_outweighs_it() -> None:
    held = Held()
    held.found = {"b": own(4992)}
    made = router("a", "b", held=held)
    one = chosen(made.choose(ask("1", 5000), 0.0))
    assert (one.replica, one.hit_tokens) == ("b", 4992)
    for n in range(100):
        made.choose(ask(f"x{n}", 5000), 0.0)
    load = Counter(chosen(made.choose(ask(f"y{n}", 5000), 0.0)).replica for n in range(100))
    assert load["a"] > 0


def test_siblings_follow_the_first_of_them_before_any_block_is_stored() -> None:
    made = router("a", "b", "c")
    first = chosen(made.choose(ask("1", 6400, text="shared"), 0.0))
    sibling = chosen(made.choose(ask("2", 6464, text="shared"), 0.1))
    assert sibling.replica == first.replica
    assert sibling.hit_tokens == 6400
    for booking in (first.booking, sibling.booking):
        made.finish(booking, 1.0)
    assert chosen(made.choose(ask("3", 6400, text="shared"), 1.0)).hit_tokens == 0


def test_the_last_block_of_a_prompt_is_never_counted_as_cached() -> None:
    made = router("a")
    made.choose(ask("1", 640, text="same"), 0.0)
    assert chosen(made.choose(ask("2", 640, text="same"), 0.0)).hit_tokens == 576


def test_peers_blocks_are_fetched_where_the_holder_is_busy() -> None:
    held = Held()
    held.found = {"b": Prefix(0, 64_000, 0, 64_000)}
    made = router("a", "b", held=held, loads=True)
    assert chosen(made.choose(ask("1", 64_100), 0.0)).replica == "b"
    for n in range(6):
        made.choose(ask(f"x{n}", 64_100), 0.0)
    found = [chosen(made.choose(ask(f"y{n}", 64_100), 0.0)) for n in range(4)]
    away = [choice for choice in found if choice.replica == "a"]
    assert away
    assert away[0].hit_tokens == 64_000


def test_a_first_token_shortens_the_queue_and_starts_the_decode() -> None:
    made = router("a")
    one = chosen(made.choose(ask("1", 10_000), 0.0))
    made.first_token(one.booking, 0.5)
    quick = chosen(made.choose(ask("2", 10_000), 0.5))
    assert quick.ttft_s == pytest.approx(PREFILL.prefill_s(10_000, 0), rel=0.01)
    made.progress(one.booking, 100, 1.0)
    made.progress(one.booking, 40, 1.0)  # older news
    report = made.report("g", 1.0)
    assert report.loads["a"].context_tokens == 20_100
    assert report.loads["a"].waiting == 1


def test_a_replica_whose_memory_is_full_makes_room_at_the_pace_of_decodes() -> None:
    made = router("a", kv_tokens=10_000)
    for n in range(30):
        one = chosen(made.choose(ask(f"ended{n}", 640), 0.0))
        made.first_token(one.booking, 0.0)
        made.finish(one.booking, 20.0)
    booked = chosen(made.choose(ask("long", 9600), 30.0))
    made.first_token(booked.booking, 31.0)
    waits = chosen(made.choose(ask("more", 6400), 31.0))
    assert waits.ttft_s == pytest.approx(0.6 * 20.0 + PREFILL.prefill_s(6400, 0), rel=0.05)
    made.finish(booked.booking, 60.0)
    made.finish(waits.booking, 60.0)
    assert chosen(made.choose(ask("last", 6400), 60.0)).ttft_s < 1.0


def test_prefill_beside_decodes_is_predicted_to_take_longer() -> None:
    made = router("a", step_tokens=1000)
    alone = chosen(made.choose(ask("1", 10_000), 0.0))
    made.first_token(alone.booking, 1.0)
    beside = chosen(made.choose(ask("2", 10_000), 1.0))
    step_s, chunk_s = 0.02 + 1e-4 + 1e-7 * 10_000, PREFILL.prefill_s(1000, 0)
    assert beside.ttft_s == pytest.approx(alone.ttft_s * (1 + step_s / chunk_s), rel=0.01)


def test_a_slow_replica_is_known_by_its_first_tokens() -> None:
    made = router("slow", "fast")
    now_s = 0.0
    for n in range(40):
        one = chosen(made.choose(ask(str(n), 10_000), now_s))
        made.first_token(one.booking, now_s + (4.0 if one.replica == "slow" else 1.0))
        made.finish(one.booking, now_s + 5.0)
        now_s += 10.0
    taken = Counter()  # type: Counter[str]
    for n in range(20):
        one = chosen(made.choose(ask(f"x{n}", 10_000), now_s))
        taken[one.replica] += 1
        made.finish(one.booking, now_s)
    assert taken["fast"] == 20


def test_a_slow_decode_is_known_by_its_tokens() -> None:
    made = router("slow:decode", "fast:decode", "p:prefill")
    now_s = 0.0
    for n in range(40):
        one = chosen(made.choose(ask(str(n), 1000), now_s))
        step_s = 0.2 if one.replica == "slow" else 0.02
        made.first_token(one.booking, now_s + 0.1)
        made.progress(one.booking, 101, now_s + 0.1 + 100 * step_s)
        made.finish(one.booking, now_s + 30.0)
        now_s += 40.0
    taken = {chosen(made.choose(ask(f"x{n}", 1000), now_s)).replica for n in range(5)}
    assert taken == {"fast"}


def test_tokens_that_waited_for_their_client_say_nothing_of_a_replica() -> None:
    made = router("slow:decode", "fast:decode", "p:prefill")
    now_s = 0.0
    for n in range(40):
        one = chosen(made.choose(ask(str(n), 1000), now_s))
        step_s = 0.2 if one.replica == "slow" else 0.02
        made.first_token(one.booking, now_s + 0.1)
        made.progress(one.booking, 101, now_s + 0.1 + 100 * step_s, timely=False)
        made.finish(one.booking, now_s + 30.0)
        now_s += 40.0
    taken = {chosen(made.choose(ask(f"x{n}", 1000), now_s)).replica for n in range(20)}
    assert taken == {"slow", "fast"}


def test_prefill_and_decode_replicas_share_a_request() -> None:
    made = router("p:prefill", "q:prefill", "d:decode", "e:decode")
    one, two = (chosen(made.choose(ask(str(n), 5000), 0.0)) for n in range(2))
    assert {one.prefill, two.prefill} == {"p", "q"}
    assert {one.replica, two.replica} == {"d", "e"}
    made.first_token(one.booking, 1.0)
    made.finish(one.booking, 2.0)
    made.finish(two.booking, 2.0)
    assert made.booked == 0
    assert made.report("g", 2.0).loads == {}


def test_unhealthy_draining_failed_and_removed_replicas_get_nothing() -> None:
    made = router("a", "b", "c", "d")
    made.set_state("a", healthy=False)
    made.set_state("b", healthy=True, draining=True)
    made.remove("c")
    made.set_state("unknown", healthy=True)
    one = chosen(made.choose(ask("1"), 0.0))
    assert one.replica == "d"
    none = made.choose(ask("2", exclude=frozenset("d")), 0.0)
    assert none == Refused("no-replica", none.retry_after_s)  # type: ignore[union-attr]
    made.set_state("a", healthy=True)
    assert chosen(made.choose(ask("3", exclude=frozenset("d")), 0.0)).replica == "a"


def test_a_replica_that_was_removed_lets_its_bookings_end() -> None:
    made = router("a")
    one = chosen(made.choose(ask("1"), 0.0))
    made.remove("a")
    made.add("a")
    made.first_token(one.booking, 1.0)
    made.finish(one.booking, 2.0)
    assert made.booked == 0
    assert chosen(made.choose(ask("2"), 2.0)).ttft_s == pytest.approx(PREFILL.prefill_s(1000, 0))


def test_an_unknown_role_or_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="both, prefill, decode"):
        router("a:everything")
    with pytest.raises(ConfigError, match="unknown policy"):
        router("a", setting=Setting(policy="none-such"))


def test_a_session_and_an_adapter_find_their_replica_again() -> None:
    made = router(*"abcdef")
    home = chosen(made.choose(ask("1", session="s", lora="l"), 0.0))
    made.finish(home.booking, 0.1)
    for n in range(10):
        one = chosen(made.choose(ask(f"s{n}", session="s"), 1.0))
        two = chosen(made.choose(ask(f"l{n}", lora="l"), 1.0))
        assert one.replica == two.replica == home.replica
        made.finish(one.booking, 1.0)
        made.finish(two.booking, 1.0)
    made.remove(home.replica)
    assert chosen(made.choose(ask("x", session="s"), 2.0)).replica != home.replica


def _limited(rule: Rule, ttft_s: float = 1.5, tbt_s: float = 1.0) -> Setting:
    return Setting(admission=rule, limits=Limits(ttft_s, tbt_s))


def test_a_request_that_would_be_late_is_refused_with_when_to_come_again() -> None:
    made = router("a", setting=_limited(Rule.BASELINE))
    assert isinstance(made.choose(ask("1", 10_000), 0.0), Choice)
    late = made.choose(ask("2", 10_000), 0.0)
    assert late == Refused("ttft", 1.0)
    assert made.choose(ask("3", 100_000), 0.0) == Refused("ttft", pytest.approx(9.595))
    assert made.booked == 1


def test_low_priority_is_refused_first_and_high_last() -> None:
    def refused(priority: int, tokens: int) -> bool:
        made = router("a", setting=_limited(Rule.BASELINE))
        made.choose(ask("first", 1000), 0.0)
        return isinstance(made.choose(ask("r", tokens - 1200, priority=priority), 0.0), Refused)

    assert [refused(p, 13_000) for p in (-1, 0, 1)] == [True, False, False]
    assert [refused(p, 20_000) for p in (-1, 0, 1)] == [True, True, False]
    assert [refused(p, 30_000) for p in (-1, 0, 1)] == [True, True, True]


def test_a_deadline_that_cannot_be_met_is_refused_under_any_rule() -> None:
    made = router("a")
    assert isinstance(made.choose(ask("1", 10_000, deadline_s=100.5), 100.0), Refused)
    assert isinstance(made.choose(ask("2", 10_000, deadline_s=101.5), 100.0), Choice)


def test_who_was_let_in_before_is_not_judged_again() -> None:
    made = router("a", "b", setting=_limited(Rule.PREDICTIVE, ttft_s=0.001))
    for n in range(2):
        assert isinstance(made.choose(ask(f"idle{n}"), 0.0), Choice)
    assert isinstance(made.choose(ask("1"), 0.0), Refused)
    assert isinstance(made.choose(ask("2", admitted=True), 0.0), Choice)
    assert isinstance(made.choose(ask("3", exclude=frozenset("a")), 0.0), Choice)


def test_there_is_room_while_one_replica_that_computes_has_little_queued() -> None:
    made = router("p:prefill", "q:prefill", "d:decode", setting=Setting(hold_s=0.5))
    for n in range(2):
        assert made.has_room(0.0)
        made.choose(ask(str(n), 10_000), 0.0)
    assert not made.has_room(0.0)
    assert made.has_room(0.6)
    made.set_state("p", healthy=False)
    made.set_state("q", healthy=False)
    assert made.has_room(9.0)  # nobody is waited for: `choose` says that none is open


def test_answers_that_come_whole_do_not_fill_a_replica_for_as_long_as_they_decode() -> None:
    made = router("a", setting=Setting(hold_s=0.5))
    for n in range(10):
        made.choose(ask(str(n), 10_000, streams=False), 0.0)
    assert not made.has_room(9.0)
    assert made.has_room(10.0)
    assert made.booked == 10


def test_what_a_request_takes_is_told_of_the_replica_that_has_most_of_it() -> None:
    held = Held()
    held.found = {"b": own(4992)}
    made = router("a", "b", held=held)
    assert made.need(ask("1", 5000), 0.0, 0.0) == Need(8, PREFILL.prefill_s(8, 4992))
    made.set_state("b", healthy=False)
    assert made.need(ask("1", 5000), 0.0, 0.0) == Need(5000, PREFILL.prefill_s(5000, 0))
    made.set_state("a", healthy=False)
    assert made.need(ask("1", 5000), 0.0, 0.0) == Need(5000, 0.0)
    assert made.booked == 0


def test_what_peers_hold_need_not_be_computed_where_it_is_loaded() -> None:
    held = Held()
    held.found = {"a": Prefix(0, 640, 0, 6400)}
    loads, computes = router("a", held=held, loads=True), router("a", held=held)
    needs = [made.need(ask("1", 6500), 0.0, 0.0) for made in (loads, computes)]
    assert [need.new_tokens for need in needs if isinstance(need, Need)] == [100, 6500]


def test_who_would_wait_beyond_the_limit_is_refused_at_the_door() -> None:
    made = router("a", "b", setting=_limited(Rule.PREDICTIVE, ttft_s=10.0))
    made.choose(ask("x", 10_000), 0.0)
    made.choose(ask("y", 30_000), 0.0)
    assert isinstance(made.need(ask("1", 10_000), 14.0, 0.0), Need)  # 1 s, half of 14 s, and 1 s
    late = made.need(ask("1", 10_000), 18.0, 0.0)
    assert isinstance(late, Refused)
    assert late.reason == "ttft"
    due = made.need(ask("1", 10_000, deadline_s=5.0), 14.0, 0.0)
    assert isinstance(due, Refused)
    assert due.reason == "deadline"
    assert isinstance(made.need(ask("1", 10_000, admitted=True), 99.0, 0.0), Need)


def test_output_lengths_are_learned_from_requests_that_ended_well() -> None:
    made = router("a")
    for n in range(30):
        one = chosen(made.choose(ask(str(n), tenant="t", endpoint="/chat"), float(n)))
        made.first_token(one.booking, n + 0.1)
        made.progress(one.booking, 200 if n % 3 else 5, n + 0.5)
        made.finish(one.booking, n + 0.5, failed=n % 3 == 0)
    assert made.output_lengths.of("t", "/chat").quantile(0.05) == pytest.approx(200, rel=0.05)


@given(st.data())
def test_whatever_comes_in_whatever_order_nothing_stays_booked(data: st.DataObject) -> None:
    made = router("a", "b:prefill", "c:decode", setting=_limited(Rule.PREDICTIVE, 3.0, 0.1))
    bookings: list[int] = []
    now_s = 0.0
    for n in range(data.draw(st.integers(1, 40))):
        now_s += data.draw(st.sampled_from((0.0, 0.1, 2.0)))
        what = data.draw(st.sampled_from(("choose", "first", "progress", "finish", "lose")))
        booking = data.draw(st.sampled_from([*bookings, 999]))
        if what == "choose":
            more: dict[str, Any] = {"session": data.draw(st.sampled_from(("", "s")))}
            found = made.choose(ask(str(n), data.draw(st.integers(1, 9000)), "t", **more), now_s)
            if isinstance(found, Choice):
                bookings.append(found.booking)
        elif what == "first":
            made.first_token(booking, now_s)
        elif what == "progress":
            made.progress(booking, n, now_s)
        elif what == "finish":
            made.finish(booking, now_s, failed=n % 2 == 0)
        else:
            name = data.draw(st.sampled_from("abc"))
            made.set_state(name, healthy=n % 2 == 0)
    for booking in bookings:
        made.finish(booking, now_s)
    assert made.booked == 0
    assert made.report("g", now_s).loads == {}
    for replica in made._replicas.values():
        assert (len(replica.queue), len(replica.contexts), len(replica.blocks)) == (0, 0, 0)
        assert replica.queue.left_s(now_s) == replica.contexts.tokens == 0


def _hammer(made: KvistRouter, number: int, errors: list[BaseException]) -> None:
    stream = random.Random(number)
    try:
        for n in range(200):
            found = chosen(made.choose(ask(f"{number}.{n}", 500, str(n % 7)), n * 0.01))
            if stream.random() < 0.8:
                made.first_token(found.booking, n * 0.01)
            made.finish(found.booking, n * 0.01)
    except AssertionError as error:
        errors.append(error)


def test_threads_leave_nothing_booked_behind() -> None:
    made = router("a", "b", "c")
    errors: list[BaseException] = []
    threads = [threading.Thread(target=_hammer, args=(made, n, errors)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert errors == []
    assert made.booked == 0
    assert made.report("g", 0.0).loads == {}
