"""What a node has to do with its cluster."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from kvist.cluster.discovery.protocol import Discovery
from kvist.cluster.member import Member, Settings
from kvist.cluster.record import NodeRecord, NodeState
from kvist.cluster.view import ClusterView
from kvist.config import (
    ClusterConfig,
    Config,
    check_cluster,
    check_discovery,
    cluster_nodes,
)
from kvist.core.errors import ConfigError
from kvist.native import digest
from kvist.node.incarnation import begin_incarnation
from kvist.node.peers.credentials import read_token
from kvist.node.peers.peering import Peering
from kvist.node.place import Place

if TYPE_CHECKING:  # they need the extra `cluster`
    from kvist.node.cluster_node import ClusterNode
    from kvist.node.clustered import ClusterLoop, Duties
    from kvist.node.events import EventPorts

_SHORT = 4  # bytes


def node_cluster(
    config: Config, place: Place, peering: Peering
) -> Callable[[str], ClusterNode] | None:
    """What makes the node of this configuration join its cluster; `None` if it has none.

    It gets the address at which this node serves its blocks, or nothing where it serves none; it
    binds the ports of events, so the node's lock must be held.

    Raises:
        ConfigError: something is missing or cannot be used, a package among others.
    """
    knobs = config.node.cluster
    check_cluster(knobs, config.node.peers)
    if knobs.discovery == "none":
        return None
    try:
        from kvist.node.cluster_node import ClusterNode
    except ImportError as error:
        raise ConfigError(
            f"a package is missing: {error.name}",
            path="$.node.cluster.discovery",
            remedy="pip install 'kvist[cluster]'",
        ) from error
    secret = event_secret(config)

    def join(blocks: str) -> ClusterNode:
        return ClusterNode(peering, lambda duties: _loop(config, place, secret, blocks, duties))

    return join


def _loop(config: Config, place: Place, secret: str, blocks: str, duties: Duties) -> ClusterLoop:
    """The loop with its ports.

    Raises:
        ConfigError: the discovery cannot be used.
        TierError: its medium failed.
        OSError: an endpoint cannot be bound.
    """
    from kvist.node.clustered import ClusterLoop
    from kvist.node.events import EventLines, EventPorts

    knobs = config.node.cluster
    discovery = _discovery(knobs)
    ports = EventPorts(knobs.events, knobs.replay, secret=secret)
    record = _record(config, place, ports, blocks)
    settings = Settings(block_tokens=config.block_tokens, replicas=knobs.replicas)
    view = ClusterView(own=record.node, replicas=knobs.replicas)
    member = Member(record, settings, time.monotonic(), view=view)
    return ClusterLoop(member, ports, discovery, duties=duties, lines=EventLines(secret=secret))


def _record(config: Config, place: Place, ports: EventPorts, blocks: str) -> NodeRecord:
    knobs = config.node.cluster
    return NodeRecord(
        knobs.name or _default_name(place),
        incarnation=begin_incarnation(place.incarnation, time.time_ns()),
        version=0,
        state=NodeState.JOINING,
        domain=knobs.domain,
        events=_reachable(ports.events, knobs.host),
        replay=_reachable(ports.replay, knobs.host),
        blocks=_reachable(f"tcp://{blocks}", knobs.host).removeprefix("tcp://") if blocks else "",
    )


def _default_name(place: Place) -> str:
    """The host's name and a digest of the socket's path: two nodes of a host differ."""
    return f"{socket.gethostname()}-{digest(str(place.socket).encode())[:_SHORT].hex()}"


def _reachable(endpoint: str, host: str) -> str:
    """An endpoint as others reach it."""
    parts = urlsplit(endpoint)
    if not host or parts.scheme != "tcp":
        return endpoint
    shown = f"[{host}]" if ":" in host else host
    return urlunsplit(parts._replace(netloc=f"{shown}:{parts.port}"))


def nodes_discovery(config: Config) -> Discovery | None:
    """How somebody who is no node finds the nodes of this configuration; None if it has none.

    Raises:
        ConfigError: something is missing or cannot be used.
        TierError: its medium failed.
    """
    knobs = config.node.cluster
    if knobs.discovery == "none":
        return None
    check_discovery(knobs)
    return _discovery(knobs)


def event_secret(config: Config) -> str:
    """The secret of events, made of what the nodes share; empty if that is nothing.

    Raises:
        ConfigError: the secret cannot be read.
    """
    source, knob = config.node.cluster.secret_file, "node.cluster.secret_file"
    if not source:
        source, knob = config.node.peers.token_file, "node.peers.token_file"
    if not source:
        return ""
    from kvist.node.events import secret_of

    return secret_of(read_token(source, knob))


def _discovery(knobs: ClusterConfig) -> Discovery:
    """How nodes find each other.

    Raises:
        ConfigError: it cannot be had.
        TierError: its medium failed.
    """
    if knobs.discovery == "static":
        from kvist.cluster.discovery.static import StaticDiscovery

        return StaticDiscovery(cluster_nodes(knobs))
    if knobs.discovery == "files":
        from kvist.cluster.discovery.files import FileDiscovery

        return FileDiscovery(Path(knobs.folder).expanduser(), time.monotonic)
    try:
        if knobs.discovery == "ray":
            from kvist.cluster.discovery.ray import RayDiscovery

            return RayDiscovery(knobs.url, time.monotonic)
        from kvist.cluster.discovery.redis import RedisDiscovery
    except ImportError as error:
        raise ConfigError(
            f"a package is missing: {error.name}",
            path="$.node.cluster.discovery",
            remedy=f"pip install 'kvist[{knobs.discovery}]'",
        ) from error
    try:
        return RedisDiscovery(knobs.url)
    except ValueError as error:
        raise ConfigError(
            f"cannot be read: {error}",
            path="$.node.cluster.url",
            remedy="write redis://HOST:PORT/NUMBER",
        ) from error
