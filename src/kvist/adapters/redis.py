"""Objects as values of a Redis or Valkey server, or of a cluster of them (extra `redis`).

A value is stored with `SET … NX`, in a pipeline a batch; an object that is there already is asked
for first, so that its bytes are not sent again. Without a capacity the server's own `maxmemory` and
`maxmemory-policy` decide what goes (`allkeys-lru` suits). With one, a script keeps an index beside
the objects and drops those written first; it names keys that it finds there, which a cluster does
not allow, so a cluster takes no capacity.

    kvist/NAME          the object
    kvist-order         names by the order of their writes
    kvist-sizes         name → bytes
    kvist-used          bytes in all;  kvist-writes  counts writes
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.exceptions import OutOfMemoryError, RedisClusterException, RedisError
from redis.retry import Retry

from kvist.adapters.protocol import (
    Fetched,
    Got,
    Listed,
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
from kvist.adapters.redis_wire import Word, wire
from kvist.core.errors import ConfigError, TierError, TierFullError, TierTimeout

_CLUSTERS = {"redis+cluster://": "redis://", "rediss+cluster://": "rediss://"}
_SPACE = "kvist/"
_INDEX = ("kvist-order", "kvist-sizes", "kvist-used", "kvist-writes")
_PUT = """
if redis.call('EXISTS', KEYS[1]) == 1 then return {0} end
local gone, need, cap = {}, #ARGV[2], tonumber(ARGV[3])
local used = tonumber(redis.call('GET', KEYS[4]) or '0')
while used + need > cap do
  local oldest = redis.call('ZPOPMIN', KEYS[2])
  if #oldest == 0 then used = 0 break end
  redis.call('DEL', ARGV[4] .. oldest[1])
  used = used - tonumber(redis.call('HGET', KEYS[3], oldest[1]) or '0')
  redis.call('HDEL', KEYS[3], oldest[1])
  gone[#gone + 1] = oldest[1]
end
redis.call('SET', KEYS[1], ARGV[2])
redis.call('ZADD', KEYS[2], redis.call('INCR', KEYS[5]), ARGV[1])
redis.call('HSET', KEYS[3], ARGV[1], need)
redis.call('SET', KEYS[4], string.format('%d', used + need))
return {1, gone}
"""
_DELETE = """
for _, name in ipairs(ARGV) do
  local size = redis.call('HGET', KEYS[2], name)
  if size then redis.call('DECRBY', KEYS[3], size) end
  redis.call('ZREM', KEYS[1], name)
  redis.call('HDEL', KEYS[2], name)
end
return 0
"""


class RedisAdapter:
    """A `StorageAdapter` over a server's values."""

    def __init__(
        self,
        url: str,
        *,
        capacity_bytes: int | None = None,
        timeout_s: float = 2.0,
        connections: int = 4,
    ) -> None:
        """Connects when it is first needed.

        Args:
            url: `redis://`, `rediss://` (TLS), `unix://`, or `redis+cluster://` and
                `rediss+cluster://`; the rest as redis-py takes it.
            capacity_bytes: what the objects may take together, the server's overhead aside.
            timeout_s: of connecting, and of each time that the server is waited for.
            connections: calls that may be under way at once.

        Raises:
            ConfigError: a cluster was given a capacity.
            ValueError: the URL cannot be read.
        """
        self._cluster = url.startswith(tuple(_CLUSTERS))
        if self._cluster and capacity_bytes is not None:
            raise ConfigError("a Redis cluster keeps no capacity of ours; set its maxmemory")
        self._capacity_bytes = capacity_bytes
        self._timeout_s = timeout_s
        self._client = _connect(url, timeout_s, connections)
        self._state = OpenState("Redis")
        if capacity_bytes is not None:
            self._put_script = self._client.register_script(_PUT)
            self._delete_script = self._client.register_script(_DELETE)

    def get(self, wanted: Sequence[Wanted]) -> list[Fetched]:
        self._state.demand()
        check_names(w.name for w in wanted)
        if not wanted:
            return []
        if not self._cluster and all(w.into for w in wanted):
            with _mapping("get"), wire(self._client.connection_pool, self._timeout_s) as line:
                line.send([((b"GET",), _word(w.name)) for w in wanted])
                return [line.read_value(w) for w in wanted]
        with _mapping("get"), self._client.pipeline(transaction=False) as pipe:
            for w in wanted:
                if w.into:
                    pipe.get(_SPACE + w.name)
                else:  # two: a value may be empty
                    pipe.exists(_SPACE + w.name)
                    pipe.strlen(_SPACE + w.name)
            values = iter(pipe.execute())
        return [_answer(values, w) for w in wanted]

    def put(self, objects: Sequence[NewObject]) -> PutReport:
        self._state.demand()
        check_names(o.name for o in objects)
        if not objects:
            return PutReport(())
        with _mapping("put"):
            there = self._present([o.name for o in objects])
            if self._capacity_bytes is not None:
                return self._put_indexed(objects, there)
            absent = [o for o in objects if o.name not in there]
            done = self._set(absent) if absent else set()
        return PutReport(tuple(_first(o.name, done) for o in objects))

    def delete(self, names: Sequence[str]) -> None:
        self._state.demand()
        check_names(names)
        if not names:
            return
        with _mapping("delete"):
            if self._capacity_bytes is not None:
                self._delete_script(keys=_INDEX[:3], args=names)
            with self._client.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.unlink(_SPACE + name)
                pipe.execute()

    def list_page(self, prefix: str, *, cursor: str | None = None, limit: int = 1000) -> Page:
        self._state.demand()
        check_prefix(prefix)
        nodes = self._nodes()
        node, _, place = (cursor or "0:0").partition(":")
        kind: dict[str, Any] = {"match": f"{_SPACE}{prefix}*", "count": limit}
        with _mapping("list"):
            if self._cluster:
                kind["target_nodes"] = nodes[int(node)]
            next_place, keys = self._client.scan(cursor=int(place), **kind)
        if isinstance(next_place, dict):  # a cluster answers for each node
            next_place = next(iter(next_place.values()))
        entries = tuple(Listed(key.decode()[len(_SPACE) :]) for key in keys)
        if next_place:
            return Page(entries, f"{node}:{next_place}")
        following = int(node) + 1
        return Page(entries, f"{following}:0" if following < len(nodes) else None)

    def close(self) -> None:
        if not self._state.closed:
            self._state.closed = True
            if not self._cluster:
                self._client.connection_pool.disconnect()  # a pool that was handed over stays
            self._client.close()

    def _nodes(self) -> list[Any]:
        if not self._cluster:
            return [None]
        with _mapping("list"):
            return sorted(self._client.get_primaries(), key=lambda node: str(node.name))

    def _present(self, names: Sequence[str]) -> set[str]:
        with self._client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.exists(_SPACE + name)
            return {name for name, there in zip(names, pipe.execute(), strict=True) if there}

    def _set(self, absent: Sequence[NewObject]) -> set[str]:
        """Stores objects under their names where those are free; returns which were."""
        if self._cluster:
            with self._client.pipeline(transaction=False) as pipe:
                for new in absent:
                    pipe.set(_SPACE + new.name, b"".join(new.parts), nx=True)
                stored = [Put.STORED if ok else Put.PRESENT for ok in pipe.execute()]
        else:
            with wire(self._client.connection_pool, self._timeout_s) as line:
                line.send([((b"SET",), _word(o.name), _flat(o), (b"NX",)) for o in absent])
                stored = [line.read_stored() for _ in absent]
        return {o.name for o, put in zip(absent, stored, strict=True) if put is Put.STORED}

    def _put_indexed(self, objects: Sequence[NewObject], there: set[str]) -> PutReport:
        outcomes: list[Put] = []
        evicted: list[str] = []
        for new in objects:
            if new.name in there:
                outcomes.append(Put.PRESENT)
                continue
            if new.size_bytes > (self._capacity_bytes or 0):
                text = f"{new.size_bytes} bytes exceed the cap of {self._capacity_bytes}"
                raise TierFullError(errno.ENOSPC, text)
            stored, *gone = self._put_script(
                keys=[_SPACE + new.name, *_INDEX],
                args=[new.name, b"".join(new.parts), self._capacity_bytes, _SPACE],
            )
            outcomes.append(Put.STORED if stored else Put.PRESENT)
            evicted += [name.decode() for name in (gone[0] if gone else ())]
        return PutReport(tuple(outcomes), tuple(evicted))


def _connect(url: str, timeout_s: float, connections: int) -> Any:
    never = Retry(NoBackoff(), 0)  # the retry layer does that
    kind: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "decode_responses": False,
        "protocol": 2,
    }
    for scheme, of_one in _CLUSTERS.items():
        if url.startswith(scheme):
            return _LateCluster(of_one + url.removeprefix(scheme), kind)
    pool = redis.BlockingConnectionPool.from_url(
        url, max_connections=2 * connections + 2, timeout=timeout_s, retry=never, **kind
    )
    return redis.Redis(connection_pool=pool)


class _LateCluster:
    """A cluster's client asks the cluster for its nodes when it is made: so that comes late."""

    def __init__(self, url: str, kind: dict[str, Any]) -> None:
        self._url = url
        self._kind = kind
        self._made: Any = None
        self._lock = Lock()

    def __getattr__(self, name: str) -> Any:
        with self._lock:
            if self._made is None:
                self._made = RedisCluster.from_url(self._url, **self._kind)
            return getattr(self._made, name)

    def close(self) -> None:
        if self._made is not None:
            self._made.close()


def _word(name: str) -> Word:
    return ((_SPACE + name).encode(),)


def _flat(new: NewObject) -> Word:
    return [part.cast("B") for part in new.parts]


def _answer(values: Iterator[Any], wanted: Wanted) -> Fetched:
    """The answer to `wanted`, from the next one or two values."""
    if not wanted.into:
        there, size_bytes = next(values), next(values)
        return Fetched(Got.HIT, size_bytes) if there else Fetched(Got.ABSENT)
    value = next(values)
    return answer(None if value is None else memoryview(value), wanted)


def _first(name: str, done: set[str]) -> Put:
    """`STORED` for the first of a name that was stored, `PRESENT` for all others."""
    if name in done:
        done.remove(name)
        return Put.STORED
    return Put.PRESENT


@contextmanager
def _mapping(doing: str) -> Iterator[None]:
    """Maps what redis-py raises."""
    try:
        yield
    except redis.exceptions.TimeoutError as error:
        raise TierTimeout(errno.ETIMEDOUT, f"redis {doing}: {error}") from error
    except OutOfMemoryError as error:
        raise TierFullError(errno.ENOSPC, f"redis {doing}: {error}") from error
    except (RedisError, RedisClusterException) as error:  # the second is none of the first
        raise TierError(errno.EIO, f"redis {doing}: {error}") from error
