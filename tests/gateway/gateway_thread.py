"""A gateway on a thread of this process, clients of it, and what one engine alone says."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from kvist.assemble.gateway import open_gateway
from kvist.assemble.routing import queue_of, router_of
from kvist.config import RouterConfig, load_config
from kvist.gateway.limits import TenantLimits
from kvist.gateway.prompt import Prompts
from kvist.gateway.server import Gateway, serve
from kvist.gateway.settings import Settings, Timeouts
from kvist.gateway.tracer import NoTracer, Tracer
from kvist.node.http.tokens import Tokens
from kvist.router.candidates import Prefix
from kvist.router.conductor import KvistRouter
from kvist.router.index import PrefixIndex
from kvist.router.prefixes import IndexedPrefixes
from kvist.router.protocol import Router
from kvist.router.splitting import Splitting
from kvist.testing.stub_engine import StubEngine

LIMIT_S = 20.0
HASTY = Timeouts(connect_s=5.0, first_token_s=20.0, token_s=20.0, health_s=1.0)


@dataclass
class Running:
    """A gateway that serves; `router` is the one it asks."""

    port: int
    router: Router
    stop: Callable[[], None]
    prefixes: IndexedPrefixes | None = None

    def holders(self, text: str, salt: str = "") -> Mapping[str, Prefix]:
        """What its router believes of a prompt."""
        assert self.prefixes is not None
        return self.prefixes.match(self.prefixes.keys(list(text.encode()), "", salt))

    def events_of(self, engine: StubEngine) -> str:
        """Whether an engine's events are heard."""
        found = self.ask("/replicas")[1]["replicas"]
        return str(next(r["events"] for r in found if r["url"] == engine.url))

    def samples(self) -> dict[str, float]:
        """The values of `/metrics`, by name with labels."""
        page = self.ask("/metrics")[1]
        lines = [line for line in page.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def ask(
        self,
        path: str,
        body: object = None,
        *,
        headers: Mapping[str, str] | None = None,
        method: str = "",
    ) -> tuple[int, Any, Mapping[str, str]]:
        """Status, body (of JSON its value) and headers, whose names are in lower case."""
        with self.open(path, body, headers=headers, method=method) as reply:
            text = reply.read()
            is_json = reply.headers.get_content_type() == "application/json"
            value = json.loads(text) if is_json else text.decode()
            return reply.status, value, {n.lower(): v for n, v in reply.headers.items()}

    @contextmanager
    def open(
        self,
        path: str,
        body: object = None,
        *,
        headers: Mapping[str, str] | None = None,
        method: str = "",
    ) -> Iterator[HTTPResponse]:
        """An answer whose body is not read yet; the connection ends with the context."""
        link = HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        kind = {} if body is None else {"Content-Type": "application/json"}
        link.request(
            method or ("GET" if body is None else "POST"), path, data, {**kind, **(headers or {})}
        )
        reply = link.getresponse()
        try:
            yield reply
        finally:
            reply.close()
            link.close()

    def stream(self, path: str, body: dict[str, Any]) -> Stream:
        """A streamed answer, read to its end."""
        with self.open(path, body | {"stream": True}) as reply:
            assert reply.status == 200, reply.read()
            return read_stream(reply)


@dataclass
class Stream:
    """What a client makes of a stream."""

    events: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False

    @property
    def text(self) -> str:
        """All that was said, of a completion or a chat."""
        parts = []
        for event in self.events:
            for choice in event.get("choices", ()):
                parts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
        return "".join(parts)

    @property
    def tokens(self) -> list[int]:
        """Ids, if they were asked for."""
        return [t for e in self.events for c in e["choices"] for t in c.get("token_ids") or ()]

    @property
    def finish(self) -> list[str]:
        """Why each choice ended."""
        reasons = [c.get("finish_reason") for e in self.events for c in e.get("choices", ())]
        return [reason for reason in reasons if reason]

    @property
    def usage(self) -> dict[str, int] | None:
        """Of the last event that has one."""
        found = [event["usage"] for event in self.events if event.get("usage")]
        return found[-1] if found else None

    @property
    def error(self) -> dict[str, Any] | None:
        """A fault that ended it."""
        found = [event["error"] for event in self.events if event.get("error")]
        return found[0] if found else None


def read_stream(reply: HTTPResponse, on_event: Callable[[int], None] | None = None) -> Stream:
    """Reads events to the end; `on_event` gets the count of those that came."""
    found = Stream()
    for line in reply:
        data = line.strip().removeprefix(b"data: ")
        if not data:
            continue
        if data == b"[DONE]":
            found.done = True
            continue
        found.events.append(json.loads(data))
        if on_event is not None:
            on_event(len(found.events))
    return found


@contextmanager
def serving(
    *engines: StubEngine | str,
    prefill: Sequence[StubEngine | str] = (),
    splitting: Splitting | None = None,
    settings: Settings | None = None,
    limits: TenantLimits | None = None,
    tokens: Tokens | None = None,
    tracer: Tracer | None = None,
    prompts: Prompts | None = None,
) -> Iterator[Running]:
    """A gateway in front of engines; no booking may be open when it ends."""
    gateway = Gateway(
        urls=urls_of(engines),
        prefill_urls=urls_of(prefill),
        router=small_router(splitting),
        queue=queue_of(RouterConfig()),
        prompts=prompts or Prompts(None, None),
        limits=limits or TenantLimits(),
        tracer=tracer or NoTracer(),
        tokens=tokens,
        settings=settings or Settings(timeouts=HASTY, drain_s=5.0),
        version="1",
    )
    with running(gateway, socket.create_server(("127.0.0.1", 0))) as found:
        yield found


@contextmanager
def configured(
    engines: Sequence[StubEngine], folder: Path, *sets: str, file: Path | None = None
) -> Iterator[Running]:
    """A gateway as `kvist gateway` makes it, which hears its engines. `folder`: a tokenizer's."""
    listed = ",".join(f"{e.url}?events={e.events}&replay={e.replay}" for e in engines)
    own = [f"gateway.replicas={listed}", f"gateway.tokenizer={folder}", "block_tokens=16"]
    own += ["gateway.listen=127.0.0.1:0", "gateway.drain_s=5", "gateway.timeouts.health_s=1"]
    gateway, listener = open_gateway(load_config(file, env={}, sets=[*own, *sets]).config)
    with running(gateway, listener) as found:
        yield found


@contextmanager
def running(gateway: Gateway, listener: socket.socket) -> Iterator[Running]:
    """The gateway on a thread of its own; no booking may be open when it ends."""
    router = gateway.router
    loop, ready = asyncio.new_event_loop(), threading.Event()
    stop: asyncio.Future[None] = loop.create_future()

    def end() -> None:
        if not stop.done():
            stop.set_result(None)

    def run() -> None:
        loop.run_until_complete(serve(gateway, listener, stop, ready.set))
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(LIMIT_S)
        yield Running(
            listener.getsockname()[1],
            router,
            lambda: loop.call_soon_threadsafe(end),
            gateway.prefixes,
        )
        eventually(lambda: router.booked == 0)
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(end)
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "the gateway does not end"


def byte_tokenizer(folder: Path) -> Path:
    """Writes a tokenizer that reads ASCII as stub engines do: a token a character."""
    letters = {chr(i): i for i in range(1, 128)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def small_router(splitting: Splitting | None = None) -> KvistRouter:
    """A router as `kvist gateway` has it, but that it chooses in an order that tests foresee."""
    prefixes = IndexedPrefixes(PrefixIndex(block_tokens=16, fingerprint=bytes(32)))
    config = RouterConfig(policy="round-robin")
    return router_of(config, 16, prefixes, random.Random(), splitting=splitting)


def urls_of(engines: Sequence[StubEngine | str]) -> tuple[str, ...]:
    """Where they listen."""
    return tuple(e if isinstance(e, str) else e.url for e in engines)


def eventually(holds: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Waits for what another thread or process brings about."""
    until = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until, "it did not come about"
        time.sleep(0.005)


def stats(engine: StubEngine) -> dict[str, Any]:
    """What an engine remembers."""
    link = HTTPConnection("127.0.0.1", engine.port, timeout=LIMIT_S)
    link.request("GET", "/stats")
    found: dict[str, Any] = json.loads(link.getresponse().read())
    link.close()
    found["last_headers"] = {n.lower(): v for n, v in found["last_headers"].items()}
    return found


def alone(engine: StubEngine, path: str, body: dict[str, Any]) -> Stream:
    """What an engine says without a gateway."""
    return Running(engine.port, small_router(), lambda: None).stream(path, body)
