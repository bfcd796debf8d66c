"""Restoring DRAM after a start: the newest blocks come back before anyone asks for them.

An engine takes many seconds to start, in which the disk has nothing to do. A thread names the
newest blocks of the tier below, as many as may be restored, oldest of them first, so that the order
of eviction is again that of their writes; the loader brings them up when neither a read nor a
prefetch waits, into free slots only: nothing is ever evicted for them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice
from threading import Thread

from kvist.core.errors import KvistError
from kvist.store.desk import WAKE_S, Desk
from kvist.store.link import LowerLink
from kvist.store.prefetch import Prefetcher
from kvist.tiers.protocol import ListedBlock, Lists

_log = logging.getLogger(__name__)
_CHUNK_BLOCKS = 256  # named at a time: what is left is forgotten at once when the store closes


class Restorer:
    """The thread; it ends when all is back, DRAM is full, or the store closes."""

    def __init__(
        self, desk: Desk, link: LowerLink, prefetcher: Prefetcher, *, most_blocks: int
    ) -> None:
        """Starts it; `most_blocks` is how many blocks may be brought back."""
        self._desk = desk
        self._link = link
        self._prefetcher = prefetcher
        self._most_blocks = most_blocks
        self._stopping = False
        self.thread = Thread(target=self._run, name="kvist-restore", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Tells the thread to end; caller holds the lock."""
        self._stopping = True
        self._desk.changed.notify_all()

    def _run(self) -> None:
        tier = self._link.tier
        if not isinstance(tier, Lists):
            return
        try:
            # blocks of other models may share the medium: they are of no use to this engine
            own = (block for block in tier.list_blocks(newest_first=True) if block.own)
            newest = list(islice(own, self._most_blocks))
        except (KvistError, OSError) as error:
            _log.warning("nothing is restored to DRAM: %s", error)
            return
        newest.reverse()
        for start in range(0, len(newest), _CHUNK_BLOCKS):
            if not self._bring(newest[start : start + _CHUNK_BLOCKS]):
                return

    def _bring(self, blocks: Sequence[ListedBlock]) -> bool:
        """Brings some blocks; `False` if that must stop."""
        desk = self._desk
        with desk.changed:
            if self._stopping or not desk.table.arena.free_slots:
                return False
            self._prefetcher.restore([(block.key, block.parent) for block in blocks])
            desk.load_work.notify_all()
            while self._prefetcher.restoring() and not self._stopping:
                desk.changed.wait(WAKE_S)
            return not self._stopping
