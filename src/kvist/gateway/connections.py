"""Connections of clients: how many, what their heads may be, and how much each may leave unread.

What a client does not read stays, in this order: in its kernel; in ours, which takes no more than
`_KERNEL_BYTES` beyond what the client's window lets out (else up to 4 MiB of each); in the
transport's buffer, behind which whoever sends has to wait. Nobody waits for what is left when an
answer is over, or for a page that was handed to the transport; there the kernel ends a connection
whose other side has acknowledged nothing, or kept its window closed, for `stall_s`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from aiohttp import web

from kvist.gateway.faults import Fault
from kvist.gateway.settings import Settings

_log = logging.getLogger(__name__)
MOST_LINE_BYTES = 8190  # of a request's first line, and of each header
MOST_HEADERS = 100
BUFFER_BYTES = 1 << 16  # that a client has not read; beyond, its sender waits until 1/4 is left
_KERNEL_BYTES = 1 << 16
_LINGER_S = 2.0  # for a client that sends a body that nobody reads
_MOST_MS = (1 << 31) - 1


class Connection(web.RequestHandler):
    """A connection whose faults of HTTP are said as OpenAI's API says faults.

    Attributes:
        times_full: how often its client had not read what it was sent when more came.
    """

    __slots__ = ("times_full",)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Nothing was sent yet."""
        self.times_full = 0
        super().connection_made(transport)

    def pause_writing(self) -> None:
        """Its buffer is full."""
        self.times_full += 1
        super().pause_writing()

    def close(self) -> None:
        """Takes no other request; ends at once unless one is under way."""
        super().close()
        if not self._request_in_progress and self.transport is not None:
            self.transport.close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What a request that is none, or that failed in us, gets as an answer."""
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            _log.error("a request failed", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")
        text = (message or "the request failed").partition("\n")[0]
        fault = Fault(HTTPStatus(status), text, code="bad_http" if status < 500 else "internal")
        response = web.Response(body=fault.body(), status=status, headers=fault.headers())
        response.force_close()
        return response


class _Full(asyncio.Protocol):
    """A connection beyond the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Closes it."""
        transport.close()


class HttpServer(web.Server):
    """Makes a handler for each connection, up to the limit."""

    def __init__(self, handler: Callable[[web.BaseRequest], Any], settings: Settings) -> None:
        super().__init__(handler, handler_cancellation=True)
        self._most, self._open = settings.bounds.connections, 0
        self._stall_ms = min(_MOST_MS, max(1, round(settings.timeouts.stall_s * 1e3)))
        self._options: dict[str, Any] = {
            "keepalive_timeout": settings.timeouts.head_s,
            "max_line_size": MOST_LINE_BYTES,
            "max_field_size": MOST_LINE_BYTES,
            "max_headers": MOST_HEADERS,
            "lingering_time": _LINGER_S,
            "access_log": None,
            "auto_decompress": False,
        }

    def __call__(self) -> Any:
        """A protocol for a new connection."""
        if self._open >= self._most:
            return _Full()
        return Connection(self, loop=asyncio.get_running_loop(), **self._options)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """One more."""
        self._open += 1
        transport.set_write_buffer_limits(BUFFER_BYTES, BUFFER_BYTES // 4)
        raw = transport.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _KERNEL_BYTES)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, self._stall_ms)
        super().connection_made(handler, transport)

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        """One less."""
        self._open -= 1
        super().connection_lost(handler, exc)
