"""A client says when a first token is worth nothing any more, and is told at once if it will be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gateway_thread import HASTY, Running, alone, read_stream, serving, stats

from kvist.gateway.settings import Settings, Timeouts
from kvist.testing.stub_engine import Pace, StubEngine

PATH = "/v1/completions"
ASKED = {"model": "stub", "prompt": "in time", "max_tokens": 5, "temperature": 0}


@pytest.fixture(scope="module")
def gateway(engine: StubEngine) -> Iterator[Running]:
    with serving(engine) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
def test_what_would_be_late_is_refused_and_reaches_no_engine(
    gateway: Running, engine: StubEngine, *, stream: bool
) -> None:
    before = stats(engine)["requests"]
    headers = {"X-Deadline-S": "1e-9"}
    status, found, answered = gateway.ask(PATH, ASKED | {"stream": stream}, headers=headers)
    assert (status, found["error"]["code"]) == (429, "overloaded")
    assert "deadline" in found["error"]["message"]
    assert int(answered["retry-after"]) >= 1
    assert stats(engine)["requests"] == before


def test_what_will_be_in_time_is_served(gateway: Running) -> None:
    assert gateway.ask(PATH, ASKED, headers={"X-Deadline-S": "86400"})[0] == 200


@pytest.mark.parametrize("said", ["", "soon", "0", "-1", "nan", "inf", "1e9"])
def test_what_is_no_time_is_a_400(gateway: Running, said: str) -> None:
    status, found, _ = gateway.ask(PATH, ASKED, headers={"X-Deadline-S": said})
    assert (status, found["error"]["param"]) == (400, "X-Deadline-S")


def test_stream_that_breaks_behind_its_deadline_goes_on(engine: StubEngine) -> None:
    """Its first token was in time, so the deadline is met, whatever comes later."""
    deadline_s = 2.0
    settings = Settings(timeouts=Timeouts(token_s=deadline_s + 0.5, health_s=HASTY.health_s))
    body = ASKED | {"stream": True, "ignore_eos": True}
    with (
        StubEngine(Pace(token_s=60.0)) as stuck,
        serving(stuck, engine, settings=settings) as gateway,
        gateway.open(PATH, body, headers={"X-Deadline-S": str(deadline_s)}) as reply,
    ):
        found = read_stream(reply)
    assert found.error is None
    assert found.text == alone(engine, PATH, body).text
