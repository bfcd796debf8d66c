"""Whatever is sent, the answer is a 4xx that says why; the gateway lives, its memory is bound."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from gateway_thread import HASTY, LIMIT_S, Running, eventually, serving

from kvist.gateway.ask import MOST_STOPS, Endpoint, read_body
from kvist.gateway.faults import Fault
from kvist.gateway.settings import Bounds, Settings, Timeouts
from kvist.testing.stub_engine import StubEngine

COMPLETIONS = "/v1/completions"
ASKED = {"model": "stub", "prompt": "p", "max_tokens": 4, "temperature": 0}
BOUNDS = Bounds(body_bytes=1 << 20, bodies_bytes=4 << 20, connections=64)
MIB = 1 << 20


@pytest.fixture(scope="module")
def gateway(engine: StubEngine) -> Iterator[Running]:
    timeouts = Timeouts(head_s=1.0, body_s=1.0, health_s=0.5)
    with serving(engine, settings=Settings(timeouts=timeouts, bounds=BOUNDS)) as running:
        yield running


def lives(gateway: Running) -> bool:
    """Whether an honest request is still served."""
    return gateway.ask(COMPLETIONS, ASKED)[0] == 200


def raw(gateway: Running, *parts: bytes) -> bytes:
    """What comes back for bytes that no client library would send."""
    with socket.create_connection(("127.0.0.1", gateway.port), LIMIT_S) as link:
        answer = bytearray()
        with contextlib.suppress(ConnectionError):  # it may be cut off before all is sent
            for part in parts:
                link.sendall(part)
            while data := link.recv(1 << 16):
                answer += data
        return bytes(answer)


def fault_of(answer: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error of a raw answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


BODIES = [
    pytest.param(b"", id="nothing"),
    pytest.param(b"{", id="half"),
    pytest.param(b"[]", id="list"),
    pytest.param(b"null", id="null"),
    pytest.param(b'{"prompt": "\xff\xfe", "model": "stub"}', id="bad UTF-8"),
    pytest.param(b'{"prompt": "p", "unknown": "\xc3\x28"}', id="bad UTF-8 in an unknown field"),
    pytest.param(b'{"prompt": "\\ud800"}', id="half a surrogate"),
    pytest.param(b"[" * 100_000 + b"]" * 100_000, id="deep"),
    pytest.param(b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", id="deep prompt"),
    pytest.param(b'{"prompt": "p", "max_tokens": -1}', id="negative"),
    pytest.param(b'{"prompt": "p", "max_tokens": 1' + b"0" * 400 + b"}", id="huge"),
    pytest.param(b'{"prompt": "p", "max_tokens": 1' + b"0" * 9000 + b"}", id="absurd"),
    pytest.param(b'{"prompt": "p", "temperature": 1e999}', id="infinite"),
    pytest.param(b'{"prompt": "p", "temperature": NaN}', id="no number"),
    pytest.param(b'{"prompt": "p", "temperature": -0.5}', id="cold"),
    pytest.param(b'{"prompt": "p", "top_p": 2}', id="top_p"),
    pytest.param(b'{"prompt": "p", "n": 1000000}', id="many choices"),
    pytest.param(b'{"prompt": "p", "n": 0}', id="no choice"),
    pytest.param(b'{"prompt": "p", "seed": 1e30}', id="seed"),
    pytest.param(b'{"prompt": [-1, 2]}', id="negative tokens"),
    pytest.param(b'{"prompt": [1, "a"]}', id="mixed"),
    pytest.param(b'{"prompt": [[]]}', id="empty prompts"),
    pytest.param(b'{"prompt": {"a": 1}}', id="object"),
    pytest.param(b'{"prompt": ""}', id="empty prompt"),
    pytest.param(b'{"model": "stub"}', id="no prompt"),
    pytest.param(b'{"prompt": "p", "model": "' + b"m" * 10_000 + b'"}', id="long name"),
    pytest.param(b'{"prompt": "p", "stream": "perhaps"}', id="stream"),
]


@pytest.mark.parametrize("body", BODIES)
def test_body_that_cannot_be_meant_is_a_400(gateway: Running, body: bytes) -> None:
    status, found, _ = gateway.ask(COMPLETIONS, body, method="POST")
    assert status == 400
    assert set(found["error"]) == {"message", "type", "param", "code"}
    assert found["error"]["type"] == "invalid_request_error"
    assert len(found["error"]["message"]) <= 600


def test_fields_of_another_endpoint_do_not_matter() -> None:
    """Found by schemathesis: an empty `prompt` beside the `input` of an embedding."""
    asked = read_body(Endpoint.EMBEDDINGS, b'{"input": "x", "prompt": []}')
    assert asked.payload["prompt"] == []


def test_million_stop_strings_are_refused() -> None:
    body = json.dumps({"prompt": "p", "stop": ["x"] * 1_000_000}).encode()
    with pytest.raises(Fault, match=str(MOST_STOPS)) as refused:
        read_body(Endpoint.COMPLETIONS, body)
    assert refused.value.status == 400


def test_body_of_100_mb_is_refused_and_not_kept(gateway: Running) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    piece = b"a" * MIB
    declared = raw(
        gateway,
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 104857600\r\n\r\n",
        *[piece] * 100,
    )
    assert not declared or fault_of(declared)[0] == 413
    chunk = b"%x\r\n" % len(piece) + piece + b"\r\n"
    chunked = raw(
        gateway,
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
        *[chunk] * 100,
    )
    assert not chunked or fault_of(chunked)[0] == 413
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) * 1024 < 50 * MIB
    assert lives(gateway)


def test_declared_length_beyond_the_bound_is_a_413_at_once(gateway: Running) -> None:
    answer = raw(
        gateway,
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 104857600\r\n"
        b"Connection: close\r\n\r\n",
    )
    status, error = fault_of(answer)
    assert (status, error["code"]) == (413, "request_too_large")


def test_headers_of_1_mb_are_refused(gateway: Running) -> None:
    one = b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"a" * MIB + b"\r\n\r\n"
    many = b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"".join(
        b"X-%d: %s\r\n" % (i, b"a" * 1000) for i in range(1000)
    )
    line = b"GET /" + b"a" * MIB + b" HTTP/1.1\r\nHost: x\r\n\r\n"
    for request in (one, many + b"\r\n", line):
        answer = raw(gateway, request)
        assert not answer or 400 <= fault_of(answer)[0] < 500
    assert lives(gateway)


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00", id="TLS"),
        pytest.param(b"GET / HTTP/9.9\r\n\r\n", id="version"),
        pytest.param(b"G\x00T / HTTP/1.1\r\n\r\n", id="zero"),
        pytest.param(b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n", id="length"),
        pytest.param(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            id="chunk",
        ),
        pytest.param(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            id="both lengths",
        ),
    ],
)
def test_what_is_no_http_is_a_400(gateway: Running, request_bytes: bytes) -> None:
    status, error = fault_of(raw(gateway, request_bytes))
    assert 400 <= status < 500
    assert error["message"]
    assert lives(gateway)


def test_head_that_comes_byte_by_byte_is_cut_off(gateway: Running) -> None:
    with socket.create_connection(("127.0.0.1", gateway.port), LIMIT_S) as link:
        began = time.monotonic()
        link.sendall(b"GET /healthz HTTP/1.1\r\nX: ")
        link.settimeout(0.05)
        closed = False
        while not closed and time.monotonic() - began < LIMIT_S:
            try:
                link.sendall(b"a")
                closed = link.recv(1) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                closed = True
        assert closed


def test_body_that_comes_byte_by_byte_is_a_408(gateway: Running) -> None:
    with socket.create_connection(("127.0.0.1", gateway.port), LIMIT_S) as link:
        link.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        link.settimeout(LIMIT_S)
        answer = bytearray()
        while data := link.recv(1 << 16):
            answer += data
    status, error = fault_of(bytes(answer))
    assert (status, error["code"]) == (408, "timeout")


def test_connections_beyond_the_bound_are_closed_and_room_comes_back(gateway: Running) -> None:
    links = [
        socket.create_connection(("127.0.0.1", gateway.port), LIMIT_S)
        for _ in range(BOUNDS.connections + 8)
    ]
    for link in links:
        link.close()
    eventually(lambda: gateway_answers(gateway))


def gateway_answers(gateway: Running) -> bool:
    """Whether a connection is let in."""
    try:
        return lives(gateway)
    except ConnectionError:
        return False


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Encoding": "gzip"}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_only_json_that_is_not_compressed_is_read(
    gateway: Running, headers: dict[str, str], expected: int
) -> None:
    assert gateway.ask(COMPLETIONS, ASKED, headers=headers)[0] == expected


def test_unknown_paths_and_methods_are_named(gateway: Running) -> None:
    assert gateway.ask("/v1/none")[0] == 404
    status, _, headers = gateway.ask(COMPLETIONS)
    assert (status, headers["allow"]) == (405, "POST")
    assert gateway.ask("/v1/models", {}, method="DELETE")[0] == 405


def test_bodies_of_all_requests_together_are_bound(engine: StubEngine) -> None:
    bounds = Bounds(body_bytes=MIB, bodies_bytes=MIB)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 900000\r\n\r\n"
    with (
        serving(engine, settings=Settings(timeouts=HASTY, bounds=bounds)) as gateway,
        socket.create_connection(("127.0.0.1", gateway.port), LIMIT_S) as link,
    ):
        link.sendall(head + b" " * 800_000)
        eventually(lambda: gateway.ask(COMPLETIONS, b" " * 300_000)[0] == 503)
        assert lives(gateway)
