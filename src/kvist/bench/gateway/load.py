"""Clients that cost little: bytes made once are sent, and only first tokens are looked for."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from kvist.bench.gateway.processes import BenchError

_FIRST = b'"content":"'
_DONE = b"data: [DONE]"
_SERVED = b"HTTP/1.1 200 "
_SAID_BYTES = 400
_LIMIT_S = 60.0
_CONNECTING = 64
_PROMPT_CHARS = 1000
_DRIP_S = 1.0
_LETTERS = "eeeettaaooiinnsshhrrdlcum"


def request_bytes(
    *, tokens: int, prompt_chars: int = _PROMPT_CHARS, logprobs: bool = False, seed: int = 0
) -> bytes:
    """A streamed chat with a stub, as bytes on the wire; `seed` makes its text."""
    chance, text = random.Random(seed), f"question {seed}:"
    while len(text) < prompt_chars:
        text += " " + "".join(chance.choices(_LETTERS, k=chance.randint(1, 9)))
    return chat_bytes("stub", text[:prompt_chars], tokens=tokens, logprobs=logprobs)


def chat_bytes(model: str, text: str, *, tokens: int, name: str = "", **fields: Any) -> bytes:
    """A streamed greedy chat of exactly `tokens` tokens, as bytes on the wire.

    Args:
        model: as the engine calls it.
        text: of the only message.
        tokens: of the answer.
        name: of the request, for logs.
        fields: more of the body.
    """
    asked = {"model": model, "messages": [{"role": "user", "content": text}], "stream": True}
    asked |= {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, **fields}
    body = json.dumps(asked).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"X-Request-Id: {name}\r\n" if name else ""
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@dataclass(slots=True)
class Timing:
    """Seconds of one stream: to its first token, and to its end."""

    ttft_s: float
    took_s: float


class Stream(asyncio.Protocol):
    """One connection: sends a request, waits for its first token or its end."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[float] = loop.create_future()
        self.end: asyncio.Future[float] = loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Looks for the first token, which is the first text that is not empty, and the end."""
        seen = self._tail + data
        if not self._tail and not data.startswith(_SERVED[: len(data)]):
            self._fail(f"it was not served: {data[:_SAID_BYTES]!r}")
        if not self.first.done():
            place = seen.find(_FIRST)
            while place >= 0 and seen[place + len(_FIRST) :].startswith(b'"'):  # the role's
                place = seen.find(_FIRST, place + 1)
            if 0 <= place < len(seen) - len(_FIRST):
                self.first.set_result(time.perf_counter())
        if not self.end.done() and _DONE in seen:
            ended_s = time.perf_counter()
            self.end.set_result(ended_s)
            if not self.first.done():  # an answer without text
                self.first.set_result(ended_s)
        self._tail = seen[-64:]

    def connection_lost(self, exc: Exception | None) -> None:
        """It broke, if something is still waited for."""
        self._fail(f"a stream broke; it ended: {self._tail!r}")

    def _fail(self, why: str) -> None:
        for waited in (self.first, self.end):
            if not waited.done():
                waited.set_exception(BenchError(why))
                waited.exception()  # looked at: who left early does not wait for it

    def send(self, data: bytes) -> None:
        """Sends a request."""
        assert self._transport is not None
        self._transport.write(data)

    def read_nothing(self) -> None:
        """From now on what comes stays where it is."""
        assert self._transport is not None
        self._transport.pause_reading()

    def drip(self) -> None:
        """From now on it takes a byte a second."""
        self.read_nothing()
        assert self._transport is not None
        place = self._transport.get_extra_info("socket").fileno()
        if place < 0:  # it is over
            return
        with suppress(BlockingIOError, ConnectionError):
            os.read(place, 1)
        self._timer = asyncio.get_running_loop().call_later(_DRIP_S, self.drip)

    def close(self) -> None:
        """Ends it."""
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Stream]:
    """A stream that is open."""
    _, stream = await asyncio.get_running_loop().create_connection(Stream, "127.0.0.1", port)
    try:
        yield stream
    finally:
        stream.close()


async def timed(port: int, request: bytes, limit_s: float = _LIMIT_S) -> Timing:
    """One stream on a connection of its own, read to its end.

    Raises:
        BenchError: it was not served, or broke.
        TimeoutError: it took longer than `limit_s`.
    """
    async with connected(port) as stream:
        began_s = time.perf_counter()
        stream.send(request)
        async with asyncio.timeout(limit_s):
            first_s, end_s = await stream.first, await stream.end
    return Timing(first_s - began_s, end_s - began_s)


async def poisson(port: int, requests: Sequence[bytes], *, rate_rps: float, seed: int) -> Load:
    """Streams that begin at times drawn beforehand, whether or not earlier ones have ended."""
    chance, tasks = random.Random(seed), []
    at_s = time.perf_counter()
    for request in requests:
        at_s += chance.expovariate(rate_rps)
        await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
        tasks.append(asyncio.create_task(timed(port, request)))
    found = await asyncio.gather(*tasks)
    return Load(list(found))


@dataclass(slots=True)
class Load:
    """What streams took."""

    timings: list[Timing] = field(default_factory=list)

    def ttft_s(self, quantile: float) -> float:
        """Of the times to a first token."""
        times = sorted(t.ttft_s for t in self.timings)
        return times[min(len(times) - 1, int(quantile * len(times)))]


async def opened(port: int, request: bytes, count: int, *, stalled: bool = False) -> list[Stream]:
    """Streams that have their first token; `stalled`: of the rest half of them read nothing, the
    others a byte a second.
    """
    streams: list[Stream] = []
    gate = asyncio.Semaphore(_CONNECTING)

    async def one(number: int) -> None:
        async with gate:
            loop = asyncio.get_running_loop()
            _, stream = await loop.create_connection(Stream, "127.0.0.1", port)
            streams.append(stream)
            stream.send(request)
            async with asyncio.timeout(_LIMIT_S):
                await stream.first
            if stalled and number % 2:
                stream.drip()
            elif stalled:
                stream.read_nothing()

    await asyncio.gather(*(one(number) for number in range(count)))
    return streams
