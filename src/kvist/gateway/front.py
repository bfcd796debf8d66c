"""What every request passes: its path, its key, its body, its tenant's limits, its record."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from kvist.gateway.ask import (
    DEADLINE,
    MOST_DEADLINE_S,
    SESSION,
    Asked,
    Draining,
    Endpoint,
    read_body,
    written,
)
from kvist.gateway.bodies import Bodies
from kvist.gateway.client import REQUEST_ID, Client, ClientGone
from kvist.gateway.faults import Fault, unmet
from kvist.gateway.handover import is_divisible
from kvist.gateway.limits import TenantLimits
from kvist.gateway.openapi import openapi
from kvist.gateway.prompt import Prompts
from kvist.gateway.record import Outcome, Record
from kvist.gateway.relay import Call, Relay
from kvist.gateway.replicas import Replicas
from kvist.gateway.settings import Settings
from kvist.gateway.sse import DONE
from kvist.gateway.telemetry import Telemetry
from kvist.gateway.tenancy import of_tenant, own_name
from kvist.gateway.tracer import Tracer
from kvist.gateway.upstream import engine_headers
from kvist.node.http.tokens import Caller, Tokens
from kvist.router.protocol import Ask

_ROUTED = {endpoint.value: endpoint for endpoint in Endpoint}
_ID = re.compile(r"[\w.:-]{1,128}")
_MODELS = "/v1/models"
_BUSY_S = 1.0
_ANYBODY = Caller("")


@dataclass(frozen=True, slots=True)
class Parts:
    """What a front is made of. `tokens` None: nobody needs a key.

    `events` says of a replica whether its events are heard.
    """

    relay: Relay
    replicas: Replicas
    prompts: Prompts
    limits: TenantLimits
    telemetry: Telemetry
    tracer: Tracer
    tokens: Tokens | None
    settings: Settings
    version: str
    events: Callable[[str], str]


class Front:
    """The handler of an HTTP server.

    Attributes:
        in_flight: requests to engines that are not over.
        leaving: the gateway ends; load balancers should send nothing new.
    """

    def __init__(self, parts: Parts, clock: Callable[[], float]) -> None:
        self._parts, self._clock = parts, clock
        bounds, timeouts = parts.settings.bounds, parts.settings.timeouts
        self._bodies = Bodies(bounds.body_bytes, bounds.bodies_bytes, timeouts.body_s)
        self._document = msgspec.json.encode(openapi(parts.version))
        self._pages: dict[str, Callable[[web.BaseRequest], web.Response]] = {
            "/healthz": self._alive,
            "/readyz": self._ready,
            "/openapi.json": self._described,
            "/metrics": self._metrics,
            "/replicas": self._replicas,
        }
        self.in_flight = 0
        self.leaving = False

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers one request."""
        given = request.headers.get(REQUEST_ID, "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        client = Client(request, request_id, self._parts.settings.timeouts.stall_s)
        try:
            return await self._answer(request, request_id, client)
        except Fault as fault:
            return await _faulted(fault, client, request_id)
        except ClientGone:
            assert client.response is not None
            return client.response
        finally:
            client.close()

    async def _answer(
        self, request: web.BaseRequest, request_id: str, client: Client
    ) -> web.StreamResponse:
        path = request.path
        if (endpoint := _ROUTED.get(path)) is not None:
            _only(request, "POST")
            await self._serve(request, endpoint, request_id, client)
        elif path == _MODELS or path.startswith(f"{_MODELS}/"):
            _only(request, "GET")
            self._caller(request)
            headers = engine_headers(request.headers, request_id, self._parts.settings)
            only = path.removeprefix(_MODELS).removeprefix("/")
            await self._parts.relay.models(headers, client, only=only)
        elif path == "/replicas/drain":
            _only(request, "POST")
            self._operator(request)
            return await self._drain(request)
        elif (page := self._pages.get(path)) is not None:
            _only(request, "GET", "HEAD")
            return page(request)
        else:
            raise Fault(HTTPStatus.NOT_FOUND, f"there is no {path}", code="not_found")
        assert client.response is not None
        return client.response

    async def _serve(
        self, request: web.BaseRequest, endpoint: Endpoint, request_id: str, client: Client
    ) -> None:
        """A request to the engines, from its body to its record."""
        record = Record(request=request_id, endpoint=endpoint.value)
        headers = engine_headers(request.headers, request_id, self._parts.settings)
        with (
            self._parts.tracer.request(record, request.headers, headers),
            self._recorded(record, client),
        ):
            began_s = self._clock()
            tenant = record.tenant = self._caller(request).tenant or ""
            if self.in_flight > self._parts.settings.bounds.requests:
                raise unmet("too many requests are in flight", _BUSY_S, refused="bound")
            async with self._bodies.read(request) as body:
                asked = read_body(endpoint, body)
                if tenant:
                    shares = self._parts.settings.tenants_share
                    asked = of_tenant(asked, tenant, shares=shares)
                    body = written(asked.payload)
                record.model, record.streamed = asked.fields.model or "", asked.streams
                ask = await self._ask(request, request_id, tenant, asked, len(body))
                if (within_s := _deadline_s(request)) is not None:
                    ask = replace(ask, deadline_s=began_s + within_s)
                record.prompt_tokens = ask.prompt_tokens
                limits = self._parts.limits
                limits.admit(tenant, ask.prompt_tokens, self._clock())
                try:
                    call = Call(ask, asked, body, headers, began_s, record)
                    await self._parts.relay.serve(call, client)
                finally:
                    used = record.output_tokens + record.prompt_tokens - ask.prompt_tokens
                    limits.leave(tenant, used, self._clock())

    async def _ask(
        self, request: web.BaseRequest, request_id: str, tenant: str, asked: Asked, size: int
    ) -> Ask:
        """What the router gets to know."""
        fields = asked.fields
        card = self._parts.replicas.model(fields.model)
        lora = card.id if card is not None and card.parent is not None else ""
        prompt = await self._parts.prompts.read(asked, size, lora)
        session = fields.session_id or request.headers.get(SESSION)
        return Ask(
            request=request_id,
            keys=prompt.keys,
            prompt_tokens=prompt.tokens,
            max_tokens=asked.most_tokens,
            tenant=tenant,
            endpoint=asked.endpoint.value,
            model=fields.model or "",
            lora=lora,
            session=own_name(tenant, session) if session else "",
            priority=-(fields.priority or 0),  # an engine serves the lowest first
            undivided=not is_divisible(asked),
            streams=asked.streams,
        )

    @contextmanager
    def _recorded(self, record: Record, client: Client) -> Iterator[None]:
        """Counts a request as in flight, and fills in how it ended."""
        began_s = self._clock()
        self.in_flight += 1
        try:
            yield
            record.status = 0 if client.response is None else client.response.status
            record.outcome = _outcome(record.status)
            record.refused = "engine" if record.outcome == "refused" else ""
        except Fault as fault:
            record.status, record.fault = fault.status, str(fault)
            record.outcome = _outcome(fault.status)
            record.refused = fault.refused if record.outcome == "refused" else ""
            raise
        except (ClientGone, asyncio.CancelledError):
            record.outcome = "cancelled"
            raise
        finally:
            self.in_flight -= 1
            record.took_s = self._clock() - began_s
            self._parts.telemetry.done(record)

    def _caller(self, request: web.BaseRequest) -> Caller:
        tokens = self._parts.tokens
        if tokens is None:
            return _ANYBODY
        given = request.headers.getall("Authorization", [])
        caller = tokens.who(given[0].encode(errors="replace")) if len(given) == 1 else None
        if caller is None:
            raise Fault(HTTPStatus.UNAUTHORIZED, "an API key is needed", code="invalid_api_key")
        return caller

    def _operator(self, request: web.BaseRequest) -> None:
        if self._parts.tokens is not None and self._caller(request).tenant is not None:
            raise Fault(HTTPStatus.FORBIDDEN, "this is the operator's", code="forbidden")

    def _alive(self, request: web.BaseRequest) -> web.Response:
        return _json({"status": "alive"})

    def _ready(self, request: web.BaseRequest) -> web.Response:
        ready = self._parts.replicas.are_ready and not self.leaving
        status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
        return _json({"ready": ready}, status)

    def _described(self, request: web.BaseRequest) -> web.Response:
        return web.Response(body=self._document, content_type="application/json")

    def _metrics(self, request: web.BaseRequest) -> web.Response:
        self._operator(request)
        page = self._parts.telemetry.page()
        return web.Response(body=page, headers={"Content-Type": "text/plain; version=0.0.4"})

    def _replicas(self, request: web.BaseRequest) -> web.Response:
        self._operator(request)
        states = [
            {
                "url": r.url,
                "role": r.role,
                "healthy": r.healthy,
                "draining": r.draining,
                "open": len(r.open),
                "events": self._parts.events(r.url),
            }
            for r in self._parts.replicas.all()
        ]
        return _json({"replicas": states})

    async def _drain(self, request: web.BaseRequest) -> web.Response:
        async with self._bodies.read(request) as body:
            try:
                asked = msgspec.json.decode(body, type=Draining)
                self._parts.replicas.drain(asked.replica, draining=asked.draining)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise Fault(HTTPStatus.BAD_REQUEST, str(error), code="invalid_value") from error
            except KeyError as error:
                raise Fault(
                    HTTPStatus.NOT_FOUND, "there is no such replica", code="not_found"
                ) from error
        return self._replicas(request)


def _deadline_s(request: web.BaseRequest) -> float | None:
    """Seconds from a request's head to its first token, behind which that is worth nothing."""
    given = request.headers.get(DEADLINE)
    if given is None:
        return None
    try:
        found = float(given)
    except ValueError:
        found = 0.0
    if not 0 < found <= MOST_DEADLINE_S:
        raise Fault(
            HTTPStatus.BAD_REQUEST,
            f"{DEADLINE} is a number of seconds above 0, {MOST_DEADLINE_S:.0f} at most",
            code="invalid_value",
            param=DEADLINE,
        )
    return found


def _outcome(status: int) -> Outcome:
    if status < HTTPStatus.BAD_REQUEST:
        return "ok"
    if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        return "refused"
    return "invalid" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "failed"


def _only(request: web.BaseRequest, *methods: str) -> None:
    if request.method not in methods:
        raise Fault(
            HTTPStatus.METHOD_NOT_ALLOWED,
            f"{request.method} is not meant here",
            code="bad_method",
            allow=", ".join(methods),
        )


def _json(value: Any, status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json"
    )


async def _faulted(fault: Fault, client: Client, request_id: str) -> web.StreamResponse:
    """The fault as an answer, or as the last event of one that has begun."""
    if client.response is not None:
        with suppress(ClientGone):
            await client.send(fault.event() + DONE)
            await client.end()
        return client.response
    headers = {**fault.headers(), REQUEST_ID: request_id}
    response = web.Response(body=fault.body(), status=fault.status, headers=headers)
    if fault.status in (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.REQUEST_TIMEOUT):
        response.force_close()
    return response
