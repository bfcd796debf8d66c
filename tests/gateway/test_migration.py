"""A stream whose engine dies goes on elsewhere, and its client reads what one engine says alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from gateway_thread import HASTY, Running, Stream, alone, eventually, read_stream, serving, stats

from kvist.gateway.settings import Settings, Timeouts
from kvist.testing.stub_engine import Pace, StubEngine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENS = 60
POINTS = 20
USAGE = {"include_usage": True}


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[StubEngine, StubEngine]]:
    """Two engines of different grouping, which are started again when a test killed one."""
    with StubEngine(Pace(token_s=0.002, burst=3)) as one, StubEngine(Pace(token_s=0.002)) as two:
        yield one, two


@pytest.fixture
def gateway(pair: tuple[StubEngine, StubEngine]) -> Iterator[Running]:
    with serving(*pair) as running:
        yield running


def kill_at(
    gateway: Running,
    engines: tuple[StubEngine, ...],
    path: str,
    body: dict[str, Any],
    event: int,
) -> Stream:
    """Streams, and kills the engine that serves it behind so many events."""
    killed = []

    def on_event(count: int) -> None:
        if count == event and not killed:
            for busy in [e for e in engines if stats(e)["running"]]:  # none: all was sent
                busy.kill()
                killed.append(busy)

    with gateway.open(path, body | {"stream": True}) as reply:
        found = read_stream(reply, on_event)
    for engine in killed:
        engine.start_again()
        wait_up(gateway, len(engines))
    return found


def wait_up(gateway: Running, replicas: int) -> None:
    """Waits until so many replicas are up."""
    eventually(
        lambda: sum(r["healthy"] for r in gateway.ask("/replicas")[1]["replicas"]) == replicas
    )


def body_of(path: str, number: int, **more: Any) -> dict[str, Any]:
    """A greedy request."""
    said: dict[str, Any] = {"prompt": f"prompt {number} "}
    if path == CHAT:
        said = {"messages": [{"role": "user", "content": f"question {number}"}]}
    fields = {"model": "stub", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    return said | fields | {"stream_options": USAGE} | more


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_stream_killed_anywhere_has_the_text_of_one_engine(
    gateway: Running, pair: tuple[StubEngine, StubEngine], path: str
) -> None:
    dice = random.Random(path)
    for point in range(POINTS // 2):
        body = body_of(path, point)
        expected = alone(pair[1], path, body)
        found = kill_at(gateway, pair, path, body, dice.randint(1, TOKENS // 2))
        assert found.error is None
        assert (found.text, found.finish) == (expected.text, expected.finish)
        assert found.usage == expected.usage
        assert found.done
        assert len({event["id"] for event in found.events}) == 1
        assert {e["object"] for e in found.events} == {e["object"] for e in expected.events}
        assert gateway.router.booked == 0


@pytest.mark.parametrize(
    ("path", "more"),
    [
        pytest.param(COMPLETIONS, {"frequency_penalty": 0.5}, id="penalty"),
        pytest.param(CHAT, {"stop": ["holds a", "zzz"]}, id="stop"),
        pytest.param(CHAT, {"temperature": 1.0, "seed": 7}, id="seed"),
        pytest.param(COMPLETIONS, {"logprobs": 1}, id="logprobs"),
        pytest.param(CHAT, {"logprobs": True}, id="chat logprobs"),
        pytest.param(CHAT, {"max_tokens": None, "max_completion_tokens": TOKENS}, id="limit"),
        pytest.param(COMPLETIONS, {"stream_options": None}, id="no usage"),
    ],
)
def test_whatever_else_is_the_same_each_time_goes_on_too(
    gateway: Running, pair: tuple[StubEngine, StubEngine], path: str, more: dict[str, Any]
) -> None:
    body = body_of(path, 1, **more)
    expected = alone(pair[0], path, body)
    found = kill_at(gateway, pair, path, body, 4)
    assert found.error is None
    assert (found.text, found.finish) == (expected.text, expected.finish)
    assert found.usage == expected.usage
    assert logprobs(found) == logprobs(expected)


def logprobs(stream: Stream) -> list[Any]:
    """Every entry, without how they were grouped."""
    found = []
    for event in stream.events:
        for choice in event["choices"]:
            values = choice.get("logprobs") or {}
            lists = [v for v in values.values() if isinstance(v, list)]
            found += list(zip(*lists, strict=True))
    return found


def test_client_that_asked_for_token_ids_gets_each_once(
    gateway: Running, pair: tuple[StubEngine, StubEngine]
) -> None:
    body = body_of(COMPLETIONS, 3, return_token_ids=True)
    expected = alone(pair[0], COMPLETIONS, body)
    found = kill_at(gateway, pair, COMPLETIONS, body, 5)
    assert found.tokens == expected.tokens
    assert len(found.tokens) == TOKENS


def test_client_that_did_not_ask_sees_no_token_ids(
    gateway: Running, pair: tuple[StubEngine, StubEngine]
) -> None:
    for path in (COMPLETIONS, CHAT):
        found = kill_at(gateway, pair, path, body_of(path, 4), 5)
        assert found.tokens == []
        assert all(not event.get("prompt_token_ids") for event in found.events)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        pytest.param(COMPLETIONS, {"temperature": 1.0}, id="drawn"),
        pytest.param(CHAT, {"temperature": None}, id="default"),
        pytest.param(COMPLETIONS, {"n": 2}, id="two choices"),
        pytest.param(COMPLETIONS, {"echo": True}, id="echo"),
    ],
)
def test_what_cannot_go_on_exactly_ends_with_an_error(
    gateway: Running, pair: tuple[StubEngine, StubEngine], path: str, more: dict[str, Any]
) -> None:
    found = kill_at(gateway, pair, path, body_of(path, 5, **more), 6)
    assert found.error is not None
    assert found.error["code"] == "stream_interrupted"
    assert found.done
    assert gateway.router.booked == 0


def test_drawn_tokens_go_on_where_that_is_wanted(pair: tuple[StubEngine, StubEngine]) -> None:
    settings = Settings(migrate="sampled", timeouts=HASTY)
    body = body_of(COMPLETIONS, 6, temperature=1.0)
    for attempt in range(20):  # an end behind a whole character is needed, and not always there
        with serving(*pair, settings=settings) as gateway:
            found = kill_at(gateway, pair, COMPLETIONS, body, 6 + attempt)
        if found.error is None:
            break
    assert found.error is None
    assert found.usage is not None
    assert found.usage["completion_tokens"] == TOKENS
    assert "\N{REPLACEMENT CHARACTER}" not in found.text


def test_nothing_goes_on_where_migration_is_off(pair: tuple[StubEngine, StubEngine]) -> None:
    with serving(*pair, settings=Settings(migrate="off", timeouts=HASTY)) as gateway:
        found = kill_at(gateway, pair, COMPLETIONS, body_of(COMPLETIONS, 7), 6)
        assert found.error is not None


def test_request_without_a_token_yet_is_sent_again_whatever_it_asks(
    pair: tuple[StubEngine, StubEngine],
) -> None:
    with StubEngine(Pace(prefill_s=60.0)) as slow, serving(slow, pair[1]) as gateway:
        for more in ({"temperature": 1.0}, {"n": 2}, {"stream": False}):
            body = body_of(COMPLETIONS, 8, stream=True) | more
            killer = threading.Thread(target=kill_when_busy, args=(slow,))
            killer.start()
            status, _, _ = gateway.ask(COMPLETIONS, body)
            killer.join()
            assert status == 200
            slow.start_again()
            wait_up(gateway, 2)


def kill_when_busy(engine: StubEngine) -> None:
    """Kills an engine as soon as it has a request."""
    eventually(lambda: stats(engine)["running"] == 1)
    engine.kill()


def test_hung_engine_loses_its_streams_to_another(pair: tuple[StubEngine, StubEngine]) -> None:
    settings = Settings(timeouts=HASTY)
    body = body_of(COMPLETIONS, 9)
    expected = alone(pair[1], COMPLETIONS, body)
    with StubEngine(Pace(token_s=0.05)) as hung, serving(hung, pair[1], settings=settings) as g:

        def on_event(count: int) -> None:
            if count == 5:
                hung.hang()

        with g.open(COMPLETIONS, body | {"stream": True}) as reply:
            found = read_stream(reply, on_event)
        assert (found.error, found.text) == (None, expected.text)
        assert [r["healthy"] for r in g.ask("/replicas")[1]["replicas"]] == [False, True]
        hung.go_on()
        wait_up(g, 2)
        eventually(lambda: stats(hung)["running"] == 0)  # its work was cancelled


def test_engine_whose_tokens_stop_coming_is_left_by_its_stream(
    pair: tuple[StubEngine, StubEngine],
) -> None:
    """It answers `/health`, so that only the time between tokens tells."""
    settings = Settings(timeouts=Timeouts(token_s=0.3, health_s=0.1))
    body = body_of(COMPLETIONS, 10)
    expected = alone(pair[1], COMPLETIONS, body)
    with StubEngine(Pace(token_s=60.0)) as stuck, serving(stuck, pair[1], settings=settings) as g:
        found = g.stream(COMPLETIONS, body)
        assert (found.error, found.text) == (None, expected.text)


def test_every_replica_dead_ends_the_stream_with_an_error() -> None:
    with StubEngine(Pace(token_s=0.01)) as only, serving(only) as gateway:

        def on_event(count: int) -> None:
            if count == 3:
                only.kill()

        with gateway.open(COMPLETIONS, body_of(COMPLETIONS, 11) | {"stream": True}) as reply:
            found = read_stream(reply, on_event)
        assert found.error is not None
        assert found.error["code"] == "unavailable"
        status, body, headers = gateway.ask(COMPLETIONS, body_of(COMPLETIONS, 12))
        assert (status, body["error"]["code"]) == (503, "unavailable")
        assert "retry-after" in headers
