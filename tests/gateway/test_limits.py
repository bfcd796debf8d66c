"""Buckets fill with time; a tenant that asks too much is told when to come again."""

from __future__ import annotations

import pytest
from gateway_thread import HASTY, serving, stats

from kvist.gateway.faults import Fault
from kvist.gateway.limits import Bucket, TenantLimits
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
