"""KV events over ZMQ (extra `cluster`): a node's ports, and its lines to the other nodes.

    PUB      [topic, number, payload]                          to whoever listens
    ROUTER   asked ["", number]; answers ["", topic, number, payload] ... ["", "", END, ""]

Both are what vLLM's `ZmqEventPublisher` speaks. Nothing here waits: what cannot be sent at once is
lost, and then asked for. A port that others can reach demands a secret that all nodes share (CURVE:
traffic is sealed, and nobody connects without it); without one it is bound to this host only.
"""

from __future__ import annotations

import ipaddress
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85

from kvist.cluster.follower import Ask
from kvist.cluster.log import Sealed
from kvist.cluster.record import NodeRecord
from kvist.cluster.wire import (
    END_NUMBER,
    MOST_PAYLOAD_BYTES,
    NUMBER_BYTES,
    Batch,
    decode_message,
)
from kvist.core.errors import ConfigError, FormatError
from kvist.native import digest

_log = logging.getLogger(__name__)
_PURPOSE = b"kvist events\0"
MOST_QUEUED = 1000  # messages of one peer in a socket
_GOODBYE_MS = 500  # for what was published last
_MOST_ASKS = 64  # answered in one go
_MOST_TAKEN = 1000  # messages taken from one peer in one go
_MOST_ANSWER = 2000  # batches; who needs more asks again


def secret_of(token: bytes) -> str:
    """The secret of a cluster's events, made of what its nodes share: 40 characters of Z85."""
    return str(z85.encode(digest(_PURPOSE + token)).decode())


class Sockets:
    """Makes sockets that take no endless message, and wait for nobody when they are closed."""

    def __init__(self, secret: str, most_queued: int = MOST_QUEUED) -> None:
        """`secret`: 40 characters of Z85, which seal what is sent; empty: it goes in the clear.

        Raises:
            ConfigError: the secret is none.
        """
        self._most_queued = most_queued
        self._secret = secret.encode()
        try:
            self._public = zmq.curve_public(self._secret) if secret else b""
        except (ValueError, zmq.ZMQError) as error:
            raise ConfigError("the secret of the cluster is not 40 characters of Z85") from error
        self._context: Any = zmq.Context.instance()

    def server(self, kind: int, endpoint: str) -> Any:
        """A bound socket.

        Raises:
            ConfigError: others could reach it and there is no secret.
            OSError: the endpoint cannot be bound.
        """
        if not self._secret and not is_own_host(endpoint):
            raise ConfigError(f"{endpoint} can be reached by others", remedy="give it a secret")
        socket = self._made(kind)
        if self._secret:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise OSError(error.errno, f"cannot bind {endpoint}: {error}") from error
        return socket

    def client(self, kind: int, endpoint: str, *, watched: bool = False) -> Any:
        """A connecting socket; `None` for an endpoint that is none.

        `watched`: its monitor gets a message whenever a connection comes up.
        """
        socket = self._made(kind)
        if watched:
            socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        if self._secret:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._public)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError:
            if watched:
                socket.get_monitor_socket().close()
                socket.disable_monitor()
            socket.close()
            return None
        return socket

    def _made(self, kind: int) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MOST_PAYLOAD_BYTES)
        socket.setsockopt(zmq.SNDHWM, self._most_queued)
        socket.setsockopt(zmq.RCVHWM, self._most_queued)
        return socket


class Poll:
    """Waits for messages on sockets that come and go. For one thread."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._polled: set[Any] = set()

    def wait(self, sockets: Iterable[Any], most_s: float) -> None:
        """Returns when one of them has a message, or after `most_s` seconds."""
        wanted = set(sockets)
        for socket in self._polled - wanted:
            self._poller.unregister(socket)
        for socket in wanted - self._polled:
            self._poller.register(socket, zmq.POLLIN)
        self._polled = wanted
        self._poller.poll(round(most_s * 1000))


class EventPorts:
    """What a node binds: where it publishes, and where it answers. For one thread."""

    def __init__(
        self, events: str, replay: str, *, secret: str = "", most_queued: int = MOST_QUEUED
    ) -> None:
        """Binds both; port 0 lets the system choose.

        Raises:
            ConfigError: others could reach a port and there is no secret.
            OSError: an endpoint cannot be bound.
        """
        sockets = Sockets(secret, most_queued)
        self._events = sockets.server(zmq.PUB, events)
        try:
            self._replay = sockets.server(zmq.ROUTER, replay)
        except (ConfigError, OSError):
            self._events.close()
            raise
        self._events.setsockopt(zmq.LINGER, _GOODBYE_MS)
        self.events = _bound(self._events)
        self.replay = _bound(self._replay)
        self.refused = 0

    @property
    def sockets(self) -> list[Any]:
        """What to poll."""
        return [self._replay]

    def publish(self, topic: bytes, batches: Iterable[Sealed]) -> None:
        """Sends batches to whoever listens."""
        for batch in batches:
            send(self._events, [topic, _written(batch.number), batch.payload])

    def answer(self, topic: bytes, since: Callable[[int], Sequence[Sealed]]) -> int:
        """Answers the asks that have come; `since(number)` gives the batches. Returns how many."""
        for answered in range(_MOST_ASKS):
            frames = received(self._replay)
            if frames is None:
                return answered
            if len(frames) != 3 or len(frames[2]) != NUMBER_BYTES:
                self.refused += 1
                continue
            client, number = frames[0], int.from_bytes(frames[2], "big")
            for batch in list(since(number))[:_MOST_ANSWER]:
                message = [client, b"", topic, _written(batch.number), batch.payload]
                if not send(self._replay, message):
                    break
            send(self._replay, [client, b"", b"", END_NUMBER, b""])
        return _MOST_ASKS

    def close(self) -> None:
        """Lets go of both."""
        self._events.close()
        self._replay.close()


class _Line:
    """What connects to one other node."""

    def __init__(self, sockets: Sockets, record: NodeRecord) -> None:
        self.place = (record.events, record.replay)
        watched = not record.incarnation  # others say themselves that they were restarted
        self.events = sockets.client(zmq.SUB, record.events, watched=watched)
        self.replay = sockets.client(zmq.DEALER, record.replay) if record.replay else None
        self._monitor: Any = None
        self._connected = 0  # times
        if self.events is not None:
            self._monitor = self.events.get_monitor_socket() if watched else None
            self.events.setsockopt(zmq.SUBSCRIBE, b"")

    def sockets(self) -> list[Any]:
        return [s for s in (self.events, self.replay, self._monitor) if s is not None]

    def is_back(self) -> bool:
        """Whether the connection came up since the last call, and not for the first time."""
        before = self._connected
        while self._monitor is not None and received(self._monitor) is not None:
            self._connected += 1
        return self._connected > max(before, 1)

    def close(self) -> None:
        if self._monitor is not None:
            self.events.disable_monitor()
        for socket in self.sockets():
            socket.close()


class EventLines:
    """Connections to all other nodes, one line each, so nobody speaks for another. One thread."""

    def __init__(self, *, secret: str = "", most_queued: int = MOST_QUEUED) -> None:
        self._sockets = Sockets(secret, most_queued)
        self._lines: dict[str, _Line] = {}
        self._answered: deque[str] = deque(maxlen=_MOST_TAKEN)
        self.unreadable = 0

    @property
    def sockets(self) -> list[Any]:
        """What to poll."""
        return [socket for line in self._lines.values() for socket in line.sockets()]

    def follow(self, records: Iterable[NodeRecord]) -> None:
        """Connects to these nodes and to no others."""
        wanted = {record.node: record for record in records if record.events}
        for node in list(self._lines):
            record = wanted.get(node)
            if record is None or (record.events, record.replay) != self._lines[node].place:
                self._lines.pop(node).close()
        for node, record in wanted.items():
            if node not in self._lines:
                self._lines[node] = _Line(self._sockets, record)

    def ask(self, ask: Ask) -> None:
        """Asks a node for batches; the answer comes in `receive`, or not at all."""
        line = self._lines.get(ask.node)
        if line is None:
            return
        if line.replay is None:
            self._answered.append(ask.node)
        else:
            send(line.replay, [b"", _written(ask.number)])

    def answered(self) -> list[str]:
        """Nodes whose answer has come to its end in `receive`, or who cannot be asked."""
        nodes = list(dict.fromkeys(self._answered))
        self._answered.clear()
        return nodes

    def reconnected(self) -> list[str]:
        """Nodes whose connection broke and came up again since the last call."""
        return [node for node, line in self._lines.items() if line.is_back()]

    def receive(self) -> Iterator[Batch]:
        """What has come. What cannot be read, or is said by one in another's name, is counted."""
        for node, line in list(self._lines.items()):
            if line.events is not None:
                yield from self._taken(node, line.events, lead=0)
            if line.replay is not None:
                yield from self._taken(node, line.replay, lead=1)

    def close(self) -> None:
        """Lets go of all."""
        self.follow(())

    def _taken(self, node: str, socket: Any, *, lead: int) -> Iterator[Batch]:
        for _ in range(_MOST_TAKEN):
            frames = received(socket)
            if frames is None:
                return
            frames = frames[lead:]
            if len(frames) == 3 and frames[1] == END_NUMBER:
                self._answered.append(node)
                continue
            try:
                if len(frames) != 3:
                    raise FormatError(f"{len(frames)} frames")
                topic, number, payload = frames
                batch = decode_message(topic, number, payload, source=node, replayed=bool(lead))
                if batch.node != node:
                    raise FormatError(f"{node} speaks for {batch.node}")
            except FormatError as error:
                self.unreadable += 1
                _log.debug("a message of %s: %s", node, error)
                continue
            yield batch


def _written(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "big")


def send(socket: Any, frames: list[bytes]) -> bool:
    """Sends if that is possible at once."""
    try:
        socket.send_multipart(frames, flags=zmq.NOBLOCK)
    except zmq.ZMQError:
        return False
    return True


def received(socket: Any) -> list[bytes] | None:
    """A message that has come, if any."""
    try:
        frames: list[bytes] = socket.recv_multipart(flags=zmq.NOBLOCK)
    except zmq.ZMQError:
        return None
    return frames


def _bound(socket: Any) -> str:
    return str(socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode())


def is_own_host(endpoint: str) -> bool:
    """Whether only this host can reach an endpoint."""
    parts = urlsplit(endpoint)
    if parts.scheme in ("ipc", "inproc"):
        return True
    host = (parts.hostname or "").strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
