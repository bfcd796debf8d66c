"""Runs the application on a thread of the node, on loopback only.

A connection has a bound as well: whoever sends a request's head byte by byte is cut off.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvist.core.errors import ConfigError
from kvist.node.http.app import REQUEST_S, make_app
from kvist.node.http.tokens import Tokens

_log = logging.getLogger(__name__)
MOST_CONNECTIONS = 64
MOST_HEAD_BYTES = 16 << 10
CONNECTION_S = 30.0  # from then on a connection takes no new request
_KEEP_S = 5
_LEAVE_S = 1
_JOIN_S = 5.0
_KNOB = "$.node.http.listen"


class _Connection(H11Protocol):
    """A connection that ends some time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(CONNECTION_S, self._retire)

    def _retire(self) -> None:
        if not self.transport.is_closing():
            self.shutdown()
            self.loop.call_later(REQUEST_S, self.transport.abort)


class HttpServer:
    """The node's HTTP side. It listens from the beginning, and serves while `running`."""

    def __init__(self, listen: str, node: Path, tokens: Tokens, *, version: str) -> None:
        """Binds `listen` (host:port); asks the node that listens on the socket `node`.

        Raises:
            ConfigError: it is no address, not on loopback, or taken.
        """
        self._listener = _bound(listen)
        self.port: int = self._listener.getsockname()[1]
        config = uvicorn.Config(
            make_app(node, tokens, version=version),
            http=_Connection,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MOST_CONNECTIONS,
            h11_max_incomplete_event_size=MOST_HEAD_BYTES,
            timeout_keep_alive=_KEEP_S,
            timeout_graceful_shutdown=_LEAVE_S,
        )
        self._server = uvicorn.Server(config)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Serves while the body runs."""
        thread = threading.Thread(
            target=self._server.run,
            kwargs={"sockets": [self._listener]},
            name="kvist-http",
            daemon=True,
        )
        thread.start()
        try:
            yield
        finally:
            self._server.should_exit = True
            thread.join(_JOIN_S)
            self._listener.close()


def _bound(listen: str) -> socket.socket:
    host, _, port = listen.rpartition(":")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
        number = int(port)
    except ValueError as error:
        raise ConfigError(
            f"{listen!r} is no address with a port", path=_KNOB, remedy="such as 127.0.0.1:7333"
        ) from error
    if not address.is_loopback:
        raise ConfigError(
            f"{host} is not on loopback, and a token must not cross a network in the clear",
            path=_KNOB,
            remedy="listen on 127.0.0.1 and put a proxy with TLS in front",
        )
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((str(address), number))
        listener.listen(MOST_CONNECTIONS)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {listen}: {error}", path=_KNOB, remedy="choose another port"
        ) from error
    _log.info("HTTP on %s:%d", address, listener.getsockname()[1])
    return listener
