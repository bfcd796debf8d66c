"""Prompts that another engine computes: what each is asked, and what follows when one breaks."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from typing import Any

import pytest
from gateway_thread import HASTY, Running, alone, eventually, read_stream, serving, stats

from kvist.cost.learner import WARM_UP
from kvist.gateway.settings import Prefilling, Settings, Timeouts
from kvist.router.splitting import Rule, Splitting
from kvist.testing.stub_engine import Pace, StubEngine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENS = 40
ALWAYS = Splitting(Rule.ALWAYS)
SLOW = Pace(prefill_s=60.0)
BODY = {
    "model": "stub",
    "prompt": "computed elsewhere ",
    "temperature": 0,
    "max_tokens": TOKENS,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def pools() -> Iterator[tuple[StubEngine, StubEngine]]:
    """An engine that prefills and one that answers; tests that kill one have their own."""
    with StubEngine() as prefill, StubEngine(Pace(token_s=0.002)) as decode:
        yield prefill, decode


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Lines]:
    with caplog.at_level(logging.INFO, "kvist.gateway.requests"):
        yield Lines(caplog)


class Lines:
    """The gateway's log of requests."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def last(self) -> dict[str, Any]:
        """The line of the only request since the last call."""
        found: list[str] = []

        def logged() -> bool:
            records = [r for r in self._caplog.records if r.name == "kvist.gateway.requests"]
            found[:] = [record.getMessage() for record in records]
            return bool(found)

        eventually(logged)
        self._caplog.clear()
        (line,) = found
        told: dict[str, Any] = json.loads(line)
        return told


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
def test_answer_is_that_of_one_engine_and_the_other_computes_the_prompt(
    pools: tuple[StubEngine, StubEngine], lines: Lines, path: str, streams: bool
) -> None:
    prefill, decode = pools
    body = dict(BODY)
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    expected = alone(decode, path, body)
    with serving(decode, prefill=[prefill], splitting=ALWAYS) as gateway:
        if streams:
            assert gateway.stream(path, body).text == expected.text
        else:
            choice = gateway.ask(path, body)[1]["choices"][0]
            assert choice.get("text", choice.get("message", {}).get("content")) == expected.text
        asked, told = stats(prefill)["last_body"], stats(decode)["last_body"]
        assert (asked["max_tokens"], asked.get("stream")) == (1, None)
        assert asked["kv_transfer_params"] == {"kvist.save": True}
        assert told["kv_transfer_params"]["kvist.computed"] > 0
        assert told["max_tokens"] == TOKENS
        line = lines.last()
        assert (line["replicas"], line["prefills"]) == ([decode.url], [prefill.url])
        assert (line["splits"], line["prefilled"]) == (["remote: always"], ["ok"])
        page = gateway.ask("/metrics")[1]
        assert 'kvist_gateway_splits_total{reason="always",where="remote"} 1.0' in page
        assert 'kvist_gateway_prefills_total{outcome="ok"} 1.0' in page


def test_replicas_are_shown_with_what_they_do(pools: tuple[StubEngine, StubEngine]) -> None:
    with serving(pools[1], prefill=[pools[0]], splitting=ALWAYS) as gateway:
        shown = gateway.ask("/replicas")[1]["replicas"]
        assert [(r["url"], r["role"]) for r in shown] == [
            (pools[1].url, "decode"),
            (pools[0].url, "prefill"),
        ]


def test_nixl_gives_the_second_engine_what_the_first_answered(
    pools: tuple[StubEngine, StubEngine],
) -> None:
    """No NIXL here: what crosses is what vLLM's own example of a proxy hands on."""
    prefill, decode = pools
    settings = Settings(timeouts=HASTY, prefilling=Prefilling(transport="nixl"))
    with serving(decode, prefill=[prefill], splitting=ALWAYS, settings=settings) as gateway:
        assert gateway.stream(COMPLETIONS, BODY).text == alone(decode, COMPLETIONS, BODY).text
        gateway.stream(COMPLETIONS, BODY)
        asked = stats(prefill)["last_body"]["kv_transfer_params"]
        assert (asked["do_remote_decode"], asked["remote_block_ids"]) == (True, None)
        told = stats(decode)["last_body"]["kv_transfer_params"]
        assert told["do_remote_prefill"]
        assert told["remote_block_ids"] == [len(str(BODY["prompt"]))]


def test_client_that_leaves_cancels_the_prefill(lines: Lines) -> None:
    with (
        StubEngine(SLOW) as prefill,
        StubEngine() as decode,
        serving(decode, prefill=[prefill], splitting=ALWAYS) as gateway,
    ):
        link = HTTPConnection("127.0.0.1", gateway.port, timeout=20.0)
        data, kind = json.dumps(BODY | {"stream": True}), {"Content-Type": "application/json"}
        link.request("POST", COMPLETIONS, data, kind)
        eventually(lambda: stats(prefill)["running"] == 1)
        assert gateway.router.booked == 1
        link.close()
        eventually(lambda: stats(prefill)["aborted"] == 1)
        eventually(lambda: gateway.router.booked == 0)
        assert stats(decode)["requests"] == 0
        assert lines.last()["prefilled"] == ["cancelled"]
        assert gateway.router.report("g", 0.0).loads == {}


def test_late_prefill_is_left_and_the_other_engine_computes_the_prompt(lines: Lines) -> None:
    settings = Settings(timeouts=Timeouts(first_token_s=2.0, health_s=1.0))
    with (
        StubEngine(SLOW) as prefill,
        StubEngine() as decode,
        serving(decode, prefill=[prefill], splitting=ALWAYS, settings=settings) as gateway,
    ):
        expected = alone(decode, COMPLETIONS, BODY)
        assert gateway.stream(COMPLETIONS, BODY).text == expected.text
        line = lines.last()
        assert (line["prefilled"], line["broke"]) == (["late"], [])
        assert stats(decode)["last_body"].get("kv_transfer_params") is None
        eventually(lambda: stats(prefill)["aborted"] == 1)


def test_patience_ends_by_what_the_engine_was_seen_to_do(lines: Lines) -> None:
    """It hangs, and nobody has noticed yet."""
    settings = Settings(
        timeouts=Timeouts(health_s=60.0, connect_s=60.0), prefilling=Prefilling(least_s=0.5)
    )
    with (
        StubEngine() as prefill,
        StubEngine() as decode,
        serving(decode, prefill=[prefill], splitting=ALWAYS, settings=settings) as gateway,
    ):
        expected = alone(decode, COMPLETIONS, BODY)
        for _ in range(WARM_UP):
            gateway.stream(COMPLETIONS, BODY)
            assert lines.last()["prefilled"] == ["ok"]
        prefill.hang()
        assert gateway.stream(COMPLETIONS, BODY).text == expected.text
        assert lines.last()["prefilled"] == ["late"]
        prefill.go_on()


def kill_when_busy(engine: StubEngine) -> threading.Thread:
    """Kills an engine as soon as it has a request."""

    def kill() -> None:
        eventually(lambda: stats(engine)["running"] == 1)
        engine.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def test_killed_prefill_engine_is_replaced_by_another_or_by_the_one_that_answers(
    pools: tuple[StubEngine, StubEngine], lines: Lines
) -> None:
    other, decode = pools
    expected = alone(decode, COMPLETIONS, BODY)
    with StubEngine(SLOW) as first, StubEngine(SLOW) as second:
        with serving(decode, prefill=[first, other], splitting=ALWAYS) as gateway:
            killer = kill_when_busy(first)
            assert gateway.stream(COMPLETIONS, BODY).text == expected.text
            killer.join()
            line = lines.last()
            assert (line["prefills"], line["prefilled"]) == ([first.url, other.url], ["lost", "ok"])
            assert (line["replicas"], line["broke"]) == ([decode.url], [])
            assert (
                f'kvist_gateway_broken_attempts_total{{replica="{first.url}"}} 1.0'
                in (gateway.ask("/metrics")[1])
            )
        with serving(decode, prefill=[second], splitting=ALWAYS) as gateway:
            killer = kill_when_busy(second)
            assert gateway.stream(COMPLETIONS, BODY).text == expected.text
            killer.join()
            line = lines.last()
            assert (line["prefilled"], line["splits"]) == (
                ["lost"],
                ["remote: always", "local: no-prefill"],
            )


def test_hung_prefill_engine_loses_its_prompts(lines: Lines) -> None:
    with (
        StubEngine(SLOW) as prefill,
        StubEngine() as decode,
        serving(decode, prefill=[prefill], splitting=ALWAYS) as gateway,
    ):
        expected = alone(decode, COMPLETIONS, BODY)
        hang = threading.Thread(
            target=lambda: (
                eventually(lambda: stats(prefill)["running"] == 1),
                prefill.hang(),
            )
        )
        hang.start()
        assert gateway.stream(COMPLETIONS, BODY).text == expected.text
        hang.join()
        assert lines.last()["prefilled"] == ["lost"]
        shown = {r["role"]: r["healthy"] for r in gateway.ask("/replicas")[1]["replicas"]}
        assert shown == {"decode": True, "prefill": False}
        prefill.go_on()
        eventually(lambda: stats(prefill)["running"] == 0)


def test_many_broken_prefill_engines_are_not_all_tried(
    pools: tuple[StubEngine, StubEngine], lines: Lines
) -> None:
    decode = pools[1]
    expected = alone(decode, COMPLETIONS, BODY)
    with ExitStack() as stack:
        engines = [stack.enter_context(StubEngine(SLOW)) for _ in range(4)]
        settings = Settings(timeouts=HASTY, attempts=2)
        gateway = stack.enter_context(
            serving(decode, prefill=engines, splitting=ALWAYS, settings=settings)
        )
        killer = threading.Thread(target=kill_two, args=(engines,))
        killer.start()
        assert gateway.stream(COMPLETIONS, BODY).text == expected.text
        killer.join()
        line = lines.last()
        assert line["prefilled"] == ["lost", "lost"]
        assert line["splits"][-1] == "local: undivided"


def kill_two(engines: list[StubEngine]) -> None:
    """Kills the first that has a request, and the next."""
    left = list(engines)

    def is_killed() -> bool:
        for engine in [e for e in left if stats(e)["running"]]:
            engine.kill()
            left.remove(engine)
        return len(left) == len(engines) - 2

    eventually(is_killed)


@pytest.mark.parametrize("others", [1, 0], ids=["another", "no other"])
def test_killed_engine_that_answers_goes_on_elsewhere_or_ends_with_an_error(
    pools: tuple[StubEngine, StubEngine], others: int
) -> None:
    prefill, other = pools
    expected = alone(other, COMPLETIONS, BODY)
    with StubEngine(Pace(token_s=0.02)) as decode:
        answer = [decode, other][: 1 + others]
        with serving(*answer, prefill=[prefill], splitting=ALWAYS) as gateway:

            def on_event(count: int) -> None:
                if count == 5:
                    decode.kill()

            with gateway.open(COMPLETIONS, BODY | {"stream": True}) as reply:
                found = read_stream(reply, on_event)
            eventually(lambda: gateway.router.booked == 0)
            if others:
                assert (found.error, found.text) == (None, expected.text)
            else:
                assert found.error is not None
                assert found.error["code"] == "unavailable"
                assert expected.text.startswith(found.text)


def test_what_is_wrong_with_a_request_is_said_by_the_engine_that_answers(
    pools: tuple[StubEngine, StubEngine], lines: Lines
) -> None:
    prefill, decode = pools
    with serving(decode, prefill=[prefill], splitting=ALWAYS) as gateway:
        status, body, _ = gateway.ask(COMPLETIONS, BODY | {"model": "none"})
        assert (status, body["error"]["message"]) == (404, "no model none")
        line = lines.last()
        assert (line["prefilled"], line["replicas"]) == (["refused"], [decode.url])


def test_prefill_engines_alone_make_no_gateway_ready(
    pools: tuple[StubEngine, StubEngine],
) -> None:
    nobody = "http://127.0.0.1:9"
    with serving(nobody, prefill=[pools[0]], splitting=ALWAYS) as gateway:
        assert gateway.ask("/readyz")[0] == 503
        assert gateway.ask(COMPLETIONS, BODY)[0] == 503


def test_no_prefill_engine_is_no_reason_not_to_serve(
    pools: tuple[StubEngine, StubEngine], lines: Lines
) -> None:
    expected = alone(pools[1], COMPLETIONS, BODY)
    nobody = "http://127.0.0.1:9"
    with serving(pools[1], prefill=[nobody], splitting=ALWAYS) as gateway:
        assert gateway.stream(COMPLETIONS, BODY).text == expected.text
        assert lines.last()["splits"] == ["local: no-prefill"]


def test_cost_decides_by_what_it_has_seen(pools: tuple[StubEngine, StubEngine]) -> None:
    prefill, decode = pools
    before = stats(prefill)["requests"]
    with serving(decode, prefill=[prefill], splitting=Splitting(Rule.COST)) as gateway:
        _streams(gateway, 1)
        assert stats(prefill)["requests"] == before  # nobody is held up
        _streams(gateway, 24)
        assert stats(prefill)["requests"] > before


def _streams(gateway: Running, count: int) -> None:
    """So many at once."""
    body = BODY | {"prompt": "long " * 2000}
    threads = [
        threading.Thread(target=lambda: gateway.stream(COMPLETIONS, body)) for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
