"""What a gateway has to do with other gateways."""

from __future__ import annotations

from urllib.parse import urlsplit

from kvist.config import GatewayPeersConfig
from kvist.core.errors import ConfigError
from kvist.gateway.limits import TenantLimits
from kvist.gateway.peers import Peers, TellsLoads
from kvist.node.events import is_own_host, secret_of
from kvist.node.peers.credentials import read_token

_SECTION = "$.gateway.peers"


def gateway_peers(
    wanted: GatewayPeersConfig, router: TellsLoads, limits: TenantLimits
) -> Peers | None:
    """This gateway's part among others; None if it is alone.

    Raises:
        ConfigError: an endpoint is none, or cannot be bound, or others could reach it unproven.
    """
    members, secret = members_and_secret(wanted)
    if not wanted.listen and not members:
        return None
    try:
        return Peers(
            router,
            limits,
            listen=wanted.listen,
            members=members,
            secret=secret,
            every_s=wanted.every_s,
        )
    except OSError as error:
        raise ConfigError(
            error.strerror or str(error),
            path=f"{_SECTION}.listen",
            remedy="choose another port, or end what listens there",
        ) from error


def members_and_secret(wanted: GatewayPeersConfig) -> tuple[list[str], str]:
    """Where the others tell, and what their words are sealed with; empty: in the clear.

    Raises:
        ConfigError: an endpoint is none, or others could reach it unproven, or a file cannot be
            used.
    """
    listed = wanted.members.split(",") if isinstance(wanted.members, str) else wanted.members
    members = [text.strip() for text in listed if text.strip()]
    for knob, endpoint in (("listen", wanted.listen), *(("members", m) for m in members)):
        if endpoint:
            _check(endpoint, knob, sealed=bool(wanted.secret_file))
    if not wanted.secret_file:
        return members, ""
    return members, secret_of(read_token(wanted.secret_file, "gateway.peers.secret_file"))


def _check(endpoint: str, knob: str, *, sealed: bool) -> None:
    """Raises `ConfigError` for what is no endpoint, or can be reached by others unproven."""
    path = f"{_SECTION}.{knob}"
    if not _is_endpoint(endpoint):
        raise ConfigError(f"{endpoint!r} is no endpoint", path=path, remedy="write tcp://HOST:PORT")
    if not sealed and not is_own_host(endpoint):
        raise ConfigError(
            f"{endpoint} can be reached by others",
            path=path,
            remedy="set gateway.peers.secret_file, or use 127.0.0.1",
        )


def _is_endpoint(text: str) -> bool:
    try:
        parts = urlsplit(text)
        is_tcp = parts.scheme == "tcp" and bool(parts.hostname) and parts.port is not None
    except ValueError:  # it is no URL, or no port has such a number
        return False
    return is_tcp or parts.scheme == "ipc"
