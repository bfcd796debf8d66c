"""Which arenas of this node others may read, each by a carrier of its own.

The carrier of a store's arena is started when the first reader asks for it, and ended when that
store has closed: no memory is read that this node has let go of, and nobody who reads one keyspace
can see another.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvist.core.errors import ClosedError
from kvist.node.peers.carrying.carrier import Carrier
from kvist.store.tiered import TieredStore

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Case:
    store: TieredStore
    carrier: Carrier


class Showcase:
    """Thread-safe."""

    def __init__(self, kind: str) -> None:
        """Shows nothing yet. `kind`: how bytes travel from here."""
        self._kind = kind
        self._lock = threading.Lock()
        self._cases: dict[bytes, _Case] = {}
        self._closed = False

    def carrier(self, kind: str, fingerprint: bytes, store: TieredStore) -> Carrier | None:
        """What shows a store's arena, though it may not be ready; `None` for another kind."""
        if kind != self._kind:
            return None
        with self._lock:
            case = self._cases.get(fingerprint)
            if self._closed or (case is not None and case.store is not store):
                return None  # `sweep` ends the one before first
            if case is None:
                try:
                    arena = store.arena
                    what = f"the carrier of keyspace {fingerprint.hex()[:12]}"
                    carrier = Carrier(kind, arena.fd, arena.size_bytes, what=what)
                except (ClosedError, OSError) as error:  # the store closes at this moment
                    _log.debug("no carrier: %s", error)
                    return None
                case = self._cases[fingerprint] = _Case(store, carrier)
            return case.carrier

    def sweep(self, store_of: Callable[[bytes], TieredStore | None]) -> None:
        """Ends the carriers of stores that are not in use any more."""
        with self._lock:
            over = [f for f, case in self._cases.items() if store_of(f) is not case.store]
            ended = [self._cases.pop(fingerprint) for fingerprint in over]
        for case in ended:
            case.carrier.close()

    def pids(self) -> list[int]:
        """The processes that are ready to be read from."""
        with self._lock:
            carriers = [case.carrier for case in self._cases.values()]
        return [carrier.pid for carrier in carriers if carrier.shown is not None]

    def close(self) -> None:
        """Ends every carrier. Idempotent."""
        with self._lock:
            self._closed = True
            cases, self._cases = self._cases, {}
        for case in cases.values():
            case.carrier.close()
