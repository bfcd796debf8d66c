"""From a URL to an adapter in its layers; each foreign library is imported when it is needed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit, urlunsplit

from kvist.adapters.files import DEFAULT_GRACE_S, FilesAdapter
from kvist.adapters.late import LateAdapter
from kvist.adapters.layers import (
    BreakerLayer,
    CountLayer,
    RetryLayer,
    ThrottleLayer,
    TimeoutLayer,
)
from kvist.adapters.protocol import StorageAdapter
from kvist.core.errors import ConfigError, UnsupportedError

KNOB = "$.store.remote.url"


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds an adapter and its layers."""

    capacity_bytes: int | None = None
    connections: int = 4
    timeout_s: float = 2.0
    retries: int = 1
    bytes_per_s: float = 0.0
    failures: int = 5
    window_s: float = 30.0
    open_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Opened:
    """An adapter in all its layers, and those that somebody asks questions."""

    adapter: StorageAdapter
    breaker: BreakerLayer
    counts: CountLayer


def open_layered(url: str, limits: Limits) -> Opened:
    """The adapter of `url`, behind a deadline, a throttle, retries, a breaker and counters.

    Raises:
        ConfigError: the URL is no place that we know, or (`UnsupportedError`) its library is not
            installed.
        TierError: the medium cannot be used.
    """
    adapter = open_adapter(url, limits)
    if limits.bytes_per_s:
        adapter = ThrottleLayer(
            adapter, bytes_per_s=limits.bytes_per_s, most_wait_s=limits.timeout_s
        )
    adapter = RetryLayer(adapter, retries=limits.retries, budget_s=2 * limits.timeout_s)
    breaker = BreakerLayer(
        adapter, failures=limits.failures, window_s=limits.window_s, open_s=limits.open_s
    )
    counts = CountLayer(breaker)
    return Opened(counts, breaker, counts)


def open_adapter(url: str, limits: Limits) -> StorageAdapter:
    """The adapter of `url`, with nothing around it but a deadline where it has none of its own.

    Raises:
        ConfigError: as `open_layered`.
        TierError: the medium cannot be used.
    """
    try:
        parts = urlsplit(url)
        opener = _OPENERS.get(parts.scheme)
        if opener is None:
            raise ConfigError(
                f"{parts.scheme or 'nothing'} is no kind of remote",
                path=KNOB,
                remedy="begin with " + ", ".join(f"{scheme}://" for scheme in sorted(_OPENERS)),
            )
        return opener(parts, limits)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(str(error), path=KNOB, remedy="see docs/remote.md") from error


def check_url(url: str) -> None:
    """Proves that `url` names a kind of remote whose library is here. Connects to nothing.

    Raises:
        ConfigError: it does not.
    """
    open_adapter(url, Limits()).close()  # every kind connects when it is first used


def library(name: str, extra: str) -> ModuleType:
    """A foreign library.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedError(
            f"needs {name}, which cannot be imported ({error})",
            path=KNOB,
            remedy=f"pip install 'kvist[{extra}]'",
        ) from error


def options(parts: SplitResult, known: frozenset[str]) -> dict[str, str]:
    """The options behind the `?` of a URL.

    Raises:
        ConfigError: one is unknown.
    """
    found = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in found:
        if name not in known:
            raise ConfigError(
                f"{parts.scheme} has no option {name}",
                path=KNOB,
                remedy="it has " + (", ".join(sorted(known)) or "none"),
            )
    return found


def _open_files(parts: SplitResult, limits: Limits) -> StorageAdapter:
    if parts.netloc not in ("", "localhost") or not parts.path.strip("/"):
        raise ConfigError("names no folder", path=KNOB, remedy="write it as file:///mnt/shared")
    found = options(parts, frozenset({"grace_s"}))
    open_it = partial(
        FilesAdapter,
        Path(unquote(parts.path)),
        capacity_bytes=limits.capacity_bytes,
        grace_s=float(found.get("grace_s", DEFAULT_GRACE_S)),
    )
    adapter = LateAdapter(open_it, name=f"files in {parts.path}")
    return TimeoutLayer(
        adapter, timeout_s=limits.timeout_s, threads=max(16, 4 * limits.connections)
    )


def _open_redis(parts: SplitResult, limits: Limits) -> StorageAdapter:
    library("redis", "redis")
    from kvist.adapters.redis import RedisAdapter

    scheme = parts.scheme.replace("valkey", "redis")
    return RedisAdapter(
        urlunsplit(parts._replace(scheme=scheme)),
        capacity_bytes=limits.capacity_bytes,
        timeout_s=limits.timeout_s,
        connections=limits.connections,
    )


def _open_s3(parts: SplitResult, limits: Limits) -> StorageAdapter:
    library("obstore", "s3")
    from kvist.adapters.s3 import S3Adapter

    found = options(parts, frozenset({"endpoint", "region"}))
    if not parts.netloc:
        raise ConfigError("names no bucket", path=KNOB, remedy="write it as s3://bucket/prefix")
    return S3Adapter(
        parts.netloc,
        prefix=unquote(parts.path).strip("/"),
        endpoint=found.get("endpoint"),
        region=found.get("region"),
        capacity_bytes=limits.capacity_bytes,
        timeout_s=limits.timeout_s,
        connections=limits.connections,
    )


def _open_mooncake(parts: SplitResult, limits: Limits) -> StorageAdapter:
    library("mooncake.store", "mooncake")
    from kvist.adapters.mooncake import MooncakeAdapter, MooncakeClient

    known = frozenset({"metadata", "hostname", "protocol", "devices", "segment", "buffer"})
    found = options(parts, known)
    if not parts.netloc or "metadata" not in found:
        raise ConfigError(
            "names no master or no metadata server",
            path=KNOB,
            remedy="write it as mooncake://HOST:50051?metadata=http://HOST:8080/metadata",
        )
    if limits.capacity_bytes is not None:
        raise ConfigError(
            "cannot be set for mooncake://",
            path="$.store.remote.capacity",
            remedy="leave it at 0: Mooncake's master evicts",
        )
    client = MooncakeClient(
        master=parts.netloc,
        metadata=found["metadata"],
        hostname=found.get("hostname", "127.0.0.1"),
        protocol=found.get("protocol", "tcp"),
        devices=found.get("devices", ""),
        segment_bytes=int(found.get("segment", 0)),
        buffer_bytes=int(found.get("buffer", 64 << 20)),
        connect_s=limits.timeout_s,
    )
    adapter = LateAdapter(partial(MooncakeAdapter, client), name=f"Mooncake at {parts.netloc}")
    return TimeoutLayer(
        adapter, timeout_s=limits.timeout_s, threads=max(16, 4 * limits.connections)
    )


_OPENERS: dict[str, Callable[[SplitResult, Limits], StorageAdapter]] = {
    "file": _open_files,
    "mooncake": _open_mooncake,
    "redis": _open_redis,
    "rediss": _open_redis,
    "redis+cluster": _open_redis,
    "rediss+cluster": _open_redis,
    "valkey": _open_redis,
    "valkeys": _open_redis,
    "s3": _open_s3,
}
