"""Serves one request: chooses a replica, hands on its answer, and tries another when it breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus

import aiohttp
import msgspec
from multidict import CIMultiDict

from kvist.core.errors import FormatError
from kvist.gateway.ask import Asked
from kvist.gateway.bodies import Held
from kvist.gateway.client import Client
from kvist.gateway.delivered import Delivered, Usage
from kvist.gateway.faults import Fault, overloaded, unmet
from kvist.gateway.handing import Handing, closing
from kvist.gateway.prefilling import PrefillLost, Prefills
from kvist.gateway.record import Record
from kvist.gateway.replicas import ModelCard, Replicas
from kvist.gateway.resume import Plan, Way, plan_next, tracks, with_ids
from kvist.gateway.settings import Settings
from kvist.gateway.sse import EventCutter
from kvist.gateway.upstream import ELSEWHERE, OK, Attempt, Broken, Reply
from kvist.gateway.waiting import Waiting
from kvist.router.protocol import Ask, Choice, Refused, Router


class _WithUsage(msgspec.Struct):
    usage: Usage | None = None


class _Cards(msgspec.Struct):
    data: list[msgspec.Raw]


@dataclass(slots=True)
class Call:
    """A request that was let in. `headers` are those that engines get."""

    ask: Ask
    asked: Asked
    body: bytes
    headers: CIMultiDict[str]
    began_s: float
    record: Record
    failed: set[str] = field(default_factory=set)
    lost_prefills: int = 0


class Relay:
    """The part of a gateway that speaks with engines."""

    def __init__(
        self,
        router: Router,
        replicas: Replicas,
        waiting: Waiting,
        session: aiohttp.ClientSession,
        settings: Settings,
        clock: Callable[[], float],
    ) -> None:
        """`clock` is the event loop's."""
        self._router, self._replicas, self._waiting, self._session = (
            router,
            replicas,
            waiting,
            session,
        )
        self._settings, self._limits, self._clock = settings, settings.timeouts, clock
        self._answers = Held(settings.bounds.answers_bytes)  # that are no streams
        self._prefills = Prefills(router, replicas, session, settings, clock)

    async def serve(self, call: Call, client: Client) -> None:
        """Answers a request, on one replica after the other.

        Raises:
            Fault: none could; the client may have the beginning of an answer.
            ClientGone: nobody is there to be answered.
        """
        tracked = tracks(call.asked, self._settings.migrate)
        body = with_ids(call.asked) if tracked else call.body
        plan, delivered = Plan(Way.AGAIN, call.asked.endpoint.value, body), Delivered()
        waited_s = await self._waiting.turn(call.ask)
        call.ask = replace(call.ask, waited_s=waited_s)
        call.record.waited_s = waited_s
        attempt = 0
        while True:
            try:
                with self._booked(call) as choice:
                    await self._once(call, client, choice, plan, delivered, tracked=tracked)
                return
            except PrefillLost as lost:
                self._note_prefill(call, choice, lost)
                continue
            except Broken as broken:
                attempt += 1
                self._note(call, choice, broken)
                if delivered.finished and call.asked.is_single:
                    options = call.asked.fields.stream_options
                    usage = options is not None and bool(options.include_usage)
                    await client.send(closing(delivered, with_usage=usage))
                    await client.end()
                    return
                if attempt == self._settings.attempts:
                    return await self._give_up(client, broken)
            card = self._replicas.model(call.asked.fields.model)
            context_tokens = None if card is None else card.max_model_len
            plan = plan_next(call.asked, body, delivered, self._settings.migrate, context_tokens)
            call.record.ways = [*call.record.ways, plan.way.value]

    async def models(self, headers: CIMultiDict[str], client: Client, *, only: str = "") -> None:
        """Hands on what a replica says of its models: all of them, or one by its name.

        Raises:
            Fault: no replica is up, or none answered, or there is no such model.
        """
        reply = await self._asked_of_any("/v1/models", headers)
        if only and reply.status == OK:
            reply = Reply(OK, reply.headers, _card(reply, only))
        await _send(client, reply)

    async def _asked_of_any(self, path: str, headers: CIMultiDict[str]) -> Reply:
        """The answer to a question that costs a replica nothing, of the first that gives one."""
        why = "no replica is up"
        for replica in [r for r in self._replicas.all() if r.healthy][: self._settings.attempts]:
            until_s = self._clock() + self._limits.health_s
            try:
                async with Attempt(self._session, replica) as attempt:
                    await attempt.open(path, None, headers, until_s)
                    reply = await attempt.whole(until_s)
            except Broken as broken:
                why = f"the replica broke: {broken}"
                if broken.is_gone:
                    self._replicas.suspect(replica.url)
                continue
            if reply.status not in ELSEWHERE:
                return reply
            why = f"the replica answered {reply.status}"
        raise unmet(why, 1.0)

    @contextmanager
    def _booked(self, call: Call) -> Iterator[Choice]:
        """A replica, booked until the body is left."""
        ask = replace(call.ask, exclude=frozenset(call.failed), admitted=bool(call.failed))
        choice = self._router.choose(ask, self._clock())
        if isinstance(choice, Refused) and call.failed:  # each failed it once
            choice = self._router.choose(replace(ask, exclude=frozenset()), self._clock())
        if isinstance(choice, Refused):
            raise _refused(choice)
        record, failed = call.record, False
        if choice.split:
            record.splits = [*record.splits, choice.split]
        if record.predicted_ttft_s is None:
            record.predicted_ttft_s, record.hit_tokens = choice.ttft_s, choice.hit_tokens
            record.hit_tiers = dict(choice.hit_tiers)
        try:
            yield choice
        except Broken:
            failed = True
            raise
        finally:
            self._router.finish(choice.booking, self._clock(), failed=failed)

    async def _once(
        self,
        call: Call,
        client: Client,
        choice: Choice,
        plan: Plan,
        delivered: Delivered,
        *,
        tracked: bool,
    ) -> None:
        replica, asked = self._replicas[choice.replica], call.asked
        body = await self._prefills.ahead(choice, plan, call.headers, call.record)
        call.record.replicas = [*call.record.replicas, choice.replica]
        call.record.reasons = [*call.record.reasons, choice.reason]
        limit_s = self._limits.first_token_s if asked.streams else self._limits.answer_s
        until_s = self._clock() + limit_s
        with self._answers.share() as share:
            async with Attempt(self._session, replica) as attempt:
                await attempt.open(plan.path, body, call.headers, until_s)
                if attempt.status == OK and asked.streams and attempt.is_stream:
                    handing = Handing(asked, plan, delivered, tracked=tracked)
                    return await self._stream(call, client, choice, attempt, handing)
                reply = await attempt.whole(until_s, share)
            if reply.status in ELSEWHERE:
                raise Broken(f"it answered {reply.status}", reply=reply)
            if client.has_begun:
                raise unmet(f"the stream broke, and another replica answered {reply.status}")
            call.record.ttft_s = self._clock() - call.began_s  # the router learns from streams only
            self._count(call, _usage(reply))
            await _send(client, reply)

    async def _stream(
        self, call: Call, client: Client, choice: Choice, attempt: Attempt, handing: Handing
    ) -> None:
        cutter = EventCutter()
        until_s = self._clock() + self._limits.first_token_s
        try:
            while data := await attempt.read(until_s):
                before = handing.tokens
                out = handing.take(cutter.feed(data))
                if handing.tokens > before:
                    if not before:
                        self._first(call, choice)
                    self._router.progress(
                        choice.booking,
                        handing.tokens,
                        self._clock(),
                        timely=not client.fell_behind,
                    )
                if handing.tokens > before or handing.done:
                    until_s = self._clock() + self._limits.token_s
                if out:
                    if not client.has_begun:
                        await client.begin(attempt.status, attempt.headers, length=None)
                    sent_s = self._clock()
                    await client.send(out)
                    until_s += self._clock() - sent_s  # the engine had to wait for the client
                if handing.broken is not None:
                    raise handing.broken
        except FormatError as error:
            raise Broken(str(error)) from error
        except Broken:
            if not handing.done:
                raise
        finally:
            call.record.output_tokens = handing.delivered_tokens
            self._count(call, handing.usage)
        if not handing.done:
            raise Broken("it ended the stream too soon")
        await client.end()

    def _first(self, call: Call, choice: Choice) -> None:
        now_s = self._clock()
        self._router.first_token(choice.booking, now_s)
        call.ask = replace(call.ask, deadline_s=None)  # met: a stream that breaks goes on
        if call.record.ttft_s is None:
            call.record.ttft_s = now_s - call.began_s

    def _count(self, call: Call, usage: Usage | None) -> None:
        if usage is not None:
            call.record.prompt_tokens = usage.prompt_tokens or 0
            call.record.output_tokens = usage.completion_tokens or 0
            details = usage.prompt_tokens_details
            call.record.cached_tokens = None if details is None else details.cached_tokens

    def _note(self, call: Call, choice: Choice, broken: Broken) -> None:
        call.failed.add(choice.replica)
        call.record.broke = [*call.record.broke, str(broken)]
        if broken.is_gone:
            self._replicas.suspect(choice.replica)

    def _note_prefill(self, call: Call, choice: Choice, lost: PrefillLost) -> None:
        """Each loss leaves out one more replica; the last is the last prefill that is tried."""
        assert choice.prefill is not None
        call.failed.add(choice.prefill)
        call.lost_prefills += 1
        if call.lost_prefills >= self._settings.attempts:
            call.ask = replace(call.ask, undivided=True)
        if lost.is_gone:
            self._replicas.suspect(choice.prefill)

    async def _give_up(self, client: Client, broken: Broken) -> None:
        """After the last attempt: what the engine said, if it said anything.

        Raises:
            Fault: it did not.
        """
        if broken.reply is None or client.has_begun:
            raise unmet(f"no replica served it; the last one: {broken}") from broken
        await _send(client, broken.reply)


def _refused(refused: Refused) -> Fault:
    if refused.reason == "no-replica":
        return unmet("no replica is up", refused.retry_after_s, refused=refused.reason)
    return overloaded(refused)


def _usage(reply: Reply) -> Usage | None:
    try:
        return msgspec.json.decode(reply.body, type=_WithUsage).usage
    except msgspec.MsgspecError:
        return None


def _card(reply: Reply, model: str) -> bytes:
    """Of an answer about all models what it says of one.

    Raises:
        Fault: 404, it says nothing of it.
    """
    with suppress(msgspec.MsgspecError):
        for raw in msgspec.json.decode(reply.body, type=_Cards).data:
            if msgspec.json.decode(raw, type=ModelCard).id == model:
                return bytes(raw)
    raise Fault(HTTPStatus.NOT_FOUND, f"there is no model {model!r}", code="model_not_found")


async def _send(client: Client, reply: Reply) -> None:
    await client.begin(reply.status, reply.headers, length=len(reply.body))
    await client.send(reply.body)
    await client.end()
