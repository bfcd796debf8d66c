"""A node's part in its cluster, put together: events out, the directory, peers, replicas.

    stores ── Announcing ──► ClusterLoop ◄──► other nodes' events
                                │  │ directory, members
    stores ◄── PeerTier ◄── Directed (one a keyspace) ◄──► other nodes' blocks
                                │ offers
    stores ◄── Intake ◄─────────┴────────────────────────► other nodes' offers

Blocks of different keyspaces never answer for one another: keys name their keyspace and tenant,
each keyspace has a `Directed` of its own, and its handshake with an owner names the keyspace.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvist.cluster.directory import Position
from kvist.cluster.member import Space
from kvist.cluster.record import TierSpace
from kvist.cluster.replication import Offer
from kvist.core.errors import ClosedError, KvistError
from kvist.core.events import KvEvent
from kvist.core.outcome import Tier
from kvist.node.announcing import Announcing
from kvist.node.clustered import ClusterLoop, Duties, Neighbour
from kvist.node.events import is_own_host
from kvist.node.keyspaces import Attach, Keyspaces
from kvist.node.peers import messages as m
from kvist.node.peers.directed import Directed, Host
from kvist.node.peers.intake import Intake
from kvist.node.peers.member import Lacks, Member
from kvist.node.peers.peering import Address, Peering
from kvist.node.peers.server import OpenStore
from kvist.node.peers.tier import PeerTier
from kvist.node.protocol import join_keys, split_keys
from kvist.store.tiered import TieredStore

_log = logging.getLogger(__name__)
_MOST_OFFERS = 4  # that wait for one peer of one keyspace
_NOTHING = Space(0)


class ClusterNode:
    """An `Announcer` of the stores, a `ClusterSide` of the peers' server, and what lends."""

    def __init__(self, peering: Peering, join: Callable[[Duties], ClusterLoop]) -> None:
        """Takes no part before `start`. `join`: makes the loop, which this owns."""
        self._peering = peering
        self._directed: dict[bytes, Directed] = {}
        self._hosts: dict[str, Host] = {}
        self._keyspaces: Keyspaces | None = None
        self._distrusted: set[str] = set()
        self._loop = join(Duties(self._space, self._offer_all, self._follow))
        self._announcing = Announcing(self._loop.record)
        self._intake = Intake(self._find, self._loop.reached)
        self.offers_unsent = 0

    def start(self, keyspaces: Keyspaces) -> None:
        """Joins the cluster with these stores."""
        self._keyspaces = keyspaces
        self._loop.start()
        self._intake.start()

    def close(self) -> None:
        """Says goodbye. Idempotent."""
        self._intake.stop()
        self._loop.close()

    # -- the stores -------------------------------------------------------------------------

    def opened(self, fingerprint: bytes, store: TieredStore) -> None:
        """See `keyspaces.Announcer`."""
        self._announcing.opened(fingerprint, store)

    def heard(self, fingerprint: bytes, event: KvEvent) -> None:
        """See `keyspaces.Announcer`."""
        self._announcing.heard(fingerprint, event)

    def closed(self, fingerprint: bytes) -> None:
        """See `keyspaces.Announcer`."""
        self._directed.pop(fingerprint, None)
        self._announcing.closed(fingerprint)

    def lender(self, attach: Attach) -> PeerTier:
        """What the other nodes have of a keyspace."""
        directed = Directed(self._loop, partial(self._connect, attach))
        directed.follow(self._hosts)
        self._directed[attach.fingerprint] = directed
        return self._peering.tier(directed)

    def _connect(self, attach: Attach, place: str, lacks: Lacks) -> Member:
        return self._peering.member(Address.parse(place), attach, lacks)

    def _find(self, fingerprint: bytes) -> OpenStore | None:
        return None if self._keyspaces is None else self._keyspaces.in_use(fingerprint)

    # -- the other nodes --------------------------------------------------------------------

    def position(self) -> Position | None:
        """See `serving.ClusterSide`."""
        return self._loop.position()

    def take(self, fingerprint: bytes, offer: m.Offer) -> int:
        """See `serving.ClusterSide`; a node that gives its blocks away takes none, a full one few.

        Raises:
            ProtocolError: the offer contradicts itself.
        """
        found = self._find(fingerprint)
        if found is None:
            return 0
        most = self._loop.accepts(split_keys(offer.keys), found.store.raw_bytes)
        return self._intake.take(fingerprint, offer, most=most)

    def drain(self, within_s: float, then: Callable[[], None], *, patient: bool = True) -> None:
        """Gives away what only this node holds; see `ClusterLoop.drain`."""
        self._loop.drain(within_s, then, patient=patient)

    def facts(self) -> dict[str, object]:
        """What a node's status shows."""
        own = self._loop.member.own
        nodes = {
            n.record.node: "suspect" if n.suspect else n.record.state.value
            for n in self._loop.neighbours()
        }
        figures: Mapping[str, float] = {
            **self._loop.figures(),
            "kvist_replica_fetched_total": self._intake.fetched,
            "kvist_replica_dropped_total": self._intake.dropped,
            "kvist_replica_unsent_total": self.offers_unsent,
            "kvist_discovery_failures_total": self._loop.discovery_failures,
        }
        return {
            "node": own.node,
            "incarnation": own.incarnation,
            "state": own.state.value,
            "full": own.full,
            "blocks": own.blocks,
            "nodes": nodes,
            "samples": figures,
        }

    def _space(self) -> Space:
        """What the open stores hold; what they have left is offered to others' blocks."""
        if self._keyspaces is None:
            return _NOTHING
        totals: dict[Tier, list[int]] = {}
        free_bytes = 0
        for keyspace in self._keyspaces:
            spaces = keyspace.store.own.space()
            for tier, space in spaces.items():
                total = totals.setdefault(tier, [0, 0])
                total[0] += space.used_bytes
                total[1] += space.capacity_bytes
            lasting = spaces.get(Tier.SSD, spaces[Tier.DRAM])
            free_bytes += max(0, lasting.capacity_bytes - lasting.used_bytes)
        tiers = tuple(TierSpace(tier.value, *total) for tier, total in totals.items())
        named = tuple(sorted(keyspace.attach.fingerprint.hex() for keyspace in self._keyspaces))
        return Space(free_bytes, tiers, named, takes=self._peering.listen is not None)

    def _follow(self, neighbours: Sequence[Neighbour]) -> None:
        """Who is there now, and where blocks can be read."""
        self._distrusted.intersection_update(n.record.node for n in neighbours)
        self._hosts = {
            n.record.node: Host(n.record.blocks, n.suspect)
            for n in neighbours
            if n.record.blocks and self._trusts(n.record.node, n.record.blocks)
        }
        for directed in list(self._directed.values()):
            directed.follow(self._hosts)

    def _trusts(self, node: str, place: str) -> bool:
        """Whether blocks may be read there: beyond this host, only from who can prove itself."""
        try:
            address = Address.parse(place)
        except ValueError:
            why = f"{place!r} is no address"
        else:
            if self._peering.credentials.proven or is_own_host(f"tcp://{address}"):
                return True
            why = f"{place} is not of this host alone, and there is neither a token nor TLS"
        if node not in self._distrusted:
            self._distrusted.add(node)
            _log.warning("no blocks are read from node %s: %s", node, why)
        return False

    # -- offers -----------------------------------------------------------------------------

    def _offer_all(self, offers: Sequence[Offer]) -> None:
        """Offers blocks to others, each on a thread of that peer's; what would wait is left out."""
        for offer in offers:
            directed = self._directed.get(offer.scope)
            member = None if directed is None else directed.member(offer.node)
            at = self._loop.position()
            if member is None or at is None or member.asker.busy >= _MOST_OFFERS:
                self.offers_unsent += len(offer.keys)
                continue
            with contextlib.suppress(ClosedError):  # that node has just left
                member.asker.submit(partial(self._offer, member, offer, at))

    def _offer(self, member: Member, offer: Offer, at: Position) -> None:
        found = self._find(offer.scope)
        if found is None:
            return
        message = m.Offer(
            offer.source,
            at.incarnation,
            at.number,
            join_keys(offer.keys),
            join_keys([parent or m.NO_PARENT for parent in offer.parents]),
            tuple(found.store.own.tenants(offer.keys)),
        )
        try:
            member.offer(message)
        except (KvistError, OSError) as error:  # the member has told its breaker, and the log
            _log.debug("offer to %s: %s", member.name, error)
            self.offers_unsent += len(offer.keys)
