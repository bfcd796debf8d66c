"""The owner's side: a TCP listener, and a thread for each reader that is connected.

A connection that has not proven itself takes a thread and less than a page of memory, for five
seconds; only so many may be in that state, and further ones are closed as they come.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from kvist.core.errors import FormatError, NodeRefusedError
from kvist.node.keyspaces import Attach
from kvist.node.peers import messages as m
from kvist.node.peers.carrying.carrier import Carrier
from kvist.node.peers.carrying.showcase import Showcase
from kvist.node.peers.credentials import Credentials
from kvist.node.peers.handshake import receive
from kvist.node.peers.serving import ClusterSide, ServeCounts, Serving
from kvist.node.peers.wire import Wire, accept
from kvist.store.own import OwnBlocks
from kvist.store.tiered import TieredStore

_log = logging.getLogger(__name__)
MOST_READERS = 256
MOST_STRANGERS = 32
FIRST_S = 5.0
_BACKLOG = 64
_LOOK_S = 0.5
_WARN_EVERY_S = 10.0


class OpenStore(Protocol):
    """A keyspace that is in use here."""

    @property
    def attach(self) -> Attach:
        """What its blocks are like."""
        ...

    @property
    def store(self) -> TieredStore:
        """Its store."""
        ...


class PeerServer:
    """Serves the blocks of a node to other nodes until it is stopped."""

    def __init__(
        self,
        listener: socket.socket,
        find: Callable[[bytes], OpenStore | None],
        credentials: Credentials,
        *,
        node: bytes | None = None,
        first_s: float = FIRST_S,
        cluster: ClusterSide | None = None,
        showcase: Showcase | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts to serve `listener`, which it owns.

        Args:
            listener: a bound and listening TCP socket.
            find: the open store of a keyspace, by its fingerprint; called on any thread.
            credentials: what readers must know.
            node: the number of this process, which its own readers show.
            first_s: how long a reader may take to prove itself.
            cluster: what a node in a cluster does besides.
            showcase: lets readers' carriers read blocks; else all are sent.
            clock: seconds that only grow.
        """
        self._showcase = showcase
        self._listener, self._find, self._credentials = listener, find, credentials
        self._node = node or os.urandom(m.NODE_BYTES)
        self._first_s, self._cluster, self._clock = first_s, cluster, clock
        self._lock = threading.Lock()
        self._strangers: set[socket.socket] = set()
        self._wires: dict[threading.Thread, Wire | None] = {}
        self._stopping = threading.Event()
        self._warn_at_s = 0.0
        self.counts = ServeCounts()
        self.refused: Counter[str] = Counter()
        self._acceptor = threading.Thread(target=self._run, name="kvist-peers", daemon=True)
        self._acceptor.start()

    @property
    def address(self) -> str:
        """HOST:PORT that it listens on."""
        return shown(self._listener.getsockname())

    def facts(self) -> dict[str, object]:
        """What a node's status shows."""
        with self._lock:
            readers = sum(wire is not None for wire in self._wires.values())
        return {
            "listen": self.address,
            "readers": readers,
            "sent_blocks": self.counts.sent_blocks,
            "sent_bytes": self.counts.sent_bytes,
            "absent_blocks": self.counts.absent_blocks,
            "busy_blocks": self.counts.busy_blocks,
            "refused": dict(self.refused),
        }

    def stop(self, timeout_s: float) -> None:
        """Ends every connection; every lease is given back. Idempotent."""
        self._stopping.set()
        until = self._clock() + timeout_s
        self._acceptor.join(timeout_s)
        self._listener.close()
        with self._lock:
            threads = dict(self._wires)
            for stranger in self._strangers:
                with contextlib.suppress(OSError):
                    stranger.shutdown(socket.SHUT_RDWR)
        for wire in threads.values():
            if wire is not None:
                wire.abort()
        for thread in threads:
            thread.join(max(0.0, until - self._clock()))

    def _run(self) -> None:
        self._listener.settimeout(_LOOK_S)
        while not self._stopping.is_set():
            if self._showcase is not None:
                self._showcase.sweep(self._store)
            try:
                connection, address = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                self._warn(f"cannot accept: {error}")  # no descriptor is left
                self._stopping.wait(_LOOK_S)
                continue
            self._welcome(connection, shown(address))

    def _welcome(self, connection: socket.socket, name: str) -> None:
        with self._lock:
            crowded = len(self._strangers) >= MOST_STRANGERS or len(self._wires) >= MOST_READERS
            if not crowded:
                self._strangers.add(connection)
        if crowded:
            self.refused["crowded"] += 1
            connection.close()
            return
        thread = threading.Thread(
            target=self._serve, args=(connection, name), name="kvist-peer", daemon=True
        )
        with self._lock:
            self._wires[thread] = None
        try:
            thread.start()
        except RuntimeError as error:  # no thread can be had
            self._warn(f"cannot serve {name}: {error}")
            self._forget(thread, connection)
            connection.close()

    def _serve(self, connection: socket.socket, name: str) -> None:
        thread = threading.current_thread()
        wire: Wire | None = None
        try:
            until = self._clock() + self._first_s
            wire = accept(connection, self._credentials.from_others, until)
            want = receive(wire, self._credentials, self._node, self._held, until)
            with self._lock:
                self._strangers.discard(connection)
                self._wires[thread] = wire
            if self._stopping.is_set():
                return
            _log.debug("peer %s reads from here", name)
            Serving(
                wire,
                want.fingerprint,
                lambda: self._blocks(want),
                self.counts,
                cluster=self._cluster,
                carrier=lambda kind: self._carrier(kind, want),
                clock=self._clock,
            ).run()
        except NodeRefusedError as error:
            self._count("refused", f"{name} is refused: {error}")
        except FormatError as error:
            self._count("garbled", f"{name}: {error}")
        except ssl.SSLError as error:
            self._count("tls", f"{name}: {error}")
        except OSError as error:
            _log.debug("peer %s: %s", name, error)
        finally:
            if wire is not None:
                wire.close()
            connection.close()
            self._forget(thread, connection)

    def _held(self, fingerprint: bytes) -> Attach | None:
        found = self._find(fingerprint)
        return None if found is None else found.attach

    def _blocks(self, want: Attach) -> OwnBlocks | None:
        """The store as it is now: it may have been closed and opened since the last request."""
        store = self._store(want.fingerprint, want)
        return None if store is None else store.own

    def _carrier(self, kind: str, want: Attach) -> Carrier | None:
        store = self._store(want.fingerprint, want)
        if store is None or self._showcase is None:
            return None
        return self._showcase.carrier(kind, want.fingerprint, store)

    def _store(self, fingerprint: bytes, want: Attach | None = None) -> TieredStore | None:
        """The store of a keyspace, if it is open and, where that is said, of such blocks."""
        found = self._find(fingerprint)
        return None if found is None or want not in (None, found.attach) else found.store

    def _forget(self, thread: threading.Thread, connection: socket.socket) -> None:
        with self._lock:
            self._strangers.discard(connection)
            self._wires.pop(thread, None)

    def _count(self, why: str, text: str) -> None:
        self.refused[why] += 1
        self._warn(text)

    def _warn(self, text: str) -> None:
        """Says so, once in a while: strangers may come as often as they like."""
        now_s = self._clock()
        if now_s >= self._warn_at_s:
            self._warn_at_s = now_s + _WARN_EVERY_S
            _log.warning("peer %s", text)


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket.

    Raises:
        OSError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def shown(address: tuple[object, ...]) -> str:
    """HOST:PORT of a socket's address."""
    host = str(address[0])
    return f"[{host}]:{address[1]}" if ":" in host else f"{host}:{address[1]}"
