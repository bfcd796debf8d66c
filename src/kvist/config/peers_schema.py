"""The knobs of nodes that read each other's blocks, and what cannot be meant by them."""

from __future__ import annotations

import importlib.util
import ipaddress
from typing import Annotated, Literal

from msgspec import Meta

from kvist.config.store_schema import Section
from kvist.core.errors import ConfigError

_MOST_PORT = 65_535


class PeersConfig(Section, frozen=True):
    """Nodes of other hosts, whose blocks this one reads and which read its own."""

    listen: Annotated[
        str,
        Meta(
            description="HOST:PORT on which the node serves its blocks to other nodes. Empty: to "
            "none. An address that others can reach needs a token or TLS."
        ),
    ] = ""
    members: Annotated[
        str | tuple[str, ...],
        Meta(
            description="HOST:PORT of the nodes that this one reads from: a list, or one text "
            "with commas. The node itself may be among them, so that all can have the same list."
        ),
    ] = ""
    token_file: Annotated[
        str,
        Meta(
            description="File with a secret of 32 characters or more, the same on every node, of "
            "mode 0600, or `env:NAME` for an environment variable. Nodes prove to each other that "
            "they know it; it is never sent."
        ),
    ] = ""
    tls_cert: Annotated[
        str,
        Meta(
            description="This node's certificate (PEM), with the name or number by which "
            "others reach it: with `tls_key` and `tls_ca`, nodes speak TLS 1.3 and both sides show "
            "certificates."
        ),
    ] = ""
    tls_key: Annotated[str, Meta(description="The private key of `tls_cert` (PEM).")] = ""
    tls_ca: Annotated[
        str,
        Meta(
            description="The CA that signed every node's certificate (PEM). Whoever it signs for "
            "is a node: it should sign for nothing else."
        ),
    ] = ""
    transport: Annotated[
        Literal["tcp", "nixl"],
        Meta(
            description="How the bytes of blocks travel. `nixl`: by NIXL's one-sided reads, over "
            "RDMA where UCX finds it, to and from nodes that have it too, by TCP to and from "
            "others. Needs `kvist[nixl]`, and a network where nobody else can reach this host: "
            "UCX proves nothing and hides nothing."
        ),
    ] = "tcp"
    streams: Annotated[
        int,
        Meta(ge=1, le=32, description="Connections to each peer that bring blocks at once."),
    ] = 2
    timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            le=30,
            description="Seconds after which a block that a peer does not bring is a miss. The "
            "peer is then left alone for a while.",
        ),
    ] = 2.0
    probe_s: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Seconds that a look-up of a prompt may wait to hear whether peers have "
            "blocks that this node does not know of. 0: never; the next look-up then knows.",
        ),
    ] = 0.005
    retry_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds until a peer that failed is asked again; up to ten times as long "
            "while it keeps failing.",
        ),
    ] = 1.0
    index: Annotated[
        int, Meta(ge=1, description="Blocks of each peer that this node remembers, the newest.")
    ] = 250_000


def peer_address(text: str, knob: str) -> tuple[str, int]:
    """Host and port of HOST:PORT; an IPv6 number stands in brackets.

    Raises:
        ConfigError: it is neither.
    """
    host, colon, port = text.strip().rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    numbered = port.isdecimal() and int(port) <= _MOST_PORT
    if not (colon and bare and numbered) or (":" in bare and bare == host):
        raise ConfigError(
            f"{text!r} is not HOST:PORT",
            path=f"$.node.peers.{knob}",
            remedy="write 10.0.0.2:7077 or [fd00::2]:7077",
        )
    return bare, int(port)


def peer_members(peers: PeersConfig) -> tuple[tuple[str, int], ...]:
    """Host and port of every member.

    Raises:
        ConfigError: one is not HOST:PORT.
    """
    texts = peers.members.split(",") if isinstance(peers.members, str) else peers.members
    return tuple(peer_address(text, "members") for text in texts if text.strip())


def check_peers(peers: PeersConfig) -> None:
    """What can be said without reading a file.

    Raises:
        ConfigError: an address is none, or one beyond this host is to be used unproven.
    """
    reached = [("listen", peer_address(peers.listen, "listen"))] if peers.listen else []
    reached += [("members", member) for member in peer_members(peers)]
    tls = (peers.tls_cert, peers.tls_key, peers.tls_ca)
    if any(tls) and not all(tls):
        raise ConfigError(
            "TLS needs a certificate, its key and a CA",
            path="$.node.peers.tls_cert",
            remedy="set node.peers.tls_cert, tls_key and tls_ca, or none of them",
        )
    if any(tls) and peers.transport == "nixl":
        raise ConfigError(
            "blocks that travel by NIXL are not sealed by TLS",
            path="$.node.peers.transport",
            remedy="use node.peers.token_file in place of TLS, or transport tcp",
        )
    if any(tls) or peers.token_file:
        return
    for knob, (host, port) in reached:
        if not is_loopback(host):
            raise ConfigError(
                f"{host}:{port} is not of this host alone, and nodes would believe anybody there",
                path=f"$.node.peers.{knob}",
                remedy="set node.peers.token_file or node.peers.tls_cert, or use 127.0.0.1",
            )


def check_transport(peers: PeersConfig) -> None:
    """Whether this host has what carries blocks.

    Raises:
        ConfigError: a package is missing.
    """
    kind = peers.transport
    if kind != "tcp" and importlib.util.find_spec(kind) is None:
        raise ConfigError(
            f"the package {kind} is missing",
            path="$.node.peers.transport",
            remedy=f"pip install 'kvist[{kind}]'",
        )


def is_loopback(host: str) -> bool:
    """Whether a host's name or number is this host's, for itself alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
