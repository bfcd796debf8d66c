"""What one node has to do with others: serves its blocks to them, reads theirs."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvist.node.keyspaces import Attach
from kvist.node.peers.credentials import Credentials
from kvist.node.peers.handshake import greet
from kvist.node.peers.member import Member
from kvist.node.peers.messages import NODE_BYTES
from kvist.node.peers.server import OpenStore, PeerServer, listen, shown
from kvist.node.peers.tier import PeerTier
from kvist.node.peers.wire import Wire, connect
from kvist.store.breaker import Breaker
from kvist.tiers.remote.knowledge import Knowledge

CONNECT_S = 1.0
_ABSENT_S = 2.0  # a block that a peer has not is not asked for again so long
_MOST_RETRY = 10.0  # times the first pause


@dataclass(frozen=True, slots=True)
class Address:
    """A host's name or number, and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return shown((self.host, self.port))


@dataclass(frozen=True, slots=True)
class Peering:
    """Everything that is set. `node` is how this process recognises itself among the members."""

    credentials: Credentials
    listen: Address | None
    members: tuple[Address, ...]
    streams: int
    timeout_s: float
    probe_s: float
    retry_s: float
    index_blocks: int
    node: bytes = field(default_factory=lambda: os.urandom(NODE_BYTES))

    def serve(self, find: Callable[[bytes], OpenStore | None]) -> PeerServer | None:
        """Serves the open stores to others, if that is asked for.

        Raises:
            OSError: the address cannot be had.
        """
        if self.listen is None:
            return None
        listener = listen(self.listen.host, self.listen.port)
        return PeerServer(listener, find, self.credentials, node=self.node)

    def lender(self, attach: Attach) -> PeerTier | None:
        """What others have of a keyspace, if there are others."""
        if not self.members:
            return None
        members = [self._member(address, attach) for address in self.members]
        return PeerTier(
            members, streams=self.streams, timeout_s=self.timeout_s, probe_s=self.probe_s
        )

    def _member(self, address: Address, attach: Attach) -> Member:
        clock = time.monotonic
        return Member(
            str(address),
            partial(self._open, address, attach),
            Knowledge(most_blocks=self.index_blocks, absent_s=_ABSENT_S, clock=clock),
            Breaker(
                clock=clock,
                random=random.random,
                probe_s=self.retry_s,
                probe_max_s=_MOST_RETRY * self.retry_s,
            ),
            timeout_s=self.timeout_s,
            connect_s=min(CONNECT_S, self.timeout_s),
        )

    def _open(self, address: Address, attach: Attach, until: float) -> Wire:
        """A connection on which the handshake is over.

        Raises:
            KvistError: the node refuses, or speaks something else.
            OSError: it could not be reached by `until`.
        """
        wire = connect(address.host, address.port, self.credentials.to_others, until)
        done = False
        try:
            greet(wire, self.credentials, self.node, attach, until)
            done = True
        finally:
            if not done:
                wire.close()
        return wire
