"""What one would write without Kvist: each client's own calls on several threads, one block a call.

A block goes from its memory to the client and comes back into its memory. Nothing is named by
content, framed, checked, retried or limited.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from kvist.bench.remotes.services import BUCKET, HOST
from kvist.bench.store.contender import Blocks, ContenderError, share_out

_ANSWER_S = 60.0
_SHORT_BYTES = 16 << 20  # Mooncake's buffer for each client


class Client(Protocol):
    """The calls of one client, by several threads. `errors`: what they raise besides `OSError`."""

    errors: tuple[type[Exception], ...]

    def put(self, name: str, block: memoryview) -> None:
        """Stores a block."""
        ...

    def get(self, name: str, room: memoryview) -> None:
        """Fills `room` with a block."""
        ...

    def clear(self) -> None:
        """Forgets everything."""
        ...


class Plain:
    """A `Contender` of one client."""

    def __init__(self, blocks: Blocks, client: Client, *, threads: int) -> None:
        self._blocks, self._client, self._threads = blocks, client, threads

    def write(self, round_number: int) -> float:
        """Puts every block; seconds."""
        self._client.clear()
        return self._timed(
            lambda i: self._client.put(f"plain/{round_number}-{i}", self._blocks.view(i))
        )

    def read(self, round_number: int) -> float:
        """Gets every block; seconds."""
        self._blocks.forget()
        took_s = self._timed(
            lambda i: self._client.get(f"plain/{round_number}-{i}", self._blocks.room(i))
        )
        self._blocks.prove("the plain client")
        return took_s

    def close(self) -> None:
        """Forgets what it wrote."""
        self._client.clear()

    def _timed(self, work: Callable[[int], None]) -> float:
        def mapped(i: int) -> None:
            try:
                work(i)
            except self._client.errors as error:
                raise ContenderError(f"{type(error).__name__}: {error}") from error

        began = time.perf_counter()
        share_out(self._threads, self._blocks.count, mapped)
        return time.perf_counter() - began


class Files:
    """One file a block, synced as Kvist's are; read through the page cache, as Kvist's are."""

    errors: tuple[type[Exception], ...] = ()

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "plain").mkdir(parents=True)

    def put(self, name: str, block: memoryview) -> None:
        """See `Client`."""
        fd = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            if os.write(fd, block) != block.nbytes:
                raise ContenderError("a file was not written whole")
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def get(self, name: str, room: memoryview) -> None:
        """See `Client`."""
        fd = os.open(self._folder / name, os.O_RDONLY)
        try:
            if os.readv(fd, [room]) != room.nbytes:
                raise ContenderError("a file was not read whole")
        finally:
            os.close(fd)

    def clear(self) -> None:
        """See `Client`."""
        shutil.rmtree(self._folder)
        (self._folder / "plain").mkdir(parents=True)


class RedisPy:
    """redis-py, with a pool of connections."""

    def __init__(self, port: int, *, threads: int) -> None:
        import redis

        self.errors: tuple[type[Exception], ...] = (redis.exceptions.RedisError,)
        pool = redis.ConnectionPool(
            host=HOST, port=port, max_connections=threads, socket_timeout=_ANSWER_S
        )
        self._redis: Any = redis.Redis(connection_pool=pool)

    def put(self, name: str, block: memoryview) -> None:
        """See `Client`."""
        if not self._redis.set(name, block):
            raise ContenderError("Redis did not take a block")

    def get(self, name: str, room: memoryview) -> None:
        """See `Client`."""
        _fill(room, self._redis.get(name))

    def clear(self) -> None:
        """See `Client`."""
        self._redis.flushall()


class Obstore:
    """obstore's S3 client."""

    def __init__(self, port: int) -> None:
        import obstore
        from obstore.exceptions import BaseError
        from obstore.store import S3Store

        self.errors: tuple[type[Exception], ...] = (BaseError,)
        self._obstore: Any = obstore
        options: Any = {"allow_http": True, "timeout": f"{_ANSWER_S:.0f}s"}
        endpoint = f"http://{HOST}:{port}"
        self._store: Any = S3Store(
            BUCKET, endpoint=endpoint, region="us-east-1", client_options=options
        )
        self._names: set[str] = set()
        self._lock = threading.Lock()

    def put(self, name: str, block: memoryview) -> None:
        """See `Client`."""
        self._obstore.put(self._store, name, block, use_multipart=False)
        with self._lock:
            self._names.add(name)

    def get(self, name: str, room: memoryview) -> None:
        """See `Client`."""
        _fill(room, memoryview(self._obstore.get(self._store, name).bytes()))

    def clear(self) -> None:
        """See `Client`."""
        names, self._names = sorted(self._names), set()
        if names:
            self._obstore.delete(self._store, names)


class Mooncake:
    """Mooncake's own client; one call at a time, as its calls hold Python's lock anyway."""

    errors: tuple[type[Exception], ...] = ()

    def __init__(self, master: str, metadata: str, *, segment_bytes: int = 0) -> None:
        """Joins the master; `segment_bytes` are what this process gives the pool.

        Raises:
            ContenderError: it does not let us.
        """
        from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]

        self._store: Any = MooncakeDistributedStore()
        code = self._store.setup(HOST, metadata, segment_bytes, _SHORT_BYTES, "tcp", "", master)
        if code:
            raise ContenderError(f"Mooncake Store: setup failed with {code}")
        self._lock = threading.Lock()

    def put(self, name: str, block: memoryview) -> None:
        """See `Client`."""
        with self._lock:
            code = self._store.put(name, bytes(block))
        if code:
            raise ContenderError(f"Mooncake Store: put failed with {code}")

    def get(self, name: str, room: memoryview) -> None:
        """See `Client`."""
        with self._lock:
            data = self._store.get(name)
        _fill(room, data)

    def clear(self) -> None:
        """See `Client`."""
        with self._lock:
            self._store.remove_all(True)  # noqa: FBT003 - forced; its own signature

    def close(self) -> None:
        """Leaves the master."""
        self._store.close()


def _fill(room: memoryview, data: bytes | memoryview | None) -> None:
    if data is None or len(data) != room.nbytes:
        raise ContenderError("a block did not come back whole")
    room[:] = data
