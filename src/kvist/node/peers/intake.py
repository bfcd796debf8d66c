"""Blocks that other nodes have offered, on their way here: wishes that wait behind every read.

An offer is taken if there is room for it in a bounded queue. Its blocks are then wished for
(`store/prefetch.py`), a few at a time, as soon as this node has heard from the offering one that it
has them, and the peers' transport brings them like anything that is prefetched. What is not here in
time is dropped: whoever watches over its copies offers it again, to whomever.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from kvist.cluster.directory import Position
from kvist.core.errors import ClosedError
from kvist.core.keys import Key
from kvist.core.outcome import BlockRef
from kvist.node.peers import messages as m
from kvist.node.peers.server import OpenStore
from kvist.node.protocol import ProtocolError, split_keys
from kvist.store.own import OwnBlocks

_log = logging.getLogger(__name__)
MOST_WAITING = 4096  # blocks of all offers together
_WINDOW = 32  # of a keyspace, wished for at once
_FETCH_S = 15.0
_WISH_S = 2.0
_LOOK_S = 0.05
_WAKE_S = 0.5
_JOIN_S = 2.0


@dataclass(slots=True)
class _Wanted:
    block: BlockRef
    source: str
    at: Position
    over_s: float
    wish_s: float = 0.0  # when it may be wished for (again)


class Intake:
    """What this node has been offered. Thread-safe."""

    def __init__(
        self,
        find: Callable[[bytes], OpenStore | None],
        reached: Callable[[str, Position], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Fetches nothing before `start`.

        Args:
            find: the open store of a keyspace.
            reached: whether all is known here that a node had published at a position.
            clock: seconds that only grow.
        """
        self._find, self._reached, self._clock = find, reached, clock
        self._changed = threading.Condition()
        self._wanted: dict[bytes, dict[Key, _Wanted]] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvist-replicas", daemon=True)
        self.fetched = 0
        self.dropped = 0

    def start(self) -> None:
        """Begins to fetch."""
        self._thread.start()

    def stop(self) -> None:
        """Drops what waits. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def take(self, fingerprint: bytes, offer: m.Offer, *, most: int) -> int:
        """Takes what there is room for, `most` at most; says how much. A closed keyspace has none.

        Raises:
            ProtocolError: numbers of keys, parents and tenants do not agree.
        """
        keys, parents = split_keys(offer.keys), split_keys(offer.parents)
        tenants = offer.tenants if len(offer.tenants) != 1 else offer.tenants * len(keys)
        if not len(keys) == len(parents) == len(tenants):
            raise ProtocolError("an offer names other numbers of keys, parents and tenants")
        if self._find(fingerprint) is None:
            return 0
        at = Position(offer.incarnation, offer.number)
        over_s = self._clock() + _FETCH_S
        with self._changed:
            room = MOST_WAITING - sum(len(wanted) for wanted in self._wanted.values())
            wanted = self._wanted.setdefault(fingerprint, {})
            taken = 0 if self._stopping else min(room, most, len(keys))
            for key, parent, tenant in list(zip(keys, parents, tenants, strict=True))[:taken]:
                above = None if parent == m.NO_PARENT else parent
                block = BlockRef(key, above, tenant)
                wanted.setdefault(key, _Wanted(block, offer.source, at, over_s))
            self.dropped += len(keys) - taken
            self._changed.notify_all()
        return taken

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._stopping:
                    return
                waiting = list(self._wanted)
                if not waiting:
                    self._changed.wait(_WAKE_S)
                    continue
            for fingerprint in waiting:
                self._step(fingerprint)
            with self._changed:
                self._changed.wait(_LOOK_S)

    def _step(self, fingerprint: bytes) -> None:
        """Looks after the oldest that is wanted of a keyspace, and wishes for what may be."""
        with self._changed:
            window = list(islice(self._wanted[fingerprint].values(), _WINDOW))
        found = self._find(fingerprint)
        held = None if found is None else _held(found.store.own, window)
        done: list[Key] = []
        wishes: list[_Wanted] = []
        now_s = self._clock()
        for i, wanted in enumerate(window):
            here = held is not None and held[i]
            if here or held is None or now_s >= wanted.over_s:
                done.append(wanted.block.key)
                self.fetched += here
                self.dropped += not here
            elif now_s >= wanted.wish_s and self._reached(wanted.source, wanted.at):
                wanted.wish_s = now_s + _WISH_S
                wishes.append(wanted)
        if found is not None and wishes:
            _wish(found.store.own, [wanted.block for wanted in wishes])
        with self._changed:
            left = self._wanted[fingerprint]
            for key in done:
                left.pop(key, None)
            if not left:
                del self._wanted[fingerprint]


def _held(own: OwnBlocks, window: Sequence[_Wanted]) -> list[bool] | None:
    """Which blocks are here; `None` if the store has closed."""
    try:
        return own.held([wanted.block.key for wanted in window])
    except ClosedError:
        return None


def _wish(own: OwnBlocks, blocks: Sequence[BlockRef]) -> None:
    try:
        own.fetch(blocks, deadline_s=_WISH_S)
    except ClosedError as error:
        _log.debug("offered blocks are not fetched: %s", error)
