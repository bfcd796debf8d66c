"""Tells a cluster what this node's stores hold: what they find at their start, and what changes.

What is on disk when a store opens is listed on a thread of its own, while events go on. A block
that is removed meanwhile must not be announced after its removal: whatever is heard to leave while
the list is read is left out of it. Nothing is announced of a store that has closed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kvist.core.errors import KvistError
from kvist.core.events import Cleared, KvEvent, Removed, Stored
from kvist.core.keys import Key
from kvist.core.outcome import Tier
from kvist.store.tiered import TieredStore
from kvist.tiers.protocol import ListedBlock

_log = logging.getLogger(__name__)
_CHUNK_BLOCKS = 512


@dataclass(slots=True)
class _Listing:
    """A list that is being read: what has left since it was begun, and whether it is void."""

    gone: set[Key] = field(default_factory=set)
    void: bool = False


class Announcing:
    """An `Announcer` (`keyspaces.py`) whose events go to a cluster, with their keyspace."""

    def __init__(self, record: Callable[[KvEvent, bytes], None]) -> None:
        """`record` takes an event of a keyspace; it is called in the order of events."""
        self._record = record
        self._lock = threading.Lock()  # events and parts of lists come one after the other
        self._listings: dict[bytes, _Listing] = {}

    def opened(self, fingerprint: bytes, store: TieredStore) -> None:
        """See `Announcer`; begins to list what is on disk."""
        listing = _Listing()
        with self._lock:
            self._listings[fingerprint] = listing
        threading.Thread(
            target=self._list,
            args=(fingerprint, listing, store),
            name="kvist-announce",
            daemon=True,
        ).start()

    def heard(self, fingerprint: bytes, event: KvEvent) -> None:
        """See `Announcer`."""
        with self._lock:
            listing = self._listings.get(fingerprint)
            if listing is not None:
                if isinstance(event, Cleared):
                    listing.void = True
                elif isinstance(event, Removed):
                    listing.gone.update(event.keys)
                else:
                    listing.gone.difference_update(event.keys)
            self._record(event, fingerprint)

    def closed(self, fingerprint: bytes) -> None:
        """See `Announcer`."""
        with self._lock:
            listing = self._listings.pop(fingerprint, None)
            if listing is not None:
                listing.void = True
            self._record(Cleared(), fingerprint)

    def _list(self, fingerprint: bytes, listing: _Listing, store: TieredStore) -> None:
        blocks = store.own.below()
        try:
            while chunk := list(islice(blocks, _CHUNK_BLOCKS)):
                with self._lock:
                    if listing.void:
                        return
                    there = [block for block in chunk if block.key not in listing.gone]
                    for event in _runs(there):
                        self._record(event, fingerprint)
        except (KvistError, OSError) as error:
            _log.warning("other nodes are not told of all that is on disk: %s", error)
        finally:
            with self._lock:
                if self._listings.get(fingerprint) is listing:
                    del self._listings[fingerprint]


def _runs(blocks: Sequence[ListedBlock]) -> Iterator[Stored]:
    """Blocks that follow each other in a sequence together."""
    run: list[Key] = []
    parent: Key | None = None
    for block in blocks:
        if run and block.parent != run[-1]:
            yield Stored(tuple(run), parent, Tier.SSD)
            run = []
        if not run:
            parent = block.parent
        run.append(block.key)
    if run:
        yield Stored(tuple(run), parent, Tier.SSD)
