"""A TCP connection whose every call ends at a deadline, however slowly bytes drip.

Blocks go from the sender's slot to the socket and from the socket into the reader's slot, several
in one call: plain sockets block in the kernel with a time limit of the kernel's, which holds for a
whole call. What is received is hashed while it is in a cache. TLS has its own copies.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Sequence

from kvist.core.errors import TierTimeout
from kvist.core.keys import Key
from kvist.native import Answers, answers_twin
from kvist.native.answers_twin import Taken
from kvist.node.peers.messages import HEAD, OLDEST_PROTOCOL, Message, Request, encode
from kvist.node.protocol import ProtocolError

_TLS_BYTES = 1 << 20  # given to TLS in one call
_LEAST_S = 1e-4  # no time at all would mean that a call never waits
_TIMEVAL = struct.Struct("ll")
_TCP = {  # a host that vanishes without a word is noticed within a minute
    socket.TCP_NODELAY: 1,
    socket.TCP_KEEPIDLE: 30,  # seconds
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 15_000,  # milliseconds
}
Buffer = bytes | memoryview


class Wire:
    """A connected socket. One thread uses it at a time; `abort` may come from any."""

    def __init__(
        self, connection: socket.socket, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Owns `connection`."""
        self._socket, self._clock = connection, clock
        self.protocol = OLDEST_PROTOCOL  # until the handshake has agreed on another

    @property
    def connection(self) -> socket.socket:
        """The socket, for a wire that takes this one's place."""
        return self._socket

    def left_s(self, until: float) -> float:
        """Seconds until the deadline.

        Raises:
            TierTimeout: it is over.
        """
        left = until - self._clock()
        if left <= 0:
            raise TierTimeout(errno.ETIMEDOUT, "the other node is too slow")
        return left

    def send(self, parts: Sequence[Buffer], until: float) -> None:
        """Sends all of `parts`, one after the other.

        Raises:
            TierTimeout: they are not on their way by `until`.
            OSError: the connection is broken.
        """
        left = [part if isinstance(part, memoryview) else memoryview(part) for part in parts]
        while left:
            sent = self._send(left, until)
            while left and sent >= left[0].nbytes:
                sent -= left.pop(0).nbytes
            if sent:
                left[0] = left[0][sent:]

    def fill(self, out: memoryview, until: float) -> None:
        """Fills `out` with what comes.

        Raises:
            TierTimeout: it is not full by `until`.
            ConnectionResetError: the other side has hung up.
            OSError: the connection is broken.
        """
        while out:
            count = self._receive(out, until)
            if not count:
                raise ConnectionResetError(errno.ECONNRESET, "the other node hung up")
            out = out[count:]

    def answers(self, keys: Sequence[Key], outs: Sequence[memoryview]) -> Answers:
        """For the answers to a request: block i has `keys[i]` and goes into `outs[i]`."""
        return Answers(keys, outs)

    def take(self, answers: Answers, until: float, each_s: float, tell_s: float) -> list[Taken]:
        """Takes what comes within `tell_s`, maybe nothing; see `answers_twin.Answers.take`.

        Raises:
            TierTimeout: an answer is not whole by `until`, or takes more than `each_s` of waiting.
            ProtocolError: it is none to this request.
            OSError: as `fill`.
        """
        with _timely():
            try:
                return self._take(answers, self.left_s(until), each_s, tell_s)
            except ValueError as error:
                raise ProtocolError(str(error)) from error

    def tell(self, message: Message, until: float) -> bytes:
        """Sends a message; returns its bytes.

        Raises:
            OSError: as `send`.
        """
        data = encode(message)
        self.send([data], until)
        return data

    def ask(self, request: Request, until: float) -> None:
        """Sends a request whose answers are taken next.

        Raises:
            ProtocolError: the other node broke a rule before that.
            OSError: as `send` and `fill`.
        """
        self.tell(request, until)

    def hear(self, most_bytes: int, until: float, *, body_s: float | None = None) -> bytearray:
        """The next message with its length; once it began, it may take `body_s`.

        Raises:
            ProtocolError: it claims to be longer than `most_bytes`.
            OSError: as `fill`.
        """
        head = bytearray(HEAD.size)
        self.fill(memoryview(head), until)
        (size,) = HEAD.unpack(head)
        if size > most_bytes:
            raise ProtocolError(f"a message of {size} bytes; at most {most_bytes} may come")
        message = head + bytearray(size)
        limit = until if body_s is None else self._clock() + body_s
        self.fill(memoryview(message)[HEAD.size :], limit)
        return message

    def abort(self) -> None:
        """Makes every call on this connection fail, now and later."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hangs up. Idempotent."""
        self._socket.close()

    def _limit(self, option: int, until: float) -> None:
        left = self.left_s(until)
        micros = max(1, int(left % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(left), micros))

    def _send(self, parts: Sequence[memoryview], until: float) -> int:
        self._limit(socket.SO_SNDTIMEO, until)
        try:
            return self._socket.sendmsg(parts)
        except BlockingIOError:
            return 0  # the kernel's limit: `_limit` says whether it was ours

    def _take(self, answers: Answers, left_s: float, each_s: float, tell_s: float) -> list[Taken]:
        return answers.take(self._socket.fileno(), left_s, each_s, tell_s)

    def _receive(self, out: memoryview, until: float) -> int:
        while True:
            self._limit(socket.SO_RCVTIMEO, until)
            try:
                return self._socket.recv_into(out, out.nbytes, socket.MSG_WAITALL)
            except BlockingIOError:
                continue


class TlsWire(Wire):
    """The same over TLS."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        """Owns `connection`."""
        super().__init__(connection)

    def receive(self, out: memoryview, until: float) -> int:
        """See `answers_twin.Source`."""
        self._socket.settimeout(max(_LEAST_S, until - self._clock()))
        try:
            count = self._socket.recv_into(out)
        except TimeoutError:
            return 0
        if not count:
            raise ConnectionResetError(errno.ECONNRESET, "the other node hung up")
        return count

    def answers(self, keys: Sequence[Key], outs: Sequence[memoryview]) -> Answers:
        """As of `Wire`."""
        return answers_twin.Answers(keys, outs)

    def _take(self, answers: Answers, left_s: float, each_s: float, tell_s: float) -> list[Taken]:
        return answers.take_from(self, left_s, each_s, tell_s)

    def _send(self, parts: Sequence[memoryview], until: float) -> int:
        self._socket.settimeout(self.left_s(until))
        with _timely():
            return self._socket.send(parts[0][:_TLS_BYTES])

    def _receive(self, out: memoryview, until: float) -> int:
        self._socket.settimeout(self.left_s(until))
        with _timely():
            return self._socket.recv_into(out)


@contextlib.contextmanager
def _timely() -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise TierTimeout(errno.ETIMEDOUT, "the other node is too slow") from error


def connect(
    host: str, port: int, tls: ssl.SSLContext | None, until: float, *, server_name: str = ""
) -> Wire:
    """A connection to a node.

    Raises:
        TierTimeout: it does not come about by `until`.
        OSError: nobody listens there, or TLS was refused.
    """
    left = until - time.monotonic()
    with _timely():
        plain = socket.create_connection((host, port), max(0.001, left))
    return _wired(
        plain,
        tls,
        until,
        lambda context, link: context.wrap_socket(
            link, server_hostname=server_name or host, do_handshake_on_connect=False
        ),
    )


def accept(connection: socket.socket, tls: ssl.SSLContext | None, until: float) -> Wire:
    """A connection that somebody made to us; owns it.

    Raises:
        OSError: TLS could not be agreed upon by `until`.
    """
    return _wired(
        connection,
        tls,
        until,
        lambda context, link: context.wrap_socket(
            link, server_side=True, do_handshake_on_connect=False
        ),
    )


def _wired(
    plain: socket.socket,
    tls: ssl.SSLContext | None,
    until: float,
    wrap: Callable[[ssl.SSLContext, socket.socket], ssl.SSLSocket],
) -> Wire:
    secure: ssl.SSLSocket | None = None
    try:
        _tune(plain)
        if tls is None:
            plain.settimeout(None)
            return Wire(plain)
        secure = wrap(tls, plain)
        wire = TlsWire(secure)
        secure.settimeout(wire.left_s(until))
        with _timely():
            secure.do_handshake()
        return wire
    except (OSError, ValueError):
        (secure or plain).close()
        raise


def _tune(link: socket.socket) -> None:
    """Leaves the kernel its buffers: it finds their sizes, and in larger ones bytes grow cold."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _TCP.items():
        link.setsockopt(socket.IPPROTO_TCP, option, value)
