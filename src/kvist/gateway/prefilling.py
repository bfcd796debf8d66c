"""Has a prefill replica compute a prompt before the replica that answers gets the request.

Whatever becomes of it, the request is served: a prefill that is late or refused is left, and the
replica that answers computes the prompt; one that broke is `PrefillLost`, and the replicas are
chosen anew. Leaving `ahead` early, by a client that is gone, has the prefill engine abort.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

import aiohttp
from multidict import CIMultiDict

from kvist.gateway.faults import overloaded
from kvist.gateway.handover import for_decode, for_prefill
from kvist.gateway.record import Prefill, Record
from kvist.gateway.replicas import Replicas
from kvist.gateway.resume import Plan
from kvist.gateway.settings import Settings
from kvist.gateway.upstream import ELSEWHERE, Attempt, Broken, Reply
from kvist.router.protocol import Choice, Router


class PrefillLost(Broken):
    """The prefill replica broke; nothing was asked of the one that answers."""


class Prefills:
    """The prefills of one gateway."""

    def __init__(
        self,
        router: Router,
        replicas: Replicas,
        session: aiohttp.ClientSession,
        settings: Settings,
        clock: Callable[[], float],
    ) -> None:
        """`clock` is the event loop's."""
        self._router, self._replicas, self._session = router, replicas, session
        self._how, self._limits = settings.prefilling, settings.timeouts
        self._clock = clock

    async def ahead(
        self, choice: Choice, plan: Plan, headers: CIMultiDict[str], record: Record
    ) -> bytes:
        """The body for the replica that answers, when its prompt was computed or will not be.

        Raises:
            PrefillLost: the prefill replica broke.
            Fault: 429, meanwhile the other has too much to do.
        """
        if choice.prefill is None:
            return plan.body
        until_s = self._clock() + self._patience_s(choice)
        ended: Prefill = "cancelled"
        body: bytes | None = None
        try:
            reply = await self._compute(choice.prefill, plan, headers, until_s)
            if reply.status == HTTPStatus.OK:
                body = for_decode(plan.body, reply.body, self._how.transport)
            ended = "refused" if body is None else "ok"
        except Broken as broken:
            ended = "late" if self._clock() >= until_s else "lost"
            if ended == "lost":
                raise PrefillLost(str(broken), is_gone=broken.is_gone) from broken
        finally:
            record.prefills = [*record.prefills, choice.prefill]
            record.prefilled = [*record.prefilled, ended]
            self._router.prefilled(choice.booking, self._clock(), done=ended == "ok")
        if body is None:
            return plan.body
        refused = self._router.joins(choice.booking)
        if refused is not None:
            raise overloaded(refused)
        return body

    async def _compute(
        self, url: str, plan: Plan, headers: CIMultiDict[str], until_s: float
    ) -> Reply:
        """The prefill replica's answer, which may refuse the request for what it asks."""
        asked = for_prefill(plan.body, self._how.transport)
        async with Attempt(self._session, self._replicas[url]) as attempt:
            await attempt.open(plan.path, asked, headers, until_s)
            reply = await attempt.whole(until_s)
        if reply.status in ELSEWHERE:
            raise Broken(f"it answered {reply.status}")
        return reply

    def _patience_s(self, choice: Choice) -> float:
        limit_s = self._limits.first_token_s
        if choice.prefill_s is None:
            return limit_s
        return min(limit_s, max(self._how.least_s, self._how.patience * choice.prefill_s))
