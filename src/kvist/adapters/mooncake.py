"""Objects in a Mooncake Store, through its Python client (extra `mooncake`).

This process gives no memory of its own to the pool unless it is told to (`segment`): it is a client
of a master that others feed. Replicas, leases and eviction are the master's. Objects are moved
through a registered buffer of this adapter, one call at a time each, since the client moves to and
from registered memory only. The client lists nothing, so what other hosts stored is learned by
probes alone.

Source: Mooncake's Python API, `mooncake.store.MooncakeDistributedStore`, 0.3.13.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]

from kvist.adapters.protocol import (
    Fetched,
    Got,
    NewObject,
    OpenState,
    Page,
    Put,
    PutReport,
    Wanted,
    answer,
    check_names,
    check_prefix,
)
from kvist.core.errors import TierError, TierFullError, TierTimeout

_ABSENT = -704  # OBJECT_NOT_FOUND
_PRESENT = -705  # OBJECT_ALREADY_EXISTS
_BUSY = frozenset({-703, -706, -707})  # no replica is ready, or one is being moved
_FULL = frozenset({-200, -601})  # no available handle or segment
_LOCK_TIMEOUT_S = 60.0
_SPACE = "kvist/"


@dataclass(frozen=True, slots=True)
class MooncakeClient:
    """How the client is set up: its own address, the master's, the metadata server's."""

    master: str
    metadata: str
    hostname: str = "127.0.0.1"
    protocol: str = "tcp"
    devices: str = ""
    segment_bytes: int = 0
    buffer_bytes: int = 64 << 20
    connect_s: float = 2.0


class MooncakeAdapter:
    """A `StorageAdapter` over a Mooncake Store. Its calls have no deadline: put one around it."""

    def __init__(self, client: MooncakeClient) -> None:
        """Connects.

        Raises:
            TierError: the master or the metadata server cannot be reached.
        """
        # The client's own attempt to connect takes minutes, in which no other thread runs.
        _reach(client.master, client.connect_s)
        _reach(urlsplit(client.metadata).netloc, client.connect_s)
        self._state = OpenState("Mooncake Store")
        self._lock = Lock()
        self._store: Any = MooncakeDistributedStore()
        code = self._store.setup(
            client.hostname,
            client.metadata,
            client.segment_bytes,
            client.buffer_bytes,
            client.protocol,
            client.devices,
            client.master,
        )
        if code:
            raise _error(code, "setup")

    def get(self, wanted: Sequence[Wanted]) -> list[Fetched]:
        self._state.demand()
        check_names(w.name for w in wanted)
        if not wanted:
            return []
        names = [_SPACE + w.name for w in wanted]
        with _Turn(self._lock):
            there = self._store.batch_is_exist(names)
            return [
                self._get_one(name, w) if found == 1 else _absent(found)
                for name, w, found in zip(names, wanted, there, strict=True)
            ]

    def put(self, objects: Sequence[NewObject]) -> PutReport:
        self._state.demand()
        check_names(o.name for o in objects)
        with _Turn(self._lock):
            return PutReport(tuple(self._put_one(new) for new in objects))

    def delete(self, names: Sequence[str]) -> None:
        self._state.demand()
        check_names(names)
        with _Turn(self._lock):
            for name in names:
                code = self._store.remove(_SPACE + name, force=True)
                if code not in (0, _ABSENT):
                    raise _error(code, "remove")

    def list_page(self, prefix: str, *, cursor: str | None = None, limit: int = 1000) -> Page:
        """Nothing, and says so: the client cannot list."""
        self._state.demand()
        check_prefix(prefix)
        return Page((), partial=True)

    def close(self) -> None:
        if not self._state.closed:
            self._state.closed = True
            with _Turn(self._lock):
                self._store.close()

    def _get_one(self, name: str, wanted: Wanted) -> Fetched:
        size_bytes = self._store.get_size(name)
        if size_bytes < 0:
            return _absent(size_bytes)
        if not wanted.into:
            return Fetched(Got.HIT, size_bytes)
        if size_bytes != wanted.size_bytes:
            return Fetched(Got.SIZE, size_bytes)
        data = self._store.get(name)
        return answer(memoryview(data), wanted) if data else Fetched(Got.ABSENT)

    def _put_one(self, new: NewObject) -> Put:
        name = _SPACE + new.name
        if self._store.is_exist(name) == 1:
            return Put.PRESENT
        code = self._store.put(name, b"".join(new.parts))
        if code == _PRESENT:
            return Put.PRESENT
        if code:
            raise _error(code, "put")
        return Put.STORED


def _reach(address: str, timeout_s: float) -> None:
    """Proves that somebody listens at `HOST:PORT`; an address of another form is taken as it is."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout_s).close()
    except OSError as error:
        text = f"Mooncake Store: nobody answers at {address}: {error}"
        raise TierError(error.errno or errno.EHOSTUNREACH, text) from error


class _Turn:
    """Holds the lock, waiting at most a minute."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=_LOCK_TIMEOUT_S):
            raise TierTimeout(errno.ETIMEDOUT, "another call to Mooncake Store does not return")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _absent(code: int) -> Fetched:
    """Not there, or not to be had now."""
    if code in (0, _ABSENT) or code in _BUSY:
        return Fetched(Got.ABSENT)
    raise _error(code, "get")


def _error(code: int, doing: str) -> TierError:
    kind = TierFullError if code in _FULL else TierError
    number = errno.ENOSPC if code in _FULL else errno.EIO
    return kind(number, f"Mooncake Store {doing}: its error {code}")
