"""What a node has to do with other nodes."""

from __future__ import annotations

from pathlib import Path

from kvist.config import Config, check_peers, check_transport, peer_address, peer_members
from kvist.node.peers.carrying.transport import Carrying
from kvist.node.peers.credentials import Credentials, read_token, tls_contexts
from kvist.node.peers.peering import Address, Peering


def node_peering(config: Config) -> Peering:
    """How the node of this configuration serves others and reads from them.

    Raises:
        ConfigError: an address is none, or a token, certificate or package is missing or cannot
            be used.
    """
    knobs = config.node.peers
    check_peers(knobs)
    check_transport(knobs)
    token = b""
    if knobs.token_file:
        token = read_token(knobs.token_file, "node.peers.token_file")
    to_others = from_others = None
    if knobs.tls_cert:
        files = (knobs.tls_cert, knobs.tls_key, knobs.tls_ca)
        to_others, from_others = tls_contexts(*(Path(path).expanduser() for path in files))
    return Peering(
        Credentials(token, to_others, from_others),
        Address(*peer_address(knobs.listen, "listen")) if knobs.listen else None,
        tuple(Address(*member) for member in peer_members(knobs)),
        streams=knobs.streams,
        timeout_s=knobs.timeout_s,
        probe_s=knobs.probe_s,
        retry_s=knobs.retry_s,
        index_blocks=knobs.index,
        carrying=None if knobs.transport == "tcp" else Carrying(knobs.transport),
    )
