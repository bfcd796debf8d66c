"""What one node has to do with others: serves its blocks to them, reads theirs."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvist.cluster.directory import Position
from kvist.core.keys import Key
from kvist.node.keyspaces import Attach
from kvist.node.peers.beliefs import Beliefs, Probed
from kvist.node.peers.carrying.lane import CarriedWire, Lane
from kvist.node.peers.carrying.transport import Carrying
from kvist.node.peers.credentials import Credentials
from kvist.node.peers.handshake import greet
from kvist.node.peers.member import Lacks, Member
from kvist.node.peers.messages import CARRYING_PROTOCOL, NODE_BYTES
from kvist.node.peers.server import OpenStore, PeerServer, listen, shown
from kvist.node.peers.serving import ClusterSide
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

    @classmethod
    def parse(cls, text: str) -> Address:
        """The address that `str` has written.

        Raises:
            ValueError: it is none.
        """
        host, _, port = text.rpartition(":")
        bare = host.removeprefix("[").removesuffix("]")
        if not bare or not 0 < int(port) < 1 << 16:
            raise ValueError(f"{text!r} is no address")
        return cls(bare, int(port))


@dataclass(frozen=True, slots=True)
class Peering:
    """Everything that is set. `node` is how this process recognises itself among the members.

    With `carrying` blocks travel by it to and from nodes that have the same.
    """

    credentials: Credentials
    listen: Address | None
    members: tuple[Address, ...]
    streams: int
    timeout_s: float
    probe_s: float
    retry_s: float
    index_blocks: int
    carrying: Carrying | None = None
    node: bytes = field(default_factory=lambda: os.urandom(NODE_BYTES))

    def bind(self) -> socket.socket | None:
        """What others connect to, if this node is to serve others.

        Raises:
            OSError: the address cannot be had.
        """
        return None if self.listen is None else listen(self.listen.host, self.listen.port)

    def serve(
        self,
        listener: socket.socket,
        find: Callable[[bytes], OpenStore | None],
        cluster: ClusterSide | None = None,
    ) -> PeerServer:
        """Serves the open stores to whoever connects to `listener`, which the server owns then."""
        showcase = None if self.carrying is None else self.carrying.showcase
        return PeerServer(
            listener, find, self.credentials, node=self.node, cluster=cluster, showcase=showcase
        )

    def close(self) -> None:
        """Ends the processes that carry blocks. Idempotent."""
        if self.carrying is not None:
            self.carrying.close()

    def lender(self, attach: Attach) -> PeerTier | None:
        """What the configured members have of a keyspace, if there are any."""
        if not self.members:
            return None
        known: dict[Member, Knowledge] = {}
        for address in self.members:
            knowledge = Knowledge(
                most_blocks=self.index_blocks, absent_s=_ABSENT_S, clock=time.monotonic
            )
            known[self.member(address, attach, partial(_drop, knowledge), knowledge.clear)] = (
                knowledge
            )
        return self.tier(Probed(known, probe_s=self.probe_s))

    def tier(self, beliefs: Beliefs) -> PeerTier:
        """What reads from the peers of `beliefs`."""
        return PeerTier(beliefs, streams=self.streams, timeout_s=self.timeout_s)

    def member(
        self,
        address: Address,
        attach: Attach,
        lacks: Lacks,
        rests: Callable[[], None] = lambda: None,
    ) -> Member:
        """A peer that blocks of a keyspace are read from; see `Member`."""
        lane = None
        if self.carrying is not None:
            lane = self.carrying.lane(str(address), attach.block_bytes)
        return Member(
            str(address),
            partial(self._open, address, attach, lane),
            Breaker(
                clock=time.monotonic,
                random=random.random,
                probe_s=self.retry_s,
                probe_max_s=_MOST_RETRY * self.retry_s,
            ),
            streams=self.streams,
            timeout_s=self.timeout_s,
            connect_s=min(CONNECT_S, self.timeout_s),
            lacks=lacks,
            rests=rests,
        )

    def _open(self, address: Address, attach: Attach, lane: Lane | None, until: float) -> Wire:
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
        if lane is None:
            return wire
        if wire.protocol < CARRYING_PROTOCOL:
            lane.absent()
            return wire
        return CarriedWire(wire, lane)


def _drop(known: Knowledge, key: Key, at: Position | None) -> None:
    """A peer has not brought a block: it is not asked for it again for a while."""
    known.drop((key,))
