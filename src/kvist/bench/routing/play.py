"""Plays a stream against one address, and reads from a gateway's log what became of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from kvist.bench.gateway import load
from kvist.bench.gateway.processes import BenchError
from kvist.bench.routing.stream import Kind, Session

_LIMIT_S = 600.0  # of one request
_LOGGED_S = 20.0
_LOOK_S = 0.05


class Sent(msgspec.Struct, frozen=True):
    """A request as its client saw it; `name` is its id, times are in seconds."""

    name: str
    kind: Kind
    sent_s: float  # since the play began
    ttft_s: float
    took_s: float


class Logged(msgspec.Struct):
    """What is needed of a line of the gateway's log of requests."""

    request: str
    status: int
    prompt_tokens: int
    hit_tokens: int
    replicas: list[str]
    broke: list[str]
    cached_tokens: int | None = None
    predicted_ttft_s: float | None = None


class Answer(msgspec.Struct, frozen=True):
    """A request that was served.

    Attributes:
        replica: its number.
        prompt_tokens: as the engine counts them.
        cached_tokens: that the engine found in its cache; 0 where it does not say.
        expected_tokens: that the router expected there.
        predicted_ttft_s: what the router foresaw.
    """

    kind: Kind
    sent_s: float
    ttft_s: float
    took_s: float
    replica: int
    prompt_tokens: int
    cached_tokens: int
    expected_tokens: int
    predicted_ttft_s: float


async def play(
    port: int, sessions: Sequence[Session], *,
    model: str, salt: str, request_s: float, tokens: int,
) -> list[Sent]:  # fmt: skip
    """Sends every request when it is due, and those of a session one after the other.

    Args:
        port: of loopback.
        sessions: what is sent.
        model: as the engines call it.
        salt: of the caches: what another play left there is of no use to this one.
        request_s: seconds of a unit of the stream's time.
        tokens: of each answer.

    Raises:
        BenchError: a request was not served, or its stream broke.
        TimeoutError: one took ten minutes.
    """
    began_s = time.perf_counter()

    async def one(number: int, session: Session) -> list[Sent]:
        found = []
        for turn_number, turn in enumerate(session.turns):
            await asyncio.sleep(max(0.0, began_s + turn.at * request_s - time.perf_counter()))
            name = f"{salt}.{number}.{turn_number}"
            request = load.chat_bytes(
                model, turn.prompt, tokens=tokens, name=name, cache_salt=salt,
                stream_options={"include_usage": True},
            )  # fmt: skip
            sent_s = time.perf_counter() - began_s
            timing = await load.timed(port, request, _LIMIT_S)
            found.append(Sent(name, session.kind, sent_s, timing.ttft_s, timing.took_s))
        return found

    found = await asyncio.gather(*(one(n, session) for n, session in enumerate(sessions)))
    return [sent for part in found for sent in part]


async def logged(log: Path, names: Collection[str]) -> dict[str, Logged]:
    """What a gateway logged of these requests; it does so a moment after their ends.

    Raises:
        TimeoutError: one is not there.
    """
    async with asyncio.timeout(_LOGGED_S):
        while not (found := _read(log)).keys() >= set(names):
            await asyncio.sleep(_LOOK_S)
    return found


def _read(log: Path) -> dict[str, Logged]:
    """The requests of a log, by their ids."""
    found = {}
    whole, _, _ = log.read_bytes().rpartition(b"\n")
    for line in whole.splitlines():
        start = line.find(b"{")
        if start >= 0 and b'"request"' in line:
            record = msgspec.json.decode(line[start:], type=Logged)
            found[record.request] = record
    return found


def answers(
    sent: Sequence[Sent], records: Mapping[str, Logged], urls: Sequence[str]
) -> list[Answer]:
    """Client's and gateway's view together; `urls` are the replicas in order.

    Raises:
        BenchError: a replica broke, and the run says nothing.
    """
    found = []
    for one in sent:
        record = records[one.name]
        if len(record.replicas) != 1 or record.broke:
            raise BenchError(f"request {one.name} did not go to one replica: {record}")
        found.append(
            Answer(
                one.kind,
                one.sent_s,
                one.ttft_s,
                one.took_s,
                urls.index(record.replicas[0]),
                record.prompt_tokens,
                record.cached_tokens or 0,
                record.hit_tokens,
                record.predicted_ttft_s or 0.0,
            )
        )
    return found
