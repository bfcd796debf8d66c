"""The replicas of a gateway, as the configuration names them."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qsl, urlsplit

from kvist.cluster.record import NodeRecord, NodeState
from kvist.config import GatewayConfig
from kvist.core.errors import ConfigError
from kvist.gateway.hearing import Home
from kvist.node.place import engine_endpoints

_KNOB = "$.gateway.replicas"
_OPTIONS = frozenset({"events", "replay", "node"})
_SCHEMES = ("tcp", "ipc")


@dataclass(frozen=True, slots=True)
class Entry:
    """One replica.

    Attributes:
        url: of its API, without a slash at its end.
        events: where its engine publishes KV events; empty: nowhere that is known.
        replay: where it replays them.
        home: its names.
    """

    url: str
    events: str
    replay: str
    home: Home

    @property
    def record(self) -> NodeRecord:
        """Its engine as a publisher."""
        return NodeRecord(
            self.home.engine,
            incarnation=0,
            version=0,
            state=NodeState.ACTIVE,
            events=self.events,
            replay=self.replay,
        )


def replica_entries(wanted: GatewayConfig) -> tuple[Entry, ...]:
    """The replicas, each URL once.

    Raises:
        ConfigError: there is none, or one is no URL, or says what nobody knows.
    """
    listed = wanted.replicas
    texts = listed.split(",") if isinstance(listed, str) else listed
    entries = {entry.url: entry for text in texts if text.strip() for entry in [_entry(text)]}
    if not entries:
        raise ConfigError(
            "there is nobody to serve requests",
            path=_KNOB,
            remedy="name engines: kvist gateway http://127.0.0.1:8001 http://127.0.0.1:8002",
        )
    return tuple(entries.values())


def _entry(text: str) -> Entry:
    address, _, query = text.strip().partition("?")
    url = address.rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"{text.strip()!r} is no URL of an engine",
            path=_KNOB,
            remedy="write http://127.0.0.1:8001",
        )
    options = dict(parse_qsl(query, keep_blank_values=True))
    named = [options[name] for name in ("events", "replay") if options.get(name)]
    if not options.keys() <= _OPTIONS or any(urlsplit(e).scheme not in _SCHEMES for e in named):
        raise ConfigError(
            f"{text.strip()!r} says what nobody knows",
            path=_KNOB,
            remedy="write http://HOST:8001?events=tcp://HOST:5557&replay=tcp://HOST:5558&node=NAME",
        )
    events, replay = options.get("events"), options.get("replay", "")
    if events is None:
        events, replay = _derived(parts)
    # A publisher's name has no slash, and no node is called after an address.
    engine = address.partition("//")[2].rstrip("/").replace("/", "|")
    return Entry(url, events, replay, Home(engine, parts.hostname or "", options.get("node", "")))


def _derived(parts: SplitResult) -> tuple[str, str]:
    """Where `kvist serve` on this host publishes; nothing for other hosts."""
    host = parts.hostname or ""
    try:
        is_here = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_here = host == "localhost"
    return engine_endpoints(parts.port or 80) if is_here else ("", "")
