"""NodeStore: the store of a node as an engine sees it (contract: `core/lease.py`).

A node that is gone or does not answer is a store that holds nothing: matches are empty, reads are
misses, writes find no space. A thread of the store attaches again as soon as a node listens.

Each attachment has an arena of its own. Offsets (`slot`) number all arenas of a client through: the
arena of attachment n begins at n << 48. Whoever maps an arena for this client (`locator`) knows by
the offset whether an order was meant for it, and can refuse one that was not.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random as _random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import msgspec

from kvist.core import errors
from kvist.core.errors import (
    ClosedError,
    KvistError,
    NodeAwayError,
    NodeRefusedError,
    NoSpaceError,
    StoreError,
)
from kvist.core.events import Cleared, KvEvent
from kvist.core.hints import Hints
from kvist.core.keys import Key
from kvist.core.lease import ReadLease
from kvist.core.outcome import BlockRef, Match, ReadTotals, Tier
from kvist.node import messages as m
from kvist.node.attachment import Attachment, attach
from kvist.node.keyspaces import Attach, event_of
from kvist.node.leases import NodeReadLease, NodeWriteLease
from kvist.node.protocol import join_keys, split_keys
from kvist.store.null import NullLease
from kvist.store.stats import StoreStats
from kvist.tiers.dram import ArenaLocator, ArenaMap

_log = logging.getLogger(__name__)
ANSWER_S = 1.0
HANDSHAKE_S = 30.0  # opening a store reads the index of its SSD tier
BASE_SHIFT = 48
_SLOW_S = 15.0  # what touches a medium
_FIRST_RETRY_S = 0.05
_MOST_RETRY_S = 2.0
_REVIVE_S = 10.0
_PATIENCE_S = 3.0
_CLOSE_S = 2.0
_NO_PARENT = bytes(32)
_MOST_NAME = 256
_MOST_S = 86_400.0


class NodeStore:
    """A BlockStore over a node's socket. Thread-safe."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        wanted: Attach,
        *,
        name: str = "",
        answer_s: float = ANSWER_S,
        on_event: Callable[[KvEvent], None] | None = None,
        revive: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[], float] = _random.random,
    ) -> None:
        """Attaches.

        Args:
            path: the node's socket.
            wanted: the keyspace and its blocks.
            name: how the node calls this client in its log.
            answer_s: a node that takes longer to answer counts as away until it does.
            on_event: gets the store's events, on the thread that receives; `Cleared` when the node
                is gone, since what it held is.
            revive: called, on that thread, when no node has listened for a while; may raise
                `KvistError` or `OSError`.
            clock: seconds that only grow.
            random: draws from [0, 1) for the jitter between tries.

        Raises:
            NodeAwayError: no node listens there.
            NodeRefusedError: the node does not want us, and says why.
        """
        self._path, self._wanted, self._name = os.fspath(path), wanted, name
        self._answer_s, self._on_event, self._revive = answer_s, on_event, revive
        self._clock, self._random = clock, random
        self._closing = threading.Event()
        self._totals_lock = threading.Lock()
        self._totals_of: Attachment | None = None
        self._before: dict[Tier, ReadTotals] = {}  # read by the nodes before this one
        self._read: dict[Tier, ReadTotals] = {}
        self._attachments = 0
        self._attachment = self._attach_first()
        self._thread = threading.Thread(target=self._keep, name="kvist-node", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def attached(self) -> bool:
        """Whether a node answers now."""
        return self._attachment.alive and not self._attachment.stalled

    @property
    def attachments(self) -> int:
        """How often this store has attached."""
        return self._attachments

    def locator(self) -> ArenaLocator | None:
        """Where other processes of this client map the arena; `None` while there is none."""
        at = self._attachment
        if not at.alive:
            return None
        arena = at.arena
        return ArenaLocator(
            os.getpid(), arena.fd, arena.size_bytes, arena.slot_bytes, at.base, arena.life
        )

    def arena(self) -> ArenaMap:
        """This process's mapping of the arena; another one after each `attachments`."""
        return self._attachment.arena

    # -- the contract -----------------------------------------------------------------------

    def match(self, keys: Sequence[Key]) -> Match:
        """Longest present run from the start; nothing, if the node is away."""
        joined = join_keys(keys[: m.MOST_KEYS])
        reply = self._attachment.call(lambda n: m.Match(n, joined)) if keys else None
        if not isinstance(reply, m.Matched) or len(reply.tiers) > len(keys):
            return Match(())
        return Match(tuple(m.TIERS[code % len(m.TIERS)] for code in reply.tiers))

    def read(self, keys: Sequence[Key], *, deadline_s: float, tenant: str = "") -> ReadLease:
        """Leases `keys`; of a node that is away, all are misses.

        Raises:
            NoSpaceError: the store cannot hold them all at once now; nothing was reserved.
            ClosedError: this store was closed.
        """
        self._demand_open()
        if len(keys) > m.MOST_KEYS:
            raise NoSpaceError(f"{len(keys)} blocks in one lease; at most {m.MOST_KEYS} can be")
        at, joined = self._attachment, join_keys(keys)
        wait_s = min(max(deadline_s, 0.0), _MOST_S)
        lease = NodeReadLease(at, len(keys), deadline_s=wait_s, clock=self._clock)
        reply = at.call(lambda n: m.Read(n, joined, wait_s, _short(tenant)), lease)
        if isinstance(reply, m.Leased):
            return lease
        if isinstance(reply, m.Failed) and reply.error == NoSpaceError.__name__:
            raise NoSpaceError(reply.text)
        return NullLease(len(keys))

    def write(self, blocks: Sequence[BlockRef]) -> NodeWriteLease:
        """Reserves a slot for every block that is absent; all or nothing.

        Raises:
            NoSpaceError: they cannot be had now, or the node is away; nothing was reserved.
            ClosedError: this store was closed.
        """
        self._demand_open()
        if len(blocks) > m.MOST_KEYS:
            raise NoSpaceError(f"{len(blocks)} blocks in one lease; at most {m.MOST_KEYS} can be")
        at = self._attachment
        lease = NodeWriteLease(at, len(blocks))
        keys = join_keys([b.key for b in blocks])
        parents = join_keys([b.parent or _NO_PARENT for b in blocks])
        roots = tuple(i for i, b in enumerate(blocks) if b.parent is None)
        names = tuple(_short(b.tenant) for b in blocks)
        tenants = names[:1] if len(set(names)) == 1 else names
        reply = at.call(lambda n: m.Write(n, keys, parents, roots, tenants), lease)
        if isinstance(reply, m.Reserved):
            return lease
        raise NoSpaceError(reply.text if isinstance(reply, m.Failed) else "the node is away")

    def prefetch(self, keys: Sequence[Key], *, deadline_s: float, tenant: str = "") -> int:
        """Wishes for `keys` to be in DRAM soon; says how many are to be brought."""
        wait_s, joined = min(max(deadline_s, 0.0), _MOST_S), join_keys(keys[: m.MOST_KEYS])
        return self._count(lambda n: m.Prefetch(n, joined, wait_s, _short(tenant)))

    def ended(self, keys: Sequence[Key], hints: Hints) -> None:
        """Says how the request ended that used the blocks `keys`, in their order."""
        joined = join_keys(keys[: m.MOST_KEYS])
        tokens = None if hints.output_tokens is None else max(0, hints.output_tokens)
        self._attachment.tell(m.Ended(joined, hints.finish.value, tokens, hints.partial))

    def room_blocks(self, tenant: str = "") -> int:
        """Slots that `read` or `write` could reserve now for `tenant`; none of a node away."""
        return self._count(lambda n: m.Room(n, _short(tenant)))

    def read_totals(self) -> Mapping[Tier, ReadTotals]:
        """What nodes have read from each tier below DRAM, as far as this client has seen them."""
        at = self._attachment
        reply = at.call(lambda n: m.Totals(n))
        with self._totals_lock:
            if isinstance(reply, m.TierTotals):
                if at is not self._totals_of:  # a new node begins at nothing
                    self._totals_of, self._before = at, self._read
                self._read = {
                    tier: _sum(self._before.get(tier), size_bytes, busy_s)
                    for code, size_bytes, busy_s in reply.tiers
                    for tier in [m.TIERS[code % len(m.TIERS)]]
                }
            return self._read

    # -- beside the contract ----------------------------------------------------------------

    def evict(self, keys: Sequence[Key]) -> int:
        """Forgets blocks in every tier; those leased, pinned or moving are skipped.

        Raises:
            StoreError: the node is away, or the store failed.
        """
        joined = join_keys(keys[: m.MOST_KEYS])
        return self._demand_count(lambda n: m.Evict(n, joined), _SLOW_S)

    def clear(self) -> None:
        """Forgets every block of this keyspace in every tier; leases keep what they hold.

        Raises:
            StoreError: the node is away, or the store failed.
        """
        self._demand_count(lambda n: m.Clear(n), _SLOW_S)

    def flush(self, deadline_s: float) -> bool:
        """Waits until every committed block is durable below; `False` if it is not in time."""
        call = self._attachment.call
        wait_s = min(max(deadline_s, 0.0), _MOST_S)
        reply = call(lambda n: m.Flush(n, wait_s), timeout_s=wait_s + self._answer_s)
        return isinstance(reply, m.Count) and reply.count == 1

    def stats(self) -> StoreStats | None:
        """The store's statistics; `None` if the node is away."""
        reply = self._attachment.call(lambda n: m.Stats(n), timeout_s=self._answer_s)
        if not isinstance(reply, m.Shown):
            return None
        try:
            return msgspec.json.decode(reply.text, type=StoreStats)
        except msgspec.MsgspecError:  # of an older node: it counts less
            return None

    def close(self, deadline_s: float = _CLOSE_S) -> None:
        """Leaves the node, which keeps the blocks. Idempotent."""
        self._closing.set()
        self._attachment.hang_up()
        if threading.current_thread() is not self._thread:
            self._thread.join(deadline_s)

    # -- inside -----------------------------------------------------------------------------

    def _attach_first(self) -> Attachment:
        """What stands in the way may be on its way out: an engine that has just ended."""
        until = self._clock() + _PATIENCE_S
        while True:
            try:
                return self._attach()
            except NodeRefusedError as error:
                if error.for_good or self._clock() >= until:
                    raise
            self._closing.wait(_FIRST_RETRY_S)

    def _attach(self) -> Attachment:
        wanted = self._wanted
        hello = m.Hello(
            m.MAGIC,
            m.OLDEST_PROTOCOL,
            m.NEWEST_PROTOCOL,
            os.getpid(),
            self._name[:_MOST_NAME],
            wanted.fingerprint,
            wanted.layout,
            wanted.block_bytes,
            self._on_event is not None,
        )
        found = attach(
            self._path,
            hello,
            base=self._attachments << BASE_SHIFT,
            answer_s=self._answer_s,
            deadline_s=HANDSHAKE_S,
            on_event=self._heard_event,
        )
        self._attachments += 1
        return found

    def _heard_event(self, message: m.Events) -> None:
        if self._on_event is not None:
            self._on_event(event_of(message, tuple(split_keys(message.keys))))

    def _keep(self) -> None:
        """Serves the attachment and, when it ends, finds another; the store's own thread."""
        while True:
            self._attachment.run()
            if self._closing.is_set():
                return
            farewell = self._attachment.farewell
            _log.warning("the node is gone (%s); until it is back, nothing is loaded", farewell)
            if self._on_event is not None:  # who keeps an index begins anew with the next arena
                self._on_event(Cleared())
            attachment = self._find_again(may_revive=not farewell)
            if attachment is None:
                return
            self._attachment = attachment
            _log.warning("attached to the node again")
            if self._closing.is_set():
                attachment.hang_up()

    def _find_again(self, *, may_revive: bool) -> Attachment | None:
        """Tries until it has an attachment, or the store is closed."""
        retry_s, said = _FIRST_RETRY_S, ""
        revive_at = self._clock() + _REVIVE_S / 10
        while not self._closing.wait(retry_s * (0.5 + self._random())):
            retry_s = min(2 * retry_s, _MOST_RETRY_S)
            try:
                return self._attach()
            except (KvistError, OSError) as error:
                if not isinstance(error, NodeAwayError) and str(error) != said:
                    said = str(error)
                    _log.warning("the node does not take us back: %s", said)
                if isinstance(error, NodeAwayError) and may_revive and self._clock() >= revive_at:
                    revive_at = self._clock() + _REVIVE_S
                    self._try_to_revive()
        return None

    def _try_to_revive(self) -> None:
        if self._revive is None:
            return
        try:
            self._revive()
        except (KvistError, OSError) as error:
            _log.warning("no node could be started: %s", error)

    def _demand_open(self) -> None:
        if self._closing.is_set():
            raise ClosedError("the store was closed")

    def _count(self, make: Callable[[int], m.Request]) -> int:
        reply = self._attachment.call(make)
        return reply.count if isinstance(reply, m.Count) else 0

    def _demand_count(self, make: Callable[[int], m.Request], timeout_s: float) -> int:
        reply = self._attachment.call(make, timeout_s=timeout_s)
        if isinstance(reply, m.Count):
            return reply.count
        if isinstance(reply, m.Failed):
            kind: Any = getattr(errors, reply.error, StoreError)
            known = isinstance(kind, type) and issubclass(kind, KvistError)
            raise (kind if known else StoreError)(reply.text)
        raise NodeAwayError("the node is away")


def _sum(before: ReadTotals | None, size_bytes: int, busy_s: float) -> ReadTotals:
    before = before or ReadTotals()
    return ReadTotals(before.size_bytes + size_bytes, before.busy_s + busy_s)


def _short(tenant: str) -> str:
    """A tenant's name as it crosses the socket: a long one as its digest."""
    if len(tenant) <= _MOST_NAME:
        return tenant
    return "#" + hashlib.blake2b(tenant.encode(), digest_size=32).hexdigest()
