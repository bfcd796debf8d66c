"""The client's side of a request: its headers are sent with its first bytes, and no sooner."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping

from aiohttp import web

from kvist.gateway.connections import Connection
from kvist.gateway.deadline import Deadline

REQUEST_ID = "X-Request-Id"
_PIECE_BYTES = 1 << 16  # of a whole answer: a slow client has `stall_s` for each


class ClientGone(ConnectionError):
    """The client has left, or reads nothing."""


class Client:
    """Who asked. Until `begin`, a request can still end in any status."""

    def __init__(self, request: web.BaseRequest, request_id: str, stall_s: float) -> None:
        self._request, self._id, self._stall_s = request, request_id, stall_s
        self._clock = asyncio.get_running_loop().time
        self._deadline = Deadline()
        assert isinstance(request.protocol, Connection)
        self._connection = request.protocol
        self._was_full = self._connection.times_full
        self.response: web.StreamResponse | None = None

    @property
    def has_begun(self) -> bool:
        """Whether its answer's status was sent."""
        return self.response is not None

    @property
    def fell_behind(self) -> bool:
        """Whether it was ever slower than its engine: what comes then comes late, and at once."""
        return self._connection.times_full != self._was_full

    async def begin(self, status: int, headers: Mapping[str, str], *, length: int | None) -> None:
        """Sends the head; `length` None: nobody knows how long the answer will be."""
        response = web.StreamResponse(status=status, headers={**headers, REQUEST_ID: self._id})
        response.content_length = length
        self.response = response
        try:
            await response.prepare(self._request)
        except ConnectionError as error:
            raise ClientGone from error

    async def send(self, data: bytes) -> None:
        """Sends bytes; waits while the client has not read what it was sent before.

        Raises:
            ClientGone: it went away, or its buffer did not empty for `stall_s`.
        """
        assert self.response is not None
        for start in range(0, len(data), _PIECE_BYTES):
            await self._within(self.response.write(data[start : start + _PIECE_BYTES]))

    async def end(self) -> None:
        """The answer is whole.

        Raises:
            ClientGone: as in `send`.
        """
        assert self.response is not None
        await self._within(self.response.write_eof())

    def close(self) -> None:
        """Nothing more is sent."""
        self._deadline.close()

    async def _within(self, sending: Coroutine[None, None, None]) -> None:
        try:
            await self._deadline.wait(sending, self._clock() + self._stall_s)
        except (ConnectionError, TimeoutError) as error:
            self.cut()
            raise ClientGone from error

    def cut(self) -> None:
        """Ends the connection without saying goodbye: the answer is seen to be broken."""
        transport = self._request.transport
        if transport is not None:
            transport.abort()
