"""Clients that read slowly, or nothing: what is kept for them is bound, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event as Full
from threading import Thread
from typing import Any

import pytest
from aiohttp import web
from gateway_thread import HASTY, LIMIT_S, Running, eventually, serving, stats

from kvist.gateway.client import Client, ClientGone
from kvist.gateway.connections import BUFFER_BYTES, Connection, HttpServer
from kvist.gateway.settings import Bounds, Settings, Timeouts
from kvist.testing.stub_engine import StubEngine

COMPLETIONS = "/v1/completions"
ASKED = {"model": "stub", "prompt": "to pass", "max_tokens": 12, "temperature": 0}
MUCH = {"model": "stub", "prompt": "much", "temperature": 0, "ignore_eos": True, "stream": True}
KIB = 1 << 10
MIB = 1 << 20


@contextmanager
def asking(gateway: Running, body: dict[str, Any], window_bytes: int = 4 * KIB) -> Iterator[Any]:
    """The socket of a client that has asked, and has room for next to nothing."""
    data = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.socket() as link:
        link.settimeout(LIMIT_S)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window_bytes)
        link.connect(("127.0.0.1", gateway.port))
        link.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        yield link


def read_on(link: socket.socket) -> bytes:
    """What comes until a stream's end."""
    answer = bytearray()
    while b"[DONE]" not in answer[-64:]:
        data = link.recv(64 * KIB)
        assert data, bytes(answer[-400:])
        answer += data
    return bytes(answer)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Full:
    """Set when a client's buffer is full."""
    found, pause = Full(), Connection.pause_writing

    def noted(connection: Connection) -> None:
        pause(connection)
        found.set()

    monkeypatch.setattr(Connection, "pause_writing", noted)
    return found


def sending(
    handle: Callable[[Client], Awaitable[None]],
    read: Callable[[asyncio.StreamReader], Awaitable[None]],
    stall_s: float,
) -> None:
    """One answer of `handle` on a real connection of a gateway, whose client goes on as `read`."""
    ended = asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        client = Client(request, "r", stall_s)
        try:
            await handle(client)
        except ClientGone:
            pass
        finally:
            client.close()
            ended.set()
        assert client.response is not None
        return client.response

    async def main() -> None:
        http = HttpServer(answer, Settings(timeouts=Timeouts(stall_s=stall_s)))
        server = await asyncio.get_running_loop().create_server(http, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(
            *server.sockets[0].getsockname(), limit=16 * KIB
        )
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(LIMIT_S):
            await read(reader)
            await ended.wait()
        writer.transport.abort()
        server.close()
        await http.shutdown(0.1)

    asyncio.run(main())


def test_slow_client_is_cut_off_and_slows_no_other() -> None:
    """It reads nothing of a stream that is larger than every buffer on its way."""
    settings = Settings(timeouts=Timeouts(stall_s=0.5))
    with StubEngine() as fast, serving(fast, settings=settings) as gateway:
        many = MUCH | {"max_tokens": 1_000_000, "logprobs": 1}
        with gateway.open(COMPLETIONS, many):
            quick = gateway.stream(COMPLETIONS, ASKED)
            assert quick.done
            eventually(lambda: gateway.router.booked == 0)
        eventually(lambda: stats(fast)["running"] == 0)


def test_what_is_kept_for_a_client_that_reads_nothing_is_bound() -> None:
    """The kernel took 4 MiB of each beside the buffer: 40 GiB for ten thousand such clients."""
    sent, behind = 0, False

    async def endless(client: Client) -> None:
        nonlocal sent, behind
        await client.begin(200, {}, length=None)
        try:
            while True:
                await client.send(b"x" * 1000)
                sent += 1000
        finally:
            behind = client.fell_behind

    async def nothing(reader: asyncio.StreamReader) -> None:
        pass

    sending(endless, nothing, 0.3)
    assert BUFFER_BYTES < sent < MIB
    assert behind


def test_a_slow_client_that_reads_on_is_not_cut_off() -> None:
    """An answer as a whole had to be taken within `stall_s`, however long it was."""
    done, stall_s, pause_s, whole = False, 1.5, 0.1, 2 * MIB

    async def large(client: Client) -> None:
        nonlocal done
        await client.begin(200, {}, length=whole)
        await client.send(b"x" * whole)
        done = True

    async def steadily(reader: asyncio.StreamReader) -> None:
        began_s, taken = time.monotonic(), 0
        while taken < whole:
            taken += len(await reader.readexactly(min(64 * KIB, whole - taken)))
            await asyncio.sleep(pause_s)
        assert time.monotonic() - began_s > 2 * stall_s

    sending(large, steadily, stall_s)
    assert done


def test_what_is_unread_behind_the_end_of_an_answer_does_not_hold_a_connection_for_ever() -> None:
    """The request was over, so nobody waited for its client; the transport did, without an end."""
    timeouts = Timeouts(stall_s=0.5, head_s=60.0, health_s=HASTY.health_s)
    settings = Settings(timeouts=timeouts, bounds=Bounds(connections=1))
    body = MUCH | {"max_tokens": 400}  # beyond what kernels take, within what nobody waits for
    with (
        StubEngine() as fast,
        serving(fast, settings=settings) as gateway,
        asking(gateway, body),
    ):
        eventually(lambda: stats(fast)["requests"] == 1 and stats(fast)["running"] == 0)
        eventually(lambda: gateway.router.booked == 0)
        eventually(lambda: is_served(gateway))


class Wordy(BaseHTTPRequestHandler):
    """An engine whose events are larger than what is read ahead of it."""

    def do_GET(self) -> None:
        """It is well."""
        self._head("application/json")
        self.wfile.write(b'{"data": []}')

    def do_POST(self) -> None:
        """A few events."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self._head("text/event-stream")
        for number in range(3):
            choice = {"index": 0, "text": "x" * MIB, "finish_reason": "stop" if number else None}
            event = {"id": "c", "object": "text_completion", "created": 1, "choices": [choice]}
            with suppress(ConnectionError):
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        with suppress(ConnectionError):
            self.wfile.write(b"data: [DONE]\n\n")

    def _head(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextmanager
def wordy() -> Iterator[str]:
    """Its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Wordy) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(LIMIT_S)


def test_an_engine_that_waits_for_a_slow_client_does_not_count_as_hung(full: Full) -> None:
    """Half an event was there when the engine's time was over, which its client had taken."""
    timeouts = Timeouts(token_s=0.5, first_token_s=LIMIT_S, health_s=HASTY.health_s)
    body = MUCH | {"n": 2}  # what breaks cannot go on
    with (
        wordy() as url,
        serving(url, settings=Settings(timeouts=timeouts)) as gateway,
        asking(gateway, body) as link,
    ):
        assert full.wait(LIMIT_S)
        time.sleep(2 * timeouts.token_s)  # what is tested is that this time passes
        answer = read_on(link)
    assert b'"error"' not in answer
    assert len(answer) > 3 * MIB


def test_answers_that_are_held_for_slow_clients_are_bound() -> None:
    """Each may be large, and takes as long as its client: together they had no bound."""
    whole = {**ASKED, "max_tokens": 3000, "n": 64, "ignore_eos": True}
    with StubEngine() as engine:
        with serving(engine) as unbound, unbound.open(COMPLETIONS, whole) as reply:
            size = len(reply.read())
        bounds = Bounds(answers_bytes=size * 3 // 2)
        with serving(engine, settings=Settings(timeouts=HASTY, bounds=bounds)) as gateway:
            with asking(gateway, whole):
                eventually(lambda: "bytes are in flight" in str(gateway.ask(COMPLETIONS, whole)))
                assert gateway.ask(COMPLETIONS, ASKED)[0] == 200
            eventually(lambda: gateway.ask(COMPLETIONS, whole)[0] == 200)


def is_served(gateway: Running) -> bool:
    """Whether another connection is let in."""
    try:
        return gateway.ask("/healthz")[0] == 200
    except ConnectionError:
        return False


def test_what_a_slow_client_took_teaches_the_router_no_pace(
    full: Full, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow clients made engines look slow, and others were refused for it."""
    seen: dict[int, list[bool]] = {}
    with StubEngine() as fast, serving(fast, settings=Settings(timeouts=HASTY)) as gateway:
        progress = gateway.router.progress

        def heard(booking: int, tokens: int, now_s: float, *, timely: bool = True) -> None:
            seen.setdefault(booking, []).append(timely)
            progress(booking, tokens, now_s, timely=timely)

        monkeypatch.setattr(gateway.router, "progress", heard)
        assert gateway.stream(COMPLETIONS, ASKED).done
        (quick,) = seen.values()
        assert all(quick)
        seen.clear()
        with asking(gateway, MUCH | {"max_tokens": 2000, "logprobs": 1}) as link:
            assert full.wait(LIMIT_S)
            read_on(link)
        (slow,) = seen.values()
        assert not slow[-1]
