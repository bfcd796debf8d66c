"""Where a prompt is cached, the gateway knows by events alone: real sockets, vLLM's format."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from gateway_thread import LIMIT_S, Running, alone, configured, eventually, stats

from kvist.testing.stub_cache import CacheSpec
from kvist.testing.stub_engine import StubEngine

WIDTH = 16
COMPLETIONS = "/v1/completions"
LOCAL = CacheSpec(WIDTH, events="tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*")

Behind = Callable[..., AbstractContextManager[tuple[Running, list[StubEngine]]]]


@pytest.fixture
def behind(bytes_folder: Path) -> Behind:
    """Engines with such caches, and a gateway that hears them."""

    @contextmanager
    def opened(
        *specs: CacheSpec, sets: Sequence[str] = ()
    ) -> Iterator[tuple[Running, list[StubEngine]]]:
        with ExitStack() as stack:
            engines = [stack.enter_context(StubEngine(cache=spec)) for spec in specs]
            yield stack.enter_context(configured(engines, bytes_folder, *sets)), engines

    return opened


def prompt(text: str, blocks: int = 8) -> dict[str, Any]:
    """A request whose prompt has so many whole blocks, and one token more."""
    words = (text * (blocks * WIDTH))[: blocks * WIDTH] + "!"
    return {"prompt": words, "max_tokens": 2, "temperature": 0, "ignore_eos": True}


def post(engine: StubEngine, path: str) -> None:
    """Something that is asked of the engine itself."""
    link = HTTPConnection("127.0.0.1", engine.port, timeout=LIMIT_S)
    link.request("POST", path)
    assert link.getresponse().status == 200
    link.close()


def expected(gateway: Running, text: str) -> dict[str, int]:
    """Tokens of a prompt that the gateway believes each replica to have in HBM."""
    found = gateway.holders(prompt(text)["prompt"])
    return {name: prefix.hbm_tokens for name, prefix in found.items() if prefix.hbm_tokens}


def warm(gateway: Running, engine: StubEngine, text: str) -> None:
    """Sends a prompt past the gateway, which comes to know it."""
    alone(engine, COMPLETIONS, prompt(text))
    eventually(lambda: engine.url in expected(gateway, text))


def served_by(gateway: Running, engines: Sequence[StubEngine], text: str) -> int:
    """The place of the engine that a request went to."""
    before = [stats(engine)["requests"] for engine in engines]
    assert gateway.ask(COMPLETIONS, prompt(text))[0] == 200
    counts = [stats(e)["requests"] - b for e, b in zip(engines, before, strict=True)]
    return counts.index(1)


def test_prompt_that_was_sent_past_the_gateway_is_found(
    behind: Behind, caplog: pytest.LogCaptureFixture
) -> None:
    with behind(LOCAL, LOCAL, LOCAL) as (gateway, engines):
        for engine, text in zip(engines, "abc", strict=True):
            warm(gateway, engine, text)
        with caplog.at_level(logging.INFO, "kvist.gateway.requests"):
            for place, text in enumerate("abc"):
                assert served_by(gateway, engines, text) == place
            eventually(lambda: len(caplog.records) >= 3)
        told = [r.getMessage() for r in caplog.records if r.name == "kvist.gateway.requests"]
        lines = [json.loads(line) for line in told]
    assert [line["hit_tiers"] for line in lines] == [{"hbm": 8 * WIDTH}] * 3
    assert [line["cached_tokens"] for line in lines] == [8 * WIDTH] * 3
    assert all("128 of 129 tokens cached" in line["reasons"][0] for line in lines)


def test_what_was_cached_before_the_gateway_began_is_replayed(bytes_folder: Path) -> None:
    with StubEngine(cache=LOCAL) as other, StubEngine(cache=LOCAL) as engine:
        alone(engine, COMPLETIONS, prompt("early"))
        with configured([other, engine], bytes_folder) as gateway:
            eventually(lambda: engine.url in expected(gateway, "early"))
            assert served_by(gateway, [other, engine], "early") == 1


def test_evicted_and_cleared_blocks_are_not_counted_on(behind: Behind) -> None:
    small = CacheSpec(WIDTH, blocks=8, events=LOCAL.events, replay=LOCAL.replay)
    with behind(small) as (gateway, (engine,)):
        warm(gateway, engine, "old")
        warm(gateway, engine, "new")
        assert expected(gateway, "old") == {}
        post(engine, "/reset_prefix_cache")
        eventually(lambda: expected(gateway, "new") == {})


def test_lost_messages_are_replayed(behind: Behind) -> None:
    with behind(LOCAL) as (gateway, (engine,)):
        warm(gateway, engine, "first")
        post(engine, "/lose?messages=2")
        for text in ("lost", "too"):
            alone(engine, COMPLETIONS, prompt(text))
        warm(gateway, engine, "told")
        assert [bool(expected(gateway, text)) for text in ("first", "lost", "too")] == [True] * 3
        assert gateway.samples()["kvist_event_gaps_total"] == 1


@pytest.mark.parametrize("replay", ["", LOCAL.replay], ids=["no replay", "replay too short"])
def test_loss_that_cannot_be_replayed_voids_what_was_known(behind: Behind, replay: str) -> None:
    with behind(CacheSpec(WIDTH, events=LOCAL.events, replay=replay, buffer=1)) as found:
        gateway, (engine,) = found
        while True:  # until the first message is heard, they are lost, too
            alone(engine, COMPLETIONS, prompt("known"))
            if expected(gateway, "known"):
                break
            post(engine, "/reset_prefix_cache")
        before = gateway.samples()["kvist_event_restarts_total"]
        post(engine, "/lose?messages=1")
        alone(engine, COMPLETIONS, prompt("lost"))
        warm(gateway, engine, "told")
        assert [expected(gateway, text) for text in ("known", "lost")] == [{}, {}]
        assert gateway.samples()["kvist_event_restarts_total"] == before + 1


def test_restarted_engine_has_nothing_and_is_heard_again(behind: Behind) -> None:
    with behind(LOCAL, LOCAL) as (gateway, (first, other)):
        warm(gateway, first, "warm")
        warm(gateway, other, "warm")
        first.kill()
        first.start_again()
        warm(gateway, first, "anew")
        assert set(expected(gateway, "warm")) == {other.url}
        assert gateway.events_of(first) == "heard"


def test_other_block_size_is_said_once_and_choices_are_believed_for_long(
    behind: Behind, caplog: pytest.LogCaptureFixture
) -> None:
    wide = CacheSpec(4 * WIDTH, events=LOCAL.events, replay=LOCAL.replay)
    sets = ("gateway.events.heard_s=0.001", "gateway.events.silent_s=600")
    with behind(wide, LOCAL, sets=sets) as (gateway, engines):
        with caplog.at_level(logging.ERROR, "kvist.router.feed"):
            for text in ("one", "two", "three"):
                alone(engines[0], COMPLETIONS, prompt(text))
            eventually(lambda: gateway.events_of(engines[0]) == "block-size")
        (said,) = [r.getMessage() for r in caplog.records if r.name == "kvist.router.feed"]
        assert f"start it with --block-size {WIDTH}" in said
        engines[1].kill()
        eventually(lambda: not gateway.ask("/replicas")[1]["replicas"][1]["healthy"])
        assert gateway.ask(COMPLETIONS, prompt("mine"))[0] == 200
        assert expected(gateway, "mine") == {engines[0].url: 8 * WIDTH}


def test_engine_that_publishes_nothing_is_believed_to_have_what_it_was_sent(
    behind: Behind,
) -> None:
    with behind(CacheSpec(), CacheSpec()) as (gateway, engines):
        home = served_by(gateway, engines, "sent")
        assert expected(gateway, "sent") == {engines[home].url: 8 * WIDTH}
        assert [gateway.events_of(engine) for engine in engines] == ["silent"] * 2
