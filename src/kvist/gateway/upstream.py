"""One attempt at a request: a replica's answer, from the connection to the last byte."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeVar

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy

from kvist.core.errors import KvistError
from kvist.gateway.bodies import Share
from kvist.gateway.deadline import Deadline
from kvist.gateway.settings import Settings

_T = TypeVar("_T")
MOST_ANSWER_BYTES = 256 << 20
OK = 200
ELSEWHERE = {429, 500, 502, 503, 504}  # another replica may do better
# Of the connection, not of the message; or said anew on the other side.
_OF_CONNECTION = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
    *("transfer-encoding", "upgrade", "content-length", "date", "server", "host"),
    *("accept-encoding", "expect", "cookie", "set-cookie", "x-request-id"),
}
_BUFFER_BYTES = 1 << 14  # of one answer; twice as much stops reading from the replica
_KEEP_S = 3.0  # below what engines keep a connection for, so that they seldom close one in use


class Broken(KvistError):
    """A replica did not answer, or not to the end.

    Attributes:
        reply: what it answered, if it was an answer that another replica need not give.
        is_gone: nobody listens there.
    """

    def __init__(self, why: str, *, reply: Reply | None = None, is_gone: bool = False) -> None:
        self.reply, self.is_gone = reply, is_gone
        super().__init__(why)


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(slots=True)
class Replica:
    """One engine, by its URL.

    Attributes:
        role: `both`, `prefill` or `decode`.
        draining: it gets nothing new, by the operator's will.
        heard_s: when its last byte came, on the loop's clock.
        open: attempts that are under way.
    """

    url: str
    role: str = "both"
    healthy: bool = False
    draining: bool = False
    heard_s: float = 0.0
    open: set[Attempt] = field(default_factory=set)


class Attempt:
    """A request at a replica, as a context; leaving it early has the engine abort its work."""

    def __init__(self, session: aiohttp.ClientSession, replica: Replica) -> None:
        self._session, self._replica = session, replica
        self._response: aiohttp.ClientResponse | None = None
        self._deadline = Deadline()
        self._given_up = ""

    async def open(
        self, path: str, body: bytes | None, headers: CIMultiDict[str], until_s: float
    ) -> None:
        """Sends the request and waits for the answer's head; `body` None: a GET.

        Raises:
            Broken: it did not come before `until_s`, on the loop's clock.
        """
        request = self._session.request(
            "GET" if body is None else "POST",
            self._replica.url + path,
            data=None if body is None else io.BytesIO(body),
            headers=headers,
            allow_redirects=False,
        )
        try:
            self._response = await self._within(request, until_s)
        except (aiohttp.ClientError, OSError) as error:
            is_gone = isinstance(error, aiohttp.ClientConnectorError)
            raise self._broken(error, is_gone=is_gone) from error
        self._heard()

    @property
    def status(self) -> int:
        """Of the answer."""
        return self._answer.status

    @property
    def headers(self) -> dict[str, str]:
        """Those of the answer that its client gets."""
        return {n: v for n, v in self._answer.headers.items() if n.lower() not in _OF_CONNECTION}

    @property
    def is_stream(self) -> bool:
        """Whether the answer comes as events."""
        return self._answer.content_type == "text/event-stream"

    async def read(self, until_s: float) -> bytes:
        """The next bytes; empty at the end.

        Raises:
            Broken: none came before `until_s`, or the connection broke.
        """
        try:
            data = await self._within(self._answer.content.readany(), until_s)
        except (aiohttp.ClientError, OSError) as error:
            raise self._broken(error, is_gone=False) from error
        self._heard()
        return data

    async def whole(self, until_s: float, share: Share | None = None) -> Reply:
        """All of the answer; `share` counts it.

        Raises:
            Broken: as in `read`, or it is longer than `MOST_ANSWER_BYTES`.
            Fault: 503, too much is held.
        """
        body = bytearray()
        while data := await self.read(until_s):
            if share is not None:
                share.add(len(data))
            body += data
            if len(body) > MOST_ANSWER_BYTES:
                raise Broken(f"an answer of more than {MOST_ANSWER_BYTES} bytes")
        return Reply(self.status, self.headers, bytes(body))

    def give_up(self, why: str) -> None:
        """Ends whatever is waited for: the replica hangs."""
        self._given_up = why
        self._deadline.expire()

    async def __aenter__(self) -> Self:
        self._replica.open.add(self)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._replica.open.discard(self)
        self._deadline.close()
        if self._response is not None:
            self._response.close()  # of an answer that was read to its end, the connection is kept

    @property
    def _answer(self) -> aiohttp.ClientResponse:
        assert self._response is not None
        return self._response

    def _within(self, waited: Awaitable[_T], until_s: float) -> Awaitable[_T]:
        return self._deadline.wait(waited, 0.0 if self._given_up else until_s)

    def _heard(self) -> None:
        self._replica.heard_s = asyncio.get_running_loop().time()

    def _broken(self, error: Exception, *, is_gone: bool) -> Broken:
        if isinstance(error, TimeoutError):
            return Broken(self._given_up or "it took too long")
        return Broken(f"{type(error).__name__}: {error}", is_gone=is_gone)


def open_session(settings: Settings) -> aiohttp.ClientSession:
    """Connections to engines; to be made and closed on the loop that uses it."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_S),
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=settings.timeouts.connect_s, sock_read=None
        ),
        auto_decompress=False,
        read_bufsize=_BUFFER_BYTES,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept"),
        trust_env=False,
    )


def engine_headers(
    client: CIMultiDictProxy[str], request: str, settings: Settings
) -> CIMultiDict[str]:
    """What an engine gets of a client's headers, and what the gateway adds."""
    named = {name.strip().lower() for name in client.get("Connection", "").split(",")}
    kept_back = _OF_CONNECTION | named
    headers: CIMultiDict[str] = CIMultiDict(
        (name, value) for name, value in client.items() if name.lower() not in kept_back
    )
    headers.setdefault("Content-Type", "application/json")
    headers["X-Request-Id"] = request
    headers["Accept-Encoding"] = "identity"
    if not settings.passes_keys:
        headers.popall("Authorization", None)
    if settings.engine_key:
        headers["Authorization"] = f"Bearer {settings.engine_key}"
    return headers
