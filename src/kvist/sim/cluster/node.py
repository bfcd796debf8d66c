"""A simulated node: a store, the production member, and what moves messages between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvist.cluster.discovery.memory import Board, MemoryDiscovery
from kvist.cluster.log import Sealed
from kvist.cluster.member import Member, Settings, Space
from kvist.cluster.placement import FULL_WEIGHT_BYTES
from kvist.cluster.record import NodeRecord, NodeState, TierSpace, next_incarnation
from kvist.cluster.replication import Offer
from kvist.cluster.wire import NUMBER_BYTES, Batch, decode_message, topic_of
from kvist.core.keys import Key
from kvist.core.outcome import Tier
from kvist.sim.cluster.messages import Asked, Fetch, Found, Message, Missing
from kvist.sim.cluster.network import Network
from kvist.sim.cluster.parts import Parts
from kvist.sim.cluster.storage import Storage, content_of

READ_S = 0.6  # for one holder to answer
_TRIES = 3
_FETCHES = 32  # under way at once, for offers
_DISCOVERY_S = 5.0
_TTL_S = 12.0
_NO = "takes nothing"


@dataclass(slots=True)
class Judge:
    """What went wrong, and what happened in all."""

    violations: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    note: Callable[..., None] = lambda *_: None
    quiet: bool = False  # from then on nothing may be offered to who leaves

    def count(self, what: str) -> None:
        """One more of it."""
        self.counts[what] = self.counts.get(what, 0) + 1

    def violated(self, what: str) -> None:
        """A promise was broken."""
        if len(self.violations) < 20:
            self.violations.append(what)


@dataclass(frozen=True, slots=True)
class Shared:
    """What all nodes of a run have in common."""

    clock: Callable[[], float]
    network: Network
    board: Board
    parts: Parts
    settings: Settings
    judge: Judge


@dataclass(slots=True)
class _Read:
    key: Key
    left: list[str]
    over_s: float
    asked: str


class SimNode:
    """One name in the cluster: it runs, or it does not."""

    def __init__(self, name: str, domain: str, storage: Storage, shared: Shared) -> None:
        self.name = name
        self.domain = domain
        self.storage = storage
        self.member: Member | None = None
        self.clock_off_ns = 0  # how wrong its wall clock is
        self.hears_discovery = True
        self.starts = 0
        self.moved_s = 0.0  # when it last asked another node for a block
        self._shared = shared
        self._discovery = MemoryDiscovery(shared.board, shared.clock)
        self._disk_incarnation = 0
        self._sealed: dict[int, Batch] = {}
        self._reads: dict[int, _Read] = {}
        self._next_read = 0
        self._discover_s = 0.0

    @property
    def state(self) -> NodeState:
        """What the node says of itself; `LEFT` if it does not run."""
        return self.member.own.state if self.member is not None else NodeState.LEFT

    def start(self, now_s: float) -> None:
        """Begins a new incarnation with what is on SSD."""
        wall_ns = max(0, round(now_s * 1e9) + self.clock_off_ns)
        self._disk_incarnation = next_incarnation(wall_ns, self._disk_incarnation)
        record = NodeRecord(
            self.name,
            incarnation=self._disk_incarnation,
            version=0,
            state=NodeState.JOINING,
            domain=self.domain,
            group_blocks=4,
        )
        self.member = self._shared.parts.member(record, self._shared.settings, now_s)
        self.storage.announce(self.member.record)
        self._shared.network.inboxes[self.name] = []
        self._sealed.clear()
        self._discover_s = now_s
        self.starts += 1

    def crash(self) -> None:
        """Ends without another word; what was on the wire to it is lost, and so is its DRAM."""
        self.member = None
        self.storage.crash()
        self._stop()

    def leave(self, now_s: float) -> None:
        """Says goodbye and ends."""
        assert self.member is not None
        self._publish(self.member.leave(now_s, now_s), self.member.own.incarnation)
        self._discovery.withdraw(self.name)
        self.crash()

    def tick(self, now_s: float) -> None:
        """Takes its mail, then does what is due."""
        member = self.member
        if member is None:
            return
        self.take_mail(now_s)
        if now_s >= self._discover_s and self.hears_discovery:
            self._discover_s = now_s + _DISCOVERY_S
            self._discovery.announce(member.own, ttl_s=_TTL_S)
            member.discovered(self._discovery.members(), now_s)
        free, most = max(0, self.storage.free_blocks), self.storage.capacity_blocks
        used = TierSpace(Tier.SSD.value, *(n * FULL_WEIGHT_BYTES for n in (most - free, most)))
        space = Space(free * FULL_WEIGHT_BYTES, (used,))
        out = member.tick(now_s, now_s, space)
        for sealed in out.batches:
            self._publish(sealed, member.own.incarnation)
        for ask in out.asks:
            self._send(ask.node, Asked(ask, self.name))
        for offer in out.offers:
            self._shared.judge.note("offer", now_s, offer.source, offer.node, len(offer.keys))
            known = member.view.membership.get(offer.node)
            if known is None or known.state is not NodeState.ACTIVE:
                self._shared.judge.violated(f"{self.name} offers to {offer.node}, which {_NO}")
            self._send(offer.node, offer)
        self._give_up(now_s)

    def take_mail(self, now_s: float) -> None:
        """Handles what has arrived by now, in the order of arrival."""
        inbox = self._shared.network.inboxes[self.name]
        if not inbox:
            return
        inbox.sort()
        taken = 0
        for arrival_s, _, message in inbox:
            if arrival_s > now_s:
                break
            taken += 1
            self._handle(message, now_s)
        del inbox[:taken]

    def write(self, chain: list[Key]) -> None:
        """An engine here computed a chain of blocks, the first of a prompt first."""
        if self.member is None:
            return
        parent = None
        for key in chain:
            if key not in self.storage:
                self.storage.put(key, parent, content_of(key), self.member.record)
            parent = key

    def read(self, key: Key, now_s: float) -> None:
        """An engine here wants a block: from its own node, else from who is believed to have it."""
        if self.member is None:
            return
        self.take_mail(now_s)
        judge = self._shared.judge
        judge.count("reads")
        content = self.storage.get(key)
        if content is not None:
            judge.count("reads.local")
            self._check(key, content)
            return
        holders = self.member.view.readers_choice(key)[:_TRIES]
        self._try(_Read(key, holders, 0.0, ""), now_s)

    def _handle(self, message: Message, now_s: float) -> None:
        member = self.member
        assert member is not None
        if isinstance(message, Batch):
            member.hear(message, now_s)
        elif isinstance(message, Asked):
            self._answer(message, now_s)
        elif isinstance(message, Fetch):
            content = self.storage.get(message.key)
            if content is None:
                answer: Message = Missing(message.number, self.name, member.position)
            else:
                parent = self.storage.parent(message.key)
                answer = Found(message.number, message.key, parent, content)
            self._send(message.reader, answer)
        elif isinstance(message, Offer):
            self._take_offer(message, now_s)
        else:
            self._answered(message, now_s)

    def _answered(self, message: Found | Missing, now_s: float) -> None:
        read = self._reads.pop(message.number, None)
        if read is None or self.member is None:
            return  # given up
        if isinstance(message, Missing):
            self.member.view.missed(message.node, read.key, message.at)
            self._shared.judge.count("reads.absent")
            self._try(read, now_s)
            return
        self._check(read.key, message.content)
        self._shared.judge.count("reads.remote")
        self.storage.put(read.key, message.parent, message.content, self.member.record)

    def _try(self, read: _Read, now_s: float) -> None:
        if not read.left:
            self._shared.judge.count("reads.missed")
            return
        self._next_read += 1
        self.moved_s = now_s
        read.asked, read.over_s = read.left.pop(0), now_s + READ_S
        self._reads[self._next_read] = read
        self._send(read.asked, Fetch(read.key, self.name, self._next_read))

    def _give_up(self, now_s: float) -> None:
        for number, read in list(self._reads.items()):
            if now_s >= read.over_s:
                del self._reads[number]
                self._shared.judge.count("reads.late")
                self._try(read, now_s)

    @property
    def waits(self) -> bool:
        """Whether a read is under way."""
        return bool(self._reads)

    def _take_offer(self, offer: Offer, now_s: float) -> None:
        assert self.member is not None
        judge = self._shared.judge
        if self.state is NodeState.DRAINING:
            judge.count("offers.draining")
            if judge.quiet:
                judge.violated(f"{offer.source} offers to {self.name}, which {_NO}")
            return
        full = self.member.own.full
        most = self.member.accepts(offer.keys, FULL_WEIGHT_BYTES, now_s)
        room = _FETCHES if full else min(_FETCHES, self.storage.free_blocks)
        for i, key in enumerate(offer.keys):
            if i >= most or len(self._reads) >= room:
                judge.count("offers.refused")
            elif key not in self.storage:
                judge.count("exchanges" if full else "copies")
                self._try(_Read(key, [offer.source], 0.0, ""), now_s)

    def _answer(self, asked: Asked, now_s: float) -> None:
        member = self.member
        assert member is not None
        for sealed in member.answer(asked.ask, now_s):
            batch = self._sealed.get(sealed.number)
            if batch is None or sealed is not member.log.buffered(sealed.number):
                self._shared.judge.count("dumps")
                batch = self._decoded(sealed, member.own.incarnation)
            self._send(asked.reader, batch)

    def _publish(self, sealed: Sealed, incarnation: int) -> None:
        batch = self._sealed[sealed.number] = self._decoded(sealed, incarnation)
        if len(self._sealed) > self._shared.settings.most_batches:
            del self._sealed[next(iter(self._sealed))]
        self._shared.judge.note("batch", self.name, incarnation, sealed.number, sealed.payload)
        network = self._shared.network
        network.spread(self.name, network.inboxes, batch, self._shared.clock())

    def _decoded(self, sealed: Sealed, incarnation: int) -> Batch:
        number = sealed.number.to_bytes(NUMBER_BYTES, "big")
        return decode_message(topic_of(self.name, incarnation), number, sealed.payload, source="")

    def _check(self, key: Key, content: bytes) -> None:
        if content != content_of(key):
            self._shared.judge.violated(f"{self.name} read a block of another key")

    def _send(self, target: str, message: Message) -> None:
        self._shared.network.send(self.name, target, message, self._shared.clock())

    def _stop(self) -> None:
        self._reads.clear()
        del self._shared.network.inboxes[self.name]
