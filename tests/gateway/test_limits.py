"""Buckets fill with time; a tenant that asks too much is told when to come again."""

from __future__ import annotations

import pytest
from gateway_thread import HASTY, serving, stats

from kvist.gateway.faults import Fault
from kvist.gateway.limits import Bucket, TenantLimits, Used
from kvist.gateway.settings import Bounds, Settings
from kvist.node.http.tokens import Tokens
from kvist.testing.stub_engine import Pace, StubEngine

OPERATOR, ALICE, BOB = "operator-0123456789", "alice-0123456789abc", "bob-0123456789abcdef"
TOKENS = Tokens(OPERATOR, {"alice": ALICE, "bob": BOB}, section="$.gateway")
ASKED = {"model": "stub", "prompt": "p", "max_tokens": 4, "temperature": 0}


def test_bucket_gives_a_minutes_worth_at_once_and_fills_with_time() -> None:
    bucket = Bucket(60, now_s=0.0)
    assert bucket.wait_s(60, 0.0) == 0
    bucket.take(60, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(1.0)
    assert bucket.wait_s(1, 1.0) == pytest.approx(0.0)
    assert bucket.wait_s(60, 1e6) == 0


def test_overdrawn_bucket_makes_the_next_one_wait() -> None:
    bucket = Bucket(60, now_s=0.0)
    bucket.take(90, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(31.0)


def test_request_larger_than_the_bucket_is_let_in_when_it_is_full() -> None:
    bucket = Bucket(60, now_s=0.0)
    assert bucket.wait_s(1000, 0.0) == 0


def test_tenants_have_accounts_of_their_own() -> None:
    limits = TenantLimits(requests_per_min={"a": 1, "*": 2})
    limits.admit("a", 1, 0.0)
    with pytest.raises(Fault) as refused:
        limits.admit("a", 1, 0.0)
    assert refused.value.retry_after_s == pytest.approx(60.0)
    for _ in range(2):
        limits.admit("b", 1, 0.0)
    with pytest.raises(Fault):
        limits.admit("b", 1, 0.0)


def test_answers_count_against_the_tokens_of_the_next_request() -> None:
    limits = TenantLimits(tokens_per_min=100)
    limits.admit("", 10, 0.0)
    limits.leave("", 150, 0.0)
    with pytest.raises(Fault, match="tokens a minute"):
        limits.admit("", 1, 0.0)
    limits.admit("", 1, 60.0)


def test_refused_request_takes_nothing() -> None:
    limits = TenantLimits(requests_per_min=10, tokens_per_min=100)
    limits.admit("", 100, 0.0)
    for _ in range(50):
        with pytest.raises(Fault, match="tokens"):
            limits.admit("", 100, 0.0)
    limits.admit("", 100, 60.0)


def test_only_so_many_requests_of_a_tenant_are_in_flight() -> None:
    limits = TenantLimits(in_flight=1)
    limits.admit("", 1, 0.0)
    with pytest.raises(Fault, match="in flight"):
        limits.admit("", 1, 0.0)
    limits.leave("", 1, 0.0)
    limits.admit("", 1, 0.0)


class Pair:
    """Two gateways' accounts, which tell each other when they are told to."""

    def __init__(self, **limits: int) -> None:
        self.one = TenantLimits(expire_s=5.0, **limits)
        self.two = TenantLimits(expire_s=5.0, **limits)

    def tell(self, now_s: float) -> None:
        """Each hears the other once."""
        said = self.one.used(now_s), self.two.used(now_s)
        self.two.hear("one", said[0], now_s)
        self.one.hear("two", said[1], now_s)


def admitted(limits: TenantLimits, most: int, now_s: float, tokens: int = 1) -> int:
    """How many requests are let in."""
    for count in range(most):
        try:
            limits.admit("", tokens, now_s)
        except Fault:
            return count
    return most


def test_what_one_gateway_lets_in_is_taken_from_the_other() -> None:
    pair = Pair(requests_per_min=60)
    pair.tell(0.0)
    assert admitted(pair.one, 40, 0.0) == 40
    pair.tell(0.0)
    assert admitted(pair.two, 100, 0.0) == 20
    pair.tell(0.0)
    assert (admitted(pair.one, 1, 0.0), admitted(pair.two, 1, 0.0)) == (0, 0)
    assert admitted(pair.one, 100, 10.0) == 10


def test_what_both_let_in_at_once_is_taken_from_the_time_after() -> None:
    pair = Pair(requests_per_min=60)
    pair.tell(0.0)
    both = admitted(pair.one, 60, 0.0) + admitted(pair.two, 60, 0.0)
    assert both == 120
    for now_s in range(1, 181):
        pair.tell(float(now_s))
        both += admitted(pair.one, 9, float(now_s)) + admitted(pair.two, 9, float(now_s))
    assert 60 + 180 - 2 <= both <= 60 + 180 + 2


def test_tokens_of_answers_count_at_all_gateways() -> None:
    pair = Pair(tokens_per_min=600)
    pair.tell(0.0)
    pair.one.admit("", 100, 0.0)
    pair.one.leave("", 700, 0.0)
    pair.tell(0.0)
    with pytest.raises(Fault, match="tokens a minute"):
        pair.two.admit("", 1, 0.0)
    pair.one.admit("", 100, 60.0)
    pair.one.leave("", -50, 60.0)  # the engine counted fewer than the gateway had guessed
    pair.tell(60.0)
    pair.two.admit("", 250, 60.0)


def test_lost_and_doubled_words_change_nothing() -> None:
    pair = Pair(requests_per_min=60)
    pair.tell(0.0)
    assert admitted(pair.one, 30, 0.0) == 30
    pair.one.used(0.0)
    assert admitted(pair.one, 10, 0.0) == 10
    for _ in range(3):
        pair.tell(0.0)
    assert admitted(pair.two, 60, 0.0) == 20


def test_gateway_that_begins_takes_over_what_is_left() -> None:
    pair = Pair(requests_per_min=60)
    assert admitted(pair.one, 50, 0.0) == 50
    pair.tell(1.0)
    assert admitted(pair.two, 60, 1.0) == 11


def test_requests_in_flight_count_at_all_gateways_until_one_is_silent() -> None:
    pair = Pair(in_flight=2)
    pair.one.admit("", 1, 0.0)
    pair.one.admit("", 1, 0.0)
    pair.tell(0.0)
    with pytest.raises(Fault, match="in flight"):
        pair.two.admit("", 1, 0.0)
    pair.two.forget_silent(5.1)
    pair.two.admit("", 1, 5.1)


def test_tenants_that_did_nothing_lately_are_left_out_and_lose_nothing() -> None:
    pair = Pair(requests_per_min=60)
    pair.tell(0.0)
    assert admitted(pair.one, 30, 0.0) == 30
    for _ in range(30):
        pair.one.leave("", 0, 0.0)
    pair.tell(0.0)
    said = pair.one.used(6.0, whole=False)
    assert said == {}
    pair.two.hear("one", said, 6.0, whole=False)
    assert admitted(pair.one, 4, 10.0) == 4
    pair.two.hear("one", pair.one.used(10.0, whole=False), 10.0, whole=False)
    assert admitted(pair.two, 60, 10.0) == 60 - 30 + 10 - 4


def test_gateway_that_was_not_heard_whole_yet_says_what_is_left() -> None:
    """What its tenants used before is not taken a second time."""
    pair = Pair(requests_per_min=60)
    assert admitted(pair.one, 60, 0.0) == 60
    for _ in range(60):
        pair.one.leave("", 0, 0.0)
    assert admitted(pair.one, 1, 30.0) == 1
    pair.two.hear("one", {}, 30.0, whole=False)
    pair.two.hear("one", pair.one.used(30.0, whole=False), 30.0, whole=False)
    assert admitted(pair.two, 60, 30.0) == 29


def test_only_tenants_with_a_limit_are_told_of() -> None:
    limits = TenantLimits(requests_per_min={"a": 1})
    limits.admit("a", 7, 0.0)
    limits.admit("b", 7, 0.0)
    assert limits.used(0.0) == {"a": Used(1.0, 7.0, 1, 0.0, None)}


def test_keys_open_what_is_their_owners(engine: StubEngine) -> None:
    settings = Settings(timeouts=HASTY, passes_keys=False, engine_key="engine-key")
    with serving(engine, tokens=TOKENS, settings=settings) as gateway:

        def ask(path: str, key: str | None, body: object = None) -> int:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            return gateway.ask(path, body, headers=headers)[0]

        for key, expected in ((None, 401), ("nobody-0123456789ab", 401), (ALICE, 200)):
            assert ask("/v1/completions", key, ASKED) == expected
            assert ask("/v1/models", key) == expected
        for path in ("/metrics", "/replicas"):
            assert [ask(path, key) for key in (None, ALICE, OPERATOR)] == [401, 403, 200]
        assert [ask(path, None) for path in ("/healthz", "/readyz", "/openapi.json")] == [200] * 3


def test_tenants_key_stays_here_and_the_engines_own_is_sent(engine: StubEngine) -> None:
    settings = Settings(timeouts=HASTY, passes_keys=False, engine_key="engine-key")
    with serving(engine, tokens=TOKENS, settings=settings) as gateway:
        gateway.ask("/v1/completions", ASKED, headers={"Authorization": f"Bearer {BOB}"})
        assert stats(engine)["last_headers"]["authorization"] == "Bearer engine-key"


def test_tenant_beyond_its_rate_gets_429_and_the_others_go_on(engine: StubEngine) -> None:
    limits = TenantLimits(requests_per_min={"alice": 2, "*": 0})
    with serving(engine, tokens=TOKENS, limits=limits) as gateway:

        def ask(key: str) -> tuple[int, str | None]:
            headers = {"Authorization": f"Bearer {key}"}
            status, _, answered = gateway.ask("/v1/completions", ASKED, headers=headers)
            return status, answered.get("retry-after")

        assert [ask(ALICE)[0] for _ in range(2)] == [200, 200]
        status, retry_after = ask(ALICE)
        assert (status, int(retry_after or 0) > 0) == (429, True)
        assert ask(BOB)[0] == 200


def test_requests_beyond_the_bound_are_refused_for_a_while() -> None:
    settings = Settings(timeouts=HASTY, bounds=Bounds(requests=1))
    body = ASKED | {"stream": True, "max_tokens": 1000, "ignore_eos": True}
    with (
        StubEngine(Pace(token_s=0.02)) as slow,
        serving(slow, settings=settings) as gateway,
        gateway.open("/v1/completions", body) as reply,
    ):
        assert reply.readline()
        status, _, headers = gateway.ask("/v1/completions", ASKED)
        assert status == 503
        assert "retry-after" in headers
