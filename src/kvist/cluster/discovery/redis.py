"""Discovery by a Redis or Valkey server (extra `redis`): one key a node, with the server's TTL.

kvist-node/NODE    the record, as JSON
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from kvist.cluster.record import NodeRecord, decode_record, encode_record
from kvist.core.errors import FormatError, TierError, TierTimeout

_SPACE = "kvist-node/"
_MOST_KEYS = 4096
_PAGE_KEYS = 512


class RedisDiscovery:
    """A `Discovery` over a server's keys. Each call ends within `timeout_s` a round trip."""

    def __init__(self, url: str, *, timeout_s: float = 2.0) -> None:
        """Connects when it is first needed. `url`: as redis-py takes it.

        Raises:
            ValueError: the URL cannot be read.
        """
        self._client = redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 1),
        )
        self.unreadable = 0

    def announce(self, record: NodeRecord, *, ttl_s: float) -> None:
        with _mapped("announce"):
            life_ms = max(1, round(ttl_s * 1000))
            self._client.set(f"{_SPACE}{record.node}", encode_record(record), px=life_ms)

    def withdraw(self, node: str) -> None:
        with _mapped("withdraw"):
            self._client.delete(f"{_SPACE}{node}")

    def members(self) -> list[NodeRecord]:
        with _mapped("list"):
            names = set[bytes]()
            for name in self._client.scan_iter(match=f"{_SPACE}*", count=_PAGE_KEYS):
                names.add(name if isinstance(name, bytes) else name.encode())
                if len(names) >= _MOST_KEYS:
                    break
            ordered = sorted(names)
            values = self._client.mget(ordered) if ordered else []
        found = []
        for name, value in zip(ordered, values, strict=True):
            if value is None:
                continue  # over since it was listed
            try:
                record = decode_record(value if isinstance(value, bytes) else value.encode())
            except FormatError:
                self.unreadable += 1
                continue
            if f"{_SPACE}{record.node}".encode() == name:
                found.append(record)
        return found

    def close(self) -> None:
        self._client.close()


@contextmanager
def _mapped(what: str) -> Iterator[None]:
    try:
        yield
    except redis.exceptions.TimeoutError as error:
        raise TierTimeout(f"discovery by Redis cannot {what}: {error}") from error
    except (RedisError, OSError) as error:
        raise TierError(f"discovery by Redis cannot {what}: {error}") from error
