"""Direct and through the gateway in turn, in one run, so that a difference is the gateway's."""

from __future__ import annotations

import asyncio
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvist.bench.gateway import load
from kvist.bench.gateway.processes import Process, cores, engine, gateway, storm

_SPARE_DESCRIPTORS = 100
_SETTLE_S = 1.0
_STORM_S = 5.0
_WARM = 50
_STILL_CPU_S = 0.05
_STALLED_TOKENS = 200_000
_LONG_S = 3600.0
_WAITS = (
    "token_s",
    "health_s",
    "connect_s",
)  # an engine that opens thousands of streams answers nothing else


class Settings(msgspec.Struct, frozen=True):
    """What is asked of a run."""

    rounds: int = 5
    rate_rps: float = 200.0
    requests: int = 2000  # of each round and way
    tokens: int = 16
    token_s: float = 0.01
    streams: int = 10_000
    stalled: int = 10
    blocks_per_s: float = 20_000.0  # of events that come in meanwhile
    tokenizer: str = ""  # of the model whose prompts are read; none: nobody reads them


class Added(msgspec.Struct, frozen=True):
    """One round: seconds to the first token, direct and through the gateway, and its CPU time."""

    direct_p50_s: float
    direct_p99_s: float
    gateway_p50_s: float
    gateway_p99_s: float
    cpu_s_per_request: float


class Idle(msgspec.Struct, frozen=True):
    """Memory of a gateway that holds streams whose next token is far away."""

    streams: int
    before_bytes: int
    after_bytes: int


class Slow(msgspec.Struct, frozen=True):
    """Seconds to the first token while others read next to nothing, beside the same without."""

    stalled: int
    p50_s: float
    p99_s: float
    quiet_p50_s: float
    quiet_p99_s: float
    grown_bytes: int


class Hearing(msgspec.Struct, frozen=True):
    """Seconds that events add to the first token, by round, and the gateway's CPU time for them."""

    blocks_per_s: float
    added_p50_s: list[float]
    added_p99_s: list[float]
    cores: float


class Outcomes(msgspec.Struct):
    """All of a run."""

    settings: Settings
    added: list[Added] = []
    idle: Idle | None = None
    slow: Slow | None = None
    hearing: Hearing | None = None

    def added_p50_s(self) -> float:
        """Median over the rounds of what the gateway adds to the median TTFT."""
        return statistics.median(r.gateway_p50_s - r.direct_p50_s for r in self.added)

    def added_p99_s(self) -> float:
        """The same of the 99th percentile."""
        return statistics.median(r.gateway_p99_s - r.direct_p99_s for r in self.added)


def measure(
    settings: Settings, tell: Callable[[str], None], *, tokenizer: Path | None = None
) -> Outcomes:
    """Runs all; `tell` gets a line now and then.

    Args:
        tokenizer: folder of the model whose tokenizer reads the prompts.

    Raises:
        BenchError: a process did not start, or a stream broke.
    """
    # Two descriptors of the gateway for each stream.
    descriptors = raise_descriptors(2 * settings.streams + _SPARE_DESCRIPTORS)
    found = Outcomes(settings)
    ours, theirs = cores()
    pace = f"--token-s={settings.token_s}"
    reads = [f"--set=gateway.tokenizer={tokenizer}"] if tokenizer else []
    with engine(pace, core=theirs) as stub, gateway([stub.url], *reads, core=ours) as front:
        for number in range(settings.rounds):
            found.added.append(asyncio.run(_added(settings, stub, front, number)))
            tell(f"overhead: round {number + 1} of {settings.rounds}")
    blocks = "--set=block_tokens=16"
    with (
        engine(pace, core=theirs) as stub,
        storm(settings.blocks_per_s, core=theirs) as events,
        gateway([stub.url], blocks, core=ours) as deaf,
        gateway([f"{stub.url}?events=tcp://127.0.0.1:{events.port}"], blocks, core=ours) as front,
    ):
        tell(f"{settings.blocks_per_s:.0f} blocks of events a second")
        found.hearing = asyncio.run(_hearing(settings, deaf, front))
    streams = min(settings.streams, (descriptors - _SPARE_DESCRIPTORS) // 2)
    if streams < settings.streams:
        tell(f"a process may have {descriptors} descriptors only: fewer streams than asked for")
    with (
        engine(f"--token-s={_LONG_S}", core=theirs) as stub,
        gateway(
            [stub.url], *(f"--set=gateway.timeouts.{t}={_LONG_S}" for t in _WAITS), core=ours
        ) as front,
    ):
        tell(f"memory: {streams} idle streams")
        found.idle = asyncio.run(_idle(front, streams))
    with engine(core=theirs) as stub, gateway([stub.url], core=ours) as front:
        tell("others while some clients read nothing, or a byte a second")
        found.slow = asyncio.run(_slow(settings, stub, front))
    return found


def raise_descriptors(needed: int) -> int:
    """Lets this process and its children have `needed` descriptors, if it may; how many they may.

    Only root goes beyond the hard limit.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (max(needed, hard), hard):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        except (ValueError, OSError):
            continue
        return limit
    return hard


def _requests(settings: Settings, number: int) -> list[bytes]:
    """Of one round. No two are alike: what is kept of one prompt spares nothing of another."""
    first = number * settings.requests
    return [
        load.request_bytes(tokens=settings.tokens, seed=first + n) for n in range(settings.requests)
    ]


async def _added(settings: Settings, stub: Process, front: Process, number: int) -> Added:
    requests = _requests(settings, number)
    for port in (stub.port, front.port):
        await load.poisson(port, requests[:_WARM], rate_rps=settings.rate_rps, seed=0)

    async def run(port: int) -> load.Load:
        return await load.poisson(port, requests, rate_rps=settings.rate_rps, seed=number)

    if number % 2:
        direct = await run(stub.port)
    before_s = front.cpu_s()
    through = await run(front.port)
    cpu_s = front.cpu_s() - before_s
    if not number % 2:
        direct = await run(stub.port)
    return Added(
        direct.ttft_s(0.5),
        direct.ttft_s(0.99),
        through.ttft_s(0.5),
        through.ttft_s(0.99),
        cpu_s / settings.requests,
    )


async def _hearing(settings: Settings, deaf: Process, front: Process) -> Hearing:
    """Two gateways by turns, one of which hears events."""
    p50_s, p99_s = [], []
    before_s, began_s = front.cpu_s(), time.monotonic()
    await asyncio.sleep(_STORM_S)
    cores = (front.cpu_s() - before_s) / (time.monotonic() - began_s)
    for number in range(settings.rounds):
        found, requests = {}, _requests(settings, number)
        for one in (deaf, front) if number % 2 else (front, deaf):
            found[one.port] = await load.poisson(
                one.port, requests, rate_rps=settings.rate_rps, seed=number
            )
        quiet, beside = found[deaf.port], found[front.port]
        p50_s.append(beside.ttft_s(0.5) - quiet.ttft_s(0.5))
        p99_s.append(beside.ttft_s(0.99) - quiet.ttft_s(0.99))
    return Hearing(settings.blocks_per_s, p50_s, p99_s, cores)


async def _idle(front: Process, count: int) -> Idle:
    request = load.request_bytes(tokens=16, prompt_chars=100)
    (warm,) = await load.opened(front.port, request, 1)
    before = front.rss_bytes()
    streams = await load.opened(front.port, request, count - 1)
    await asyncio.sleep(_SETTLE_S)
    found = Idle(count, before, front.rss_bytes())
    for stream in (warm, *streams):
        stream.close()
    return found


async def _slow(settings: Settings, stub: Process, front: Process) -> Slow:
    requests = [load.request_bytes(tokens=settings.tokens)] * (settings.requests // 4)

    async def others(seed: int) -> load.Load:
        return await load.poisson(front.port, requests, rate_rps=settings.rate_rps / 4, seed=seed)

    await others(0)
    quiet, before = await others(1), front.rss_bytes()
    much = load.request_bytes(tokens=_STALLED_TOKENS, logprobs=True)
    stalled = await load.opened(front.port, much, settings.stalled, stalled=True)
    await _until_still(stub)
    beside = await others(1)
    found = Slow(
        settings.stalled,
        beside.ttft_s(0.5),
        beside.ttft_s(0.99),
        quiet.ttft_s(0.5),
        quiet.ttft_s(0.99),
        front.rss_bytes() - before,
    )
    for stream in stalled:
        stream.close()
    return found


async def _until_still(process: Process) -> None:
    """Waits until every buffer is full, so that an engine that never rests has to."""
    used_s = -1.0
    while process.cpu_s() - used_s > _STILL_CPU_S:
        used_s = process.cpu_s()
        await asyncio.sleep(_SETTLE_S)
