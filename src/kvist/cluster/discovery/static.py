"""Discovery by a list in the configuration: addresses only, nothing is announced.

What the listed nodes are and whether they live, they say themselves in their event batches. A stock
engine says nothing of itself, so it is a member as long as it is listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import parse_qsl, urlsplit

import msgspec

from kvist.cluster.record import NodeRecord, NodeState
from kvist.core.errors import ConfigError

_KNOWN = frozenset({"replay", "domain"})


class StaticDiscovery:
    """A `Discovery` that lists what it was given, and announces to nobody."""

    def __init__(self, entries: Sequence[str]) -> None:
        """From entries such as `NAME=tcp://HOST:5557?replay=tcp://HOST:5558&domain=rack-1`.

        Raises:
            ConfigError: an entry that says no such thing, or a name that stands twice.
        """
        records = [_entry(text) for text in entries]
        names = [record.node for record in records]
        if len(set(names)) < len(names):
            raise ConfigError("a node is listed twice", remedy="give each a name of its own")
        self._records = sorted(records, key=lambda record: record.node)

    def announce(self, record: NodeRecord, *, ttl_s: float) -> None:
        return

    def withdraw(self, node: str) -> None:
        return

    def members(self) -> list[NodeRecord]:
        return list(self._records)

    def close(self) -> None:
        return


def _entry(text: str) -> NodeRecord:
    name, _, place = text.partition("=")
    no_publisher = ConfigError(
        f"{text!r} names no publisher",
        remedy="write NAME=tcp://HOST:PORT?replay=tcp://HOST:PORT&domain=NAME",
    )
    try:
        parts = urlsplit(place)
    except ValueError as error:
        raise no_publisher from error
    options = dict(parse_qsl(parts.query))
    if parts.scheme not in ("tcp", "ipc") or not options.keys() <= _KNOWN:
        raise no_publisher
    record = NodeRecord(
        name,
        incarnation=0,
        version=0,
        state=NodeState.ACTIVE,
        domain=options.get("domain", ""),
        events=place.partition("?")[0],
        replay=options.get("replay", ""),
    )
    try:
        return msgspec.convert(msgspec.to_builtins(record), NodeRecord)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{text!r}: {error}") from error
