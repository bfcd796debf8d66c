"""Asks a node about its blocks."""

from __future__ import annotations

import os
import time
from typing import Self, TypeVar

import msgspec

from kvist.core.errors import FormatError, NodeAwayError, NodeRefusedError, StoreError
from kvist.node import messages
from kvist.node.attachment import connect
from kvist.node.cache import messages as m
from kvist.node.cache.wire import decode_reply
from kvist.node.protocol import (
    MOST_BYTES,
    Frames,
    ProtocolError,
    encode,
)
from kvist.node.protocol import (
    decode_reply as decode_first,
)

_RECEIVE_BYTES = 256 << 10
GRACE_S = 20.0  # over what a request itself may wait
T = TypeVar("T", bound=m.Reply)


class DeniedError(StoreError):
    """The node cannot do what was asked. `is_ours`: asked otherwise, it might."""

    def __init__(self, text: str, *, is_ours: bool) -> None:
        self.is_ours = is_ours
        super().__init__(text)


class CacheClient:
    """A connection to a node, for one request at a time. Not thread-safe."""

    def __init__(self, path: str | os.PathLike[str], *, grace_s: float = GRACE_S) -> None:
        """Connects. An answer is waited for `grace_s` longer than its request may take.

        Raises:
            NodeAwayError: no node listens there, or it does not answer.
            NodeRefusedError: the node is another user's, or older than these requests.
        """
        self._path, self._grace_s = os.fspath(path), grace_s
        self._frames = Frames(MOST_BYTES)
        self._bodies: list[bytes] = []
        self._link = connect(self._path, grace_s)
        newest = messages.NEWEST_PROTOCOL
        try:
            self._send(messages.Control(messages.MAGIC, m.FIRST_PROTOCOL, newest, "cache"))
            reply = self._decoded(self._receive(grace_s))
            if isinstance(reply, messages.Refused):
                raise NodeRefusedError(reply.reason, for_good=reply.for_good)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, request: m.Request, kind: type[T]) -> T:
        """The answer, which is a `kind`.

        Raises:
            DeniedError: the node cannot do it, and says why.
            NodeAwayError: it did not answer in time, or hung up.
        """
        wait_s = getattr(request, "deadline_s", 0.0) + self._grace_s
        self._send(request)
        body = self._receive(wait_s)
        try:
            reply = decode_reply(body)
        except ProtocolError as error:
            reason = getattr(self._decoded(body), "reason", str(error))  # its last words
            raise NodeAwayError(f"the node on {self._path} hung up: {reason}") from error
        if isinstance(reply, m.Denied):
            raise DeniedError(reply.text, is_ours=reply.fault == "request")
        if not isinstance(reply, kind):
            raise NodeAwayError(f"the node on {self._path} answers with {type(reply).__name__}")
        return reply

    def close(self) -> None:
        """Hangs up. Idempotent."""
        self._link.close()

    def _send(self, message: msgspec.Struct) -> None:
        try:
            self._link.sendall(encode(message))
        except OSError as error:
            raise NodeAwayError(f"the node on {self._path} is gone: {error}") from error

    def _receive(self, wait_s: float) -> bytes:
        until = time.monotonic() + wait_s
        try:
            while not self._bodies:
                self._link.settimeout(max(0.001, until - time.monotonic()))
                if not (data := self._link.recv(_RECEIVE_BYTES)):
                    raise NodeAwayError(f"the node on {self._path} hung up")
                self._bodies += self._frames.feed(data)
        except TimeoutError as error:
            raise NodeAwayError(f"the node on {self._path} did not answer in time") from error
        except (OSError, FormatError) as error:
            raise NodeAwayError(f"the node on {self._path} is gone: {error}") from error
        return self._bodies.pop(0)

    def _decoded(self, body: bytes) -> messages.Reply:
        try:
            return decode_first(body)
        except ProtocolError as error:
            raise NodeAwayError(f"the node on {self._path} speaks in riddles: {error}") from error
