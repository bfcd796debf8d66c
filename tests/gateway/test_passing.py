"""What a client sends reaches the engine, and what the engine says reaches the client, as it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from gateway_thread import Running, alone, configured, eventually, serving, stats
from openai import NotFoundError, OpenAI

from kvist.gateway.settings import Settings
from kvist.testing.stub_engine import Pace, StubEngine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASKED = {"model": "stub", "prompt": "to pass", "max_tokens": 12, "temperature": 0}
SAID = {"model": "stub", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12}


@pytest.fixture(scope="module")
def gateway(engine: StubEngine) -> Iterator[Running]:
    with serving(engine) as running:
        yield running


def same(event: dict[str, Any]) -> dict[str, Any]:
    """An event without what differs each time."""
    return {name: value for name, value in event.items() if name not in ("id", "created")}


def test_body_that_is_not_streamed_arrives_byte_for_byte(
    gateway: Running, engine: StubEngine
) -> None:
    body = b'{"model":"stub", "prompt":"a","unknown":{"b":[1.50,2e3]},\n"seed":1 }'
    assert gateway.ask(COMPLETIONS, body)[0] == 200
    assert stats(engine)["last_body"] == json.loads(body)


def test_unknown_fields_of_a_stream_arrive(gateway: Running, engine: StubEngine) -> None:
    odd = {"vllm_xargs": {"a": 1.5}, "new_in_2027": [None, "é"], "tool_choice": "auto"}
    gateway.stream(COMPLETIONS, ASKED | odd)
    assert stats(engine)["last_body"].items() >= odd.items()


def test_stream_is_asked_for_nothing_more_where_migration_is_off(engine: StubEngine) -> None:
    with serving(engine, settings=Settings(migrate="off")) as gateway:
        gateway.stream(COMPLETIONS, ASKED)
    assert stats(engine)["last_body"] == ASKED | {"stream": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(COMPLETIONS, ASKED, id="completion"),
        pytest.param(COMPLETIONS, ASKED | {"n": 3}, id="three choices"),
        pytest.param(COMPLETIONS, ASKED | {"logprobs": 2}, id="logprobs"),
        pytest.param(COMPLETIONS, ASKED | {"return_token_ids": True}, id="token ids"),
        pytest.param(COMPLETIONS, ASKED | {"prompt": [104, 105]}, id="tokens"),
        pytest.param(CHAT, SAID | {"temperature": 0}, id="chat"),
        pytest.param(CHAT, SAID | {"temperature": 0, "logprobs": True}, id="chat logprobs"),
        pytest.param(
            CHAT, SAID | {"temperature": 0, "tools": [{"type": "function"}]}, id="chat tools"
        ),
        pytest.param(
            CHAT,
            SAID | {"temperature": 0, "stream_options": {"include_usage": True}},
            id="chat usage",
        ),
    ],
)
def test_stream_has_the_events_of_the_engine(
    gateway: Running, engine: StubEngine, path: str, body: dict[str, Any]
) -> None:
    found, expected = gateway.stream(path, body), alone(engine, path, body)
    assert [same(e) for e in found.events] == [same(e) for e in expected.events]
    assert found.done


def test_whole_answers_have_every_field(gateway: Running, engine: StubEngine) -> None:
    for path, body in ((COMPLETIONS, ASKED), (CHAT, SAID | {"temperature": 0, "n": 2})):
        found = gateway.ask(path, body)
        expected = Running(engine.port, gateway.router, gateway.stop).ask(path, body)
        assert (found[0], same(found[1])) == (200, same(expected[1]))


def test_embeddings_and_models_are_passed_through(gateway: Running) -> None:
    status, found, _ = gateway.ask("/v1/embeddings", {"model": "stub", "input": "text"})
    assert (status, found["data"][0]["embedding"]) == (200, [0.5, -0.5])
    status, found, _ = gateway.ask("/v1/models")
    assert (status, found["data"][0]["id"]) == (200, "stub")


def test_models_are_told_by_whichever_replica_answers(engine: StubEngine) -> None:
    """The first one that is believed to be up need not be: its list is as good as any other's."""
    with StubEngine() as gone, serving(gone, engine) as gateway:
        gone.kill()
        assert gateway.ask("/v1/models")[0] == 200


def test_one_model_is_told_by_its_name(gateway: Running) -> None:
    """vLLM has no such path, and OpenAI's client has a call for it."""
    with OpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="k") as client:
        assert client.models.retrieve("stub").id == "stub"
        with pytest.raises(NotFoundError, match="no model 'other/1'"):
            client.models.retrieve("other/1")


def test_faults_of_the_engine_reach_the_client(gateway: Running) -> None:
    status, found, _ = gateway.ask(COMPLETIONS, ASKED | {"model": "other", "stream": True})
    assert (status, found["error"]["code"]) == (404, 404)


def test_headers_of_the_client_arrive_and_those_of_the_connection_do_not(
    gateway: Running, engine: StubEngine
) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    sent = {"traceparent": trace, "X-Request-Id": "mine-1", "Authorization": "Bearer k"}
    _, _, headers = gateway.ask(COMPLETIONS, ASKED, headers={**sent, "TE": "trailers"})
    seen = stats(engine)["last_headers"]
    assert seen["traceparent"] == trace
    assert seen["x-request-id"] == headers["x-request-id"] == "mine-1"
    assert seen["authorization"] == "Bearer k"
    assert "te" not in seen


def test_request_without_a_usable_id_gets_one(gateway: Running) -> None:
    ids = [
        gateway.ask(COMPLETIONS, ASKED, headers={"X-Request-Id": given})[2]["x-request-id"]
        for given in ("", "a b", "x" * 200)
    ]
    assert len(set(ids)) == 3
    assert all(len(found) == 32 for found in ids)


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_ends_the_work_of_the_engine(*, stream: bool) -> None:
    body = ASKED | {"stream": stream, "max_tokens": 3000, "ignore_eos": True}
    with StubEngine(Pace(token_s=0.02)) as slow, serving(slow) as gateway:
        link = HTTPConnection("127.0.0.1", gateway.port)
        link.request("POST", COMPLETIONS, json.dumps(body))
        eventually(lambda: stats(slow)["running"] == 1)
        if stream:
            assert link.getresponse().readline()
        link.sock.close()
        link.close()
        eventually(lambda: stats(slow)["running"] == 0)
        assert stats(slow)["aborted"] == 1
        eventually(lambda: gateway.router.booked == 0)


def test_streams_that_wait_for_their_next_token_keep_nobody_out(bytes_folder: Path) -> None:
    """A gateway that never saw two tokens knows no pace: its guess refused what engines hold."""
    body = ASKED | {"stream": True, "max_tokens": 3000, "ignore_eos": True}
    with (
        StubEngine(Pace(token_s=3600.0)) as idle,
        configured([idle], bytes_folder, "router.tbt_s=0.021") as gateway,
        ExitStack() as held,
    ):
        for _ in range(40):
            reply = held.enter_context(gateway.open(COMPLETIONS, body))
            assert reply.status == 200
            assert reply.readline().startswith(b"data: ")
        assert stats(idle)["running"] == 40


def test_official_client_works_unchanged(gateway: Running, engine: StubEngine) -> None:
    client = OpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="any", max_retries=0)
    with client:
        assert [model.id for model in client.models.list()] == ["stub"]
        whole = client.chat.completions.create(
            model="stub",
            messages=[{"role": "user", "content": "hi"}],
            temperature=0,
            max_tokens=12,
        )
        stream = client.chat.completions.create(
            model="stub",
            messages=[{"role": "user", "content": "hi"}],
            temperature=0,
            max_tokens=12,
            stream=True,
        )
        said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert said == whole.choices[0].message.content
        assert said == alone(engine, CHAT, SAID | {"temperature": 0}).text
        with pytest.raises(NotFoundError):
            client.completions.create(model="none", prompt="x")
