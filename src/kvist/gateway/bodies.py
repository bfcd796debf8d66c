"""Bytes that the gateway holds for requests: each within its bounds, and all within theirs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus

from aiohttp import web
from aiohttp.http import HttpVersion11

from kvist.gateway.faults import Fault, unmet

_RETRY_S = 1.0
_JSON = "application/json"


class Held:
    """Bytes of one kind that are held for all requests together. For one event loop."""

    def __init__(self, most_bytes: int) -> None:
        """`most_bytes` may be held at once."""
        self._most = most_bytes
        self.bytes = 0

    def check(self, more_bytes: int) -> None:
        """Whether there is room.

        Raises:
            Fault: 503, there is none now.
        """
        if self.bytes + more_bytes > self._most:
            raise unmet("too many bytes are in flight", _RETRY_S, refused="bound")

    @contextmanager
    def share(self) -> Iterator[Share]:
        """What one request holds until the context is left."""
        share = Share(self)
        try:
            yield share
        finally:
            self.bytes -= share.bytes


class Share:
    """A request's part of what is held."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self.bytes = 0

    def add(self, more_bytes: int) -> None:
        """Holds more.

        Raises:
            Fault: 503, there is no room for it.
        """
        self._held.check(more_bytes)
        self._held.bytes += more_bytes
        self.bytes += more_bytes


class Bodies:
    """Reads the bodies of requests."""

    def __init__(self, most_bytes: int, most_held_bytes: int, limit_s: float) -> None:
        """`most_bytes` of one, `most_held_bytes` of all, and the seconds in which one must come."""
        self._most, self._held, self._limit_s = most_bytes, Held(most_held_bytes), limit_s

    @asynccontextmanager
    async def read(self, request: web.BaseRequest) -> AsyncIterator[bytes]:
        """The body, which counts as held until the context is left.

        Raises:
            Fault: it is too long, compressed, no JSON, late or cut off, or too much is held.
        """
        self._check(request)
        with self._held.share() as share:
            yield await self._filled(request, share)

    async def _filled(self, request: web.BaseRequest, share: Share) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(self._limit_s):
                if request.headers.get("Expect", "").lower() == "100-continue":
                    await _go_on(request)
                while data := await request.content.readany():
                    share.add(len(data))
                    body += data
                    if len(body) > self._most:
                        raise self._too_long()
        except TimeoutError as error:
            raise Fault(
                HTTPStatus.REQUEST_TIMEOUT, "the body did not come in time", code="timeout"
            ) from error
        except web.RequestPayloadError as error:
            raise Fault(HTTPStatus.BAD_REQUEST, f"the body: {error}", code="bad_body") from error
        return bytes(body)

    def _check(self, request: web.BaseRequest) -> None:
        if "Content-Encoding" in request.headers:
            raise Fault(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body is compressed", code="bad_encoding"
            )
        kind = request.content_type
        if "Content-Type" in request.headers and kind != _JSON and not kind.endswith("+json"):
            raise Fault(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body is not JSON", code="bad_content_type"
            )
        length = request.content_length or 0
        if length > self._most:
            raise self._too_long()
        self._held.check(length)

    def _too_long(self) -> Fault:
        return Fault(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"at most {self._most} bytes may come",
            code="request_too_large",
        )


async def _go_on(request: web.BaseRequest) -> None:
    """Tells a client that waits for it to send its body."""
    if request.version == HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer's own head is still to come
