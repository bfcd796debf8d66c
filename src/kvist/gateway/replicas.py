"""Which replicas are up: each is asked in turn, and one that hangs has its requests taken away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack

import aiohttp
import msgspec
from multidict import CIMultiDict

from kvist.gateway.settings import Timeouts
from kvist.gateway.upstream import OK, Attempt, Broken, Replica
from kvist.router.protocol import Router

_log = logging.getLogger(__name__)
_FAILURES = 2  # in a row, until a replica counts as down
_MODELS_EVERY_S = 30.0
_HUNG = "it hangs"


class ModelCard(msgspec.Struct):
    """Of `/v1/models`."""

    id: str
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[ModelCard]


class Replicas:
    """The replicas of a gateway, whose state its router is told."""

    def __init__(
        self,
        roles: Mapping[str, str],
        router: Router,
        session: aiohttp.ClientSession,
        timeouts: Timeouts,
        headers: Mapping[str, str],
    ) -> None:
        """`roles`: what each does, by its URL; `headers`: what engines want of each request."""
        self._router, self._session, self._timeouts = router, session, timeouts
        self._headers: CIMultiDict[str] = CIMultiDict(headers)
        self._by_url = {url: Replica(url, role) for url, role in roles.items()}
        self._wake: dict[str, asyncio.Future[None]] = {}
        self._models: dict[str, ModelCard] = {}
        self._models_s = -_MODELS_EVERY_S
        self._tasks: list[asyncio.Task[None]] = []
        for url, role in roles.items():
            router.add(url, role=role)
            router.set_state(url, healthy=False)

    def __getitem__(self, url: str) -> Replica:
        return self._by_url[url]

    def all(self) -> list[Replica]:
        """Every replica, in the order of the configuration."""
        return list(self._by_url.values())

    @property
    def are_ready(self) -> bool:
        """Whether any can serve."""
        return any(
            r.healthy and not r.draining and r.role != "prefill" for r in self._by_url.values()
        )

    def model(self, name: str | None) -> ModelCard | None:
        """What the replicas say of a model or an adapter; without a name of the first."""
        if name is None:
            return next(iter(self._models.values()), None)
        return self._models.get(name)

    def drain(self, url: str, *, draining: bool) -> None:
        """Whether a replica gets nothing new; what it has it finishes.

        Raises:
            KeyError: there is none.
        """
        replica = self._by_url[url]
        replica.draining = draining
        self._tell(replica)

    def suspect(self, url: str) -> None:
        """Nobody listens there: it counts as down until somebody says otherwise."""
        self._down(self._by_url[url], "nobody listens there")
        wake = self._wake.get(url)
        if wake is not None and not wake.done():
            wake.set_result(None)

    async def start(self) -> None:
        """Asks every replica once, then goes on asking beside."""
        await asyncio.gather(*(self._ask(replica) for replica in self.all()))
        self._tasks = [asyncio.create_task(self._watch(replica)) for replica in self.all()]

    async def stop(self) -> None:
        """Asks no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, replica: Replica) -> None:
        loop, failures, since_s = asyncio.get_running_loop(), 0, 0.0
        while True:
            wake = self._wake[replica.url] = loop.create_future()
            await asyncio.wait([wake], timeout=self._timeouts.health_s)
            began_s = loop.time()
            if await self._ask(replica):
                failures = 0
                continue
            failures += 1
            since_s = began_s if failures == 1 else since_s
            if failures >= _FAILURES:
                self._down(replica, "it does not answer")
                if replica.heard_s < since_s:  # one that still sends is slow, and no more
                    for attempt in tuple(replica.open):
                        attempt.give_up(_HUNG)

    async def _ask(self, replica: Replica) -> bool:
        """Asks a replica whether it is well; marks it up if it is."""
        until_s = asyncio.get_running_loop().time() + self._timeouts.health_s
        try:
            if await self._get(replica, "/health", until_s) is None:
                return False
            await self._learn_models(replica, until_s)
        except Broken:
            return False
        if not replica.healthy:
            replica.healthy = True
            _log.info("replica %s is up", replica.url)
            self._tell(replica)
        return True

    async def _learn_models(self, replica: Replica, until_s: float) -> None:
        now_s = asyncio.get_running_loop().time()
        if replica.healthy and now_s - self._models_s < _MODELS_EVERY_S:
            return
        found = await self._get(replica, "/v1/models", until_s)
        try:
            cards = msgspec.json.decode(found or b"", type=_Models).data
        except msgspec.MsgspecError:
            return  # an engine that says nothing of its models serves all the same
        self._models, self._models_s = {card.id: card for card in cards}, now_s

    async def _get(self, replica: Replica, path: str, until_s: float) -> bytes | None:
        """The body of a 200, or None."""
        async with AsyncExitStack() as stack:
            # Not among the replica's open attempts: what is heard here says nothing of them.
            probed = Replica(replica.url)
            attempt = await stack.enter_async_context(Attempt(self._session, probed))
            await attempt.open(path, None, self._headers, until_s)
            reply = await attempt.whole(until_s)
        return reply.body if reply.status == OK else None

    def _down(self, replica: Replica, why: str) -> None:
        if replica.healthy:
            replica.healthy = False
            _log.warning("replica %s is down: %s", replica.url, why)
            self._tell(replica)

    def _tell(self, replica: Replica) -> None:
        self._router.set_state(replica.url, healthy=replica.healthy, draining=replica.draining)
