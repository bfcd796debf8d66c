"""Everything that a node needs to have its blocks carried, both ways."""

from __future__ import annotations

import logging
import threading

from kvist.node.peers.carrying.lane import REST_S, CarriedCounts, Lane
from kvist.node.peers.carrying.showcase import Showcase
from kvist.node.peers.carrying.staging import Staging

_log = logging.getLogger(__name__)


class Carrying:
    """Thread-safe. Starts no process before one is needed."""

    def __init__(self, kind: str, *, rest_s: float = REST_S) -> None:
        """Is of no use before the processes are ready.

        Args:
            kind: how bytes travel; see `process.make_agent`.
            rest_s: how long a peer's blocks come over TCP after a failure; longer each time.
        """
        self.kind, self._rest_s = kind, rest_s
        self.showcase = Showcase(kind)
        self.counts = CarriedCounts()
        self._lock = threading.Lock()
        self._staging: Staging | None = None
        self._closed = False

    def lane(self, name: str, block_bytes: int) -> Lane | None:
        """For blocks of the peer `name`; `None` where there is no memory, or it was closed."""
        with self._lock:
            if self._staging is None and not self._closed:
                try:
                    self._staging = Staging(self.kind)
                except OSError as error:
                    _log.warning("no memory for %s (%s): blocks come over TCP", self.kind, error)
            staging = self._staging
        if staging is None:
            return None
        return Lane(
            name,
            self.kind,
            staging,
            self.counts,
            block_bytes=block_bytes,
            rest_s=self._rest_s,
        )

    def facts(self) -> dict[str, object]:
        """What a node's status shows; `reads` and `shows` are processes that are ready."""
        staging, counts = self._staging, self.counts
        reads = staging is not None and staging.carrier.shown is not None
        return {
            "transport": self.kind,
            "reads": [staging.carrier.pid] if reads and staging is not None else [],
            "shows": self.showcase.pids(),
            "blocks": counts.blocks,
            "bytes": counts.size_bytes,
            "failures": counts.failures,
            "late_lots": 0 if staging is None else staging.late_lots,
        }

    def close(self) -> None:
        """Ends every process. Idempotent."""
        with self._lock:
            self._closed = True
            staging, self._staging = self._staging, None
        if staging is not None:
            staging.close()
        self.showcase.close()
