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

_SECTION = "$.gateway"
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
    """The replicas that answer, each URL once.

    Raises:
        ConfigError: there is none, or one is no URL, or says what nobody knows.
    """
    entries = _entries(wanted.replicas, "replicas")
    if not entries:
        raise ConfigError(
            "there is nobody to serve requests",
            path=f"{_SECTION}.replicas",
            remedy="name engines: kvist gateway http://127.0.0.1:8001 http://127.0.0.1:8002",
        )
    return entries


def prefill_entries(wanted: GatewayConfig) -> tuple[Entry, ...]:
    """The engines that only compute prompts; none where there are no pools.

    Raises:
        ConfigError: one is no URL, or says what nobody knows, or answers requests, too.
    """
    knob = "disaggregation.prefill"
    entries = _entries(wanted.disaggregation.prefill, knob)
    both = {entry.url for entry in entries} & {entry.url for entry in replica_entries(wanted)}
    if both:
        raise ConfigError(
            f"{min(both)} is among gateway.replicas, too",
            path=f"{_SECTION}.{knob}",
            remedy="name an engine once: it computes prompts for others, or it answers",
        )
    return entries


def _entries(listed: str | tuple[str, ...], knob: str) -> tuple[Entry, ...]:
    texts = listed.split(",") if isinstance(listed, str) else listed
    found = (_entry(text, f"{_SECTION}.{knob}") for text in texts if text.strip())
    return tuple({entry.url: entry for entry in found}.values())


def _entry(text: str, path: str) -> Entry:
    address, _, query = text.strip().partition("?")
    url = address.rstrip("/")
    parts = _split(url)
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"{text.strip()!r} is no URL of an engine",
            path=path,
            remedy="write http://127.0.0.1:8001",
        )
    options = dict(parse_qsl(query, keep_blank_values=True))
    named = [options[name] for name in ("events", "replay") if options.get(name)]
    if not options.keys() <= _OPTIONS or not all(_is_endpoint(text) for text in named):
        raise ConfigError(
            f"{text.strip()!r} says what nobody knows",
            path=path,
            remedy="write http://HOST:8001?events=tcp://HOST:5557&replay=tcp://HOST:5558&node=NAME",
        )
    events, replay = options.get("events"), options.get("replay", "")
    if events is None:
        events, replay = _derived(parts)
    # A publisher's name has no slash, and no node is called after an address.
    engine = address.partition("//")[2].rstrip("/").replace("/", "|")
    return Entry(url, events, replay, Home(engine, parts.hostname or "", options.get("node", "")))


def _is_endpoint(text: str) -> bool:
    parts = _split(text)
    return parts is not None and parts.scheme in _SCHEMES


def _split(url: str) -> SplitResult | None:
    """Its parts; None where it is no URL, or its port none."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # is read, and may be refused, when it is first asked for
    except ValueError:
        return None
    return parts


def _derived(parts: SplitResult) -> tuple[str, str]:
    """Where `kvist serve` on this host publishes; nothing for other hosts."""
    host = parts.hostname or ""
    try:
        is_here = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_here = host == "localhost"
    return engine_endpoints(parts.port or 80) if is_here else ("", "")
