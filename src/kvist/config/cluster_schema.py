"""The knobs of a node that is in a cluster, and what cannot be meant by them."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from kvist.config.peers_schema import PeersConfig, is_loopback, peer_address
from kvist.config.store_schema import Section
from kvist.core.errors import ConfigError

_NAME = re.compile(r"[^@\s/]{0,128}")
_NEEDED = {"files": "folder", "redis": "url", "static": "nodes", "ray": "url"}


class ClusterConfig(Section, frozen=True):
    """The cluster of this node: nodes that tell each other what they hold."""

    discovery: Annotated[
        Literal["none", "files", "redis", "static", "ray"],
        Meta(
            description="How nodes find each other. `none`: this node is in no cluster. `files`: "
            "by `folder`, which they share. `redis`: by the server at `url`. `static`: by the list "
            "`nodes`. `ray`: by the Ray head at `url`. Needs `pip install 'kvist[cluster]'`."
        ),
    ] = "none"
    folder: Annotated[
        str,
        Meta(description="Folder on a mount that all nodes share, for `discovery=files`."),
    ] = ""
    url: Annotated[
        str,
        Meta(
            description="Redis or Valkey server, such as `redis://HOST:6379/0`, or HOST:PORT/NAME "
            "of a Ray head and of a cluster on it, which has any name."
        ),
    ] = ""
    nodes: Annotated[
        str | tuple[str, ...],
        Meta(
            description="NAME=tcp://HOST:PORT?replay=tcp://HOST:PORT of the other nodes, for "
            "`discovery=static`: a list, or one text with commas. vLLM engines that publish KV "
            "events may be among them."
        ),
    ] = ""
    name: Annotated[
        str,
        Meta(
            description="What this node is called in the cluster, the same after each start; no "
            "two nodes may have one name. Empty: the host's name and a digest of `node.socket`."
        ),
    ] = ""
    host: Annotated[
        str,
        Meta(
            description="Name or number by which other hosts reach this one. Empty: the one that "
            "`events`, `replay` and `node.peers.listen` name."
        ),
    ] = ""
    events: Annotated[
        str,
        Meta(
            description="Where the node publishes what it stores and removes, as vLLM does. Port "
            "0: one that is free. An endpoint that others can reach needs a secret."
        ),
    ] = "tcp://127.0.0.1:0"
    replay: Annotated[
        str, Meta(description="Where it answers who has missed something of that.")
    ] = "tcp://127.0.0.1:0"
    secret_file: Annotated[
        str,
        Meta(
            description="File with a secret of 32 characters or more, the same on every node, of "
            "mode 0600, or `env:NAME`: events are sealed with it, and nobody hears them without. "
            "Empty: `node.peers.token_file`, where there is one."
        ),
    ] = ""
    replicas: Annotated[
        int,
        Meta(
            ge=1,
            le=8,
            description="Copies of a block that there should be, each in another failure domain, "
            "where there is room. 1: blocks are copied by being read only.",
        ),
    ] = 2
    domain: Annotated[
        str,
        Meta(description="What fails together with this node, such as a rack. Empty: itself."),
    ] = ""
    drain_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds that `kvist node drain` gives the other nodes to take what only "
            "this one holds.",
        ),
    ] = 60.0
    drain_on_stop_s: Annotated[
        float,
        Meta(
            ge=0,
            description="The same for a node that gets SIGTERM or SIGINT, unless no other node "
            "takes anything; a second signal ends it at once. 0: it gives nothing away.",
        ),
    ] = 10.0


def cluster_nodes(cluster: ClusterConfig) -> tuple[str, ...]:
    """The entries of `nodes`."""
    texts = cluster.nodes.split(",") if isinstance(cluster.nodes, str) else cluster.nodes
    return tuple(text.strip() for text in texts if text.strip())


def check_discovery(cluster: ClusterConfig) -> None:
    """Whether discovery has what it needs.

    Raises:
        ConfigError: it has not.
    """
    needed = _NEEDED.get(cluster.discovery)
    if needed is not None and not getattr(cluster, needed):
        raise ConfigError(
            f"discovery by {cluster.discovery} needs it",
            path=f"$.node.cluster.{needed}",
            remedy=f"set node.cluster.{needed}",
        )


def check_cluster(cluster: ClusterConfig, peers: PeersConfig) -> None:
    """What can be said without reading a file or binding a port.

    Raises:
        ConfigError: something is missing, or could not work.
    """
    if cluster.discovery == "none":
        return
    check_discovery(cluster)
    if not _NAME.fullmatch(cluster.name):
        raise ConfigError(
            f"{cluster.name!r} is no name of a node",
            path="$.node.cluster.name",
            remedy="use up to 128 characters without spaces, @ and /",
        )
    if peers.members:
        raise ConfigError(
            "the nodes of a cluster find each other",
            path="$.node.peers.members",
            remedy="set node.cluster.discovery=none, or no members",
        )
    listens = peer_address(peers.listen, "listen")[0] if peers.listen else "localhost"
    if not cluster.host:
        _check_reachable(listens, "$.node.peers.listen")
    for knob in ("events", "replay"):
        _check_endpoint(cluster, peers, knob, far=not is_loopback(cluster.host or listens))


def _check_endpoint(cluster: ClusterConfig, peers: PeersConfig, knob: str, *, far: bool) -> None:
    """`far`: whether nodes of other hosts are to reach this one.

    Raises:
        ConfigError: nobody could connect, or others could unproven.
    """
    path, endpoint = f"$.node.cluster.{knob}", str(getattr(cluster, knob))
    no_endpoint = ConfigError(
        f"{endpoint!r} is no endpoint", path=path, remedy="write tcp://HOST:PORT"
    )
    try:
        parts = urlsplit(endpoint)
        port = parts.port
    except ValueError as error:
        raise no_endpoint from error
    if parts.scheme == "ipc":
        return
    if parts.scheme != "tcp" or not parts.hostname or port is None:
        raise no_endpoint
    if not cluster.host:
        _check_reachable(parts.hostname, path)
    if far and is_loopback(parts.hostname):
        raise ConfigError(
            f"other hosts cannot connect to {endpoint}, though they may to this node's blocks",
            path=path,
            remedy="write tcp://HOST:0 with an address that others can reach",
        )
    if not is_loopback(parts.hostname) and not (cluster.secret_file or peers.token_file):
        raise ConfigError(
            f"{endpoint} can be reached by others",
            path=path,
            remedy="set node.cluster.secret_file or node.peers.token_file, or use 127.0.0.1",
        )


def _check_reachable(host: str, path: str) -> None:
    """Raises `ConfigError` for what stands for every address of a host: others need one."""
    try:
        wild = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        wild = host == "*"
    if wild:
        raise ConfigError(
            f"other hosts cannot connect to {host}",
            path=path,
            remedy="set node.cluster.host to this host's name or number",
        )
