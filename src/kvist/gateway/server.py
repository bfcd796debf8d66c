"""The gateway as a server: its connections, its start, and an end that loses nothing.

Told to end, it goes on serving for `leave_s` while `/readyz` says no; then it listens no more, and
requests that are under way have `drain_s` to come to their end.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

from kvist.gateway.connections import HttpServer
from kvist.gateway.front import Front, Parts
from kvist.gateway.hearing import Hearing
from kvist.gateway.limits import TenantLimits
from kvist.gateway.peers import Peers
from kvist.gateway.prompt import Prompts
from kvist.gateway.relay import Relay
from kvist.gateway.replicas import Replicas
from kvist.gateway.settings import Settings
from kvist.gateway.telemetry import Telemetry
from kvist.gateway.tracer import Tracer
from kvist.gateway.upstream import open_session
from kvist.gateway.waiting import Waiting
from kvist.node.http.tokens import Tokens
from kvist.router.fairness import FairQueue
from kvist.router.prefixes import IndexedPrefixes
from kvist.router.protocol import Router

_log = logging.getLogger(__name__)
_BACKLOG = 2048
_LOOK_S = 0.02
_CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Gateway:
    """What a gateway is made of.

    Attributes:
        prefill_urls: engines that only compute prompts for those at `urls`.
        tokens: None: nobody needs a key.
        prefixes: what the router knows of prefixes; None: nothing that can be measured.
        hearing: what fills it; None: what engines and nodes say is not heard.
        peers: other gateways; None: it is alone.
    """

    urls: tuple[str, ...]
    router: Router
    queue: FairQueue
    prompts: Prompts
    limits: TenantLimits
    tracer: Tracer
    tokens: Tokens | None
    settings: Settings
    version: str
    tls: ssl.SSLContext | None = None
    prefill_urls: tuple[str, ...] = ()
    prefixes: IndexedPrefixes | None = None
    hearing: Hearing | None = None
    peers: Peers | None = None

    def measures(self) -> dict[str, float]:
        """Those of its parts that are not requests', under the names of `kvist.metrics`."""
        found: dict[str, float] = {}
        for part in (self.prefixes, self.hearing, self.peers):
            if part is not None:
                found |= part.measures()
        return found

    def close(self) -> None:
        """Lets go of what it was made with. Nothing of it may be running; idempotent."""
        self.prompts.close()
        self.tracer.close()
        if self.peers is not None:
            self.peers.close()

    def events_of(self, replica: str) -> str:
        """What is known of a replica by its events; see `Hearing.state`."""
        return self.hearing.state(replica) if self.hearing is not None else "silent"


async def serve(
    gateway: Gateway,
    listener: socket.socket,
    stop: asyncio.Future[None],
    on_ready: Callable[[], None],
) -> None:
    """Serves on `listener` until `stop` is done, and then until nothing is under way."""
    loop, settings = asyncio.get_running_loop(), gateway.settings
    async with open_session(settings) as session, _beside(gateway):
        key = {"Authorization": f"Bearer {settings.engine_key}"} if settings.engine_key else {}
        replicas = Replicas(roles_of(gateway), gateway.router, session, settings.timeouts, key)
        waiting = Waiting(
            gateway.queue,
            gateway.router,
            loop.time,
            most_s=settings.timeouts.first_token_s,
        )
        telemetry = Telemetry(
            lambda: front.in_flight, lambda: gateway.router.booked, gateway.measures
        )
        parts = Parts(
            relay=Relay(gateway.router, replicas, waiting, session, settings, loop.time),
            replicas=replicas,
            prompts=gateway.prompts,
            limits=gateway.limits,
            telemetry=telemetry,
            tracer=gateway.tracer,
            tokens=gateway.tokens,
            settings=settings,
            version=gateway.version,
            events=gateway.events_of,
        )
        front = Front(parts, loop.time)
        await replicas.start()
        http = HttpServer(front.handle, settings)
        server = await loop.create_server(http, sock=listener, backlog=_BACKLOG, ssl=gateway.tls)
        on_ready()
        try:
            await stop
            await _drain(front, http, server, settings)
        finally:
            server.close()
            await http.shutdown(_CLOSE_S)
            await replicas.stop()


def roles_of(gateway: Gateway) -> dict[str, str]:
    """What each engine does, by its URL: `decode` beside such that only prefill, else `both`."""
    answers = "decode" if gateway.prefill_urls else "both"
    roles = dict.fromkeys(gateway.urls, answers)
    return roles | dict.fromkeys(gateway.prefill_urls, "prefill")


@asynccontextmanager
async def _beside(gateway: Gateway) -> AsyncIterator[None]:
    """Hears engines, nodes and other gateways, and tells these, while the body runs."""
    hearing, peers = gateway.hearing, gateway.peers
    async with AsyncExitStack() as stack:
        stack.callback(gateway.close)
        if hearing is not None:
            hearing.start()
            stack.push_async_callback(asyncio.to_thread, hearing.close)
        if peers is not None:
            told = asyncio.create_task(peers.run(asyncio.get_running_loop().time))
            stack.push_async_callback(_ended, told)
        yield


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _drain(
    front: Front, http: HttpServer, server: asyncio.Server, settings: Settings
) -> None:
    front.leaving = True
    await asyncio.sleep(settings.leave_s)
    server.close()
    http.pre_shutdown()  # connections without a request end now, the others behind it
    loop = asyncio.get_running_loop()
    until_s = loop.time() + settings.drain_s
    while front.in_flight and loop.time() < until_s:
        await asyncio.sleep(_LOOK_S)
    if front.in_flight:
        _log.warning("%d requests did not end in time", front.in_flight)
