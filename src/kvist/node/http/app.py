"""The application: every path but `/healthz` is behind a token, every request has a bound.

It is a client of the node like any other: it asks over the node's own socket. What a tenant asks is
narrowed to the tenant's own blocks here, and the node then sees and touches no others
(`store/caretaker.py`).
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvist.core.errors import NodeAwayError, NodeRefusedError
from kvist.node.cache import messages as m
from kvist.node.cache.client import CacheClient, DeniedError
from kvist.node.control import ask
from kvist.node.http.endpoints import ENDPOINTS, Endpoint, Fault, openapi
from kvist.node.http.prometheus import page
from kvist.node.http.tokens import Caller, Tokens

MOST_BODY_BYTES = 256 << 10
REQUEST_S = 35.0  # a request and its answer; above what a node may take for one
_THREADS = 4
_ALIVE = "/healthz"
_CALLER = "kvist.caller"
_JSON = "application/json"


def make_app(socket: str | os.PathLike[str], tokens: Tokens, *, version: str) -> ASGIApp:
    """The application of the node that listens on `socket`."""
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvist-http")
    document = msgspec.json.encode(openapi(version))

    async def alive(request: Request) -> Response:
        return Response(b'{"status":"alive"}', media_type=_JSON)

    async def described(request: Request) -> Response:
        return Response(document, media_type=_JSON)

    async def metrics(request: Request) -> Response:
        if _caller(request).tenant is not None:
            raise HTTPException(HTTPStatus.FORBIDDEN, "metrics are the operator's")
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(pool, lambda: page(ask(socket, "status")))
        return Response(text, media_type="text/plain; version=0.0.4")

    routes = [
        Route(_ALIVE, alive, methods=["GET"]),
        Route("/openapi.json", described, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        *(_route(endpoint, socket, pool) for endpoint in ENDPOINTS),
    ]
    faults: dict[Any, Any] = {
        HTTPException: _http_fault,
        DeniedError: _denied,
        NodeAwayError: _away,
        NodeRefusedError: _away,
    }
    app = Starlette(routes=routes, exception_handlers=faults)
    app.router.redirect_slashes = False
    return Guard(app, tokens)


class Guard:
    """Lets in who has a token, and ends what takes too long."""

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        self._app, self._tokens = app, tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            return
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        answer: ASGIApp = self._app
        if scope["path"] != _ALIVE:
            headers = [value for name, value in scope["headers"] if name == b"authorization"]
            caller = self._tokens.who(headers[0]) if len(headers) == 1 else None
            if caller is None:
                answer = _fault(
                    HTTPStatus.UNAUTHORIZED, "a token is needed", {"WWW-Authenticate": "Bearer"}
                )
            else:
                scope[_CALLER] = caller
        try:
            async with asyncio.timeout(REQUEST_S):
                await answer(scope, receive, sending)
        except TimeoutError:
            if begun:
                raise
            late = _fault(HTTPStatus.SERVICE_UNAVAILABLE, "the request took too long")
            await late(scope, receive, send)


def _route(endpoint: Endpoint, socket: str | os.PathLike[str], pool: ThreadPoolExecutor) -> Route:
    async def serve(request: Request) -> Response:
        caller = _caller(request)
        try:
            if endpoint.method == "GET":
                asked = _from_query(dict(request.query_params), endpoint.request)
            else:
                asked = msgspec.json.decode(await _body(request), type=endpoint.request)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from error
        asked = _narrowed(asked, caller)

        def work() -> bytes:
            with CacheClient(socket) as client:
                return msgspec.json.encode(client.ask(asked, endpoint.reply))

        loop = asyncio.get_running_loop()
        return Response(await loop.run_in_executor(pool, work), media_type=_JSON)

    return Route(endpoint.path, serve, methods=[endpoint.method])


def _from_query(query: dict[str, str], kind: type[m.Request]) -> m.Request:
    """A request of a query's texts; a tenant may be called `null` or `1`.

    Raises:
        MsgspecError: it is none.
    """
    tenant = query.pop("tenant", None)
    asked = msgspec.convert(query, kind, strict=False)
    return msgspec.structs.replace(asked, tenant=msgspec.convert(tenant, m.Name | None))


def _narrowed(asked: m.Request, caller: Caller) -> m.Request:
    """What a tenant asks, about its own blocks; the operator asks about everybody's."""
    if caller.tenant is None:
        return asked
    if asked.tenant not in (None, caller.tenant):
        raise HTTPException(HTTPStatus.FORBIDDEN, "this token is another tenant's")
    return msgspec.structs.replace(asked, tenant=caller.tenant)


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BODY_BYTES:
            raise HTTPException(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {MOST_BODY_BYTES} bytes may come"
            )
    return bytes(body)


def _caller(request: Request) -> Caller:
    caller: Caller = request.scope[_CALLER]
    return caller


def _fault(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(Fault(text)), status, headers, media_type=_JSON)


async def _http_fault(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _fault(error.status_code, error.detail, dict(error.headers or {}))


async def _denied(request: Request, error: Exception) -> Response:
    ours = isinstance(error, DeniedError) and error.is_ours
    status = HTTPStatus.BAD_REQUEST if ours else HTTPStatus.SERVICE_UNAVAILABLE
    return _fault(status, str(error))


async def _away(request: Request, error: Exception) -> Response:
    return _fault(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
