"""What a node has to do with other nodes, from its start to its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvist.core.errors import KvistError
from kvist.node.keyspaces import Attach, Keyspaces
from kvist.node.peers.peering import Peering
from kvist.node.peers.server import PeerServer, shown
from kvist.tiers.borrowing import Lender

if TYPE_CHECKING:  # it needs the extra `cluster`
    from kvist.node.cluster_node import ClusterNode

_STOP_S = 2.0  # how long the connections of readers may take to end

Lends = Callable[[Attach], Lender | None]
Join = Callable[[str], "ClusterNode"]  # gets the address of the node's blocks, if it serves them


class Outward:
    """Serves blocks to others, reads theirs, and is part of a cluster, as far as it is told to."""

    def __init__(self, peering: Peering | None, join: Join | None) -> None:
        """Binds ports; serves nobody before `open`.

        Raises:
            ConfigError: the cluster cannot be joined as configured.
            TierError: the cluster's discovery failed.
            OSError: a port cannot be had.
        """
        self._peering = peering
        self._listener = None if peering is None else peering.bind()
        self._server: PeerServer | None = None
        self.cluster: ClusterNode | None = None
        try:
            if join is not None:
                self.cluster = join(shown(self._listener.getsockname()) if self._listener else "")
        except (KvistError, OSError):
            self.close()
            raise

    @property
    def lends(self) -> Lends | None:
        """What gives the blocks of others to a store."""
        if self.cluster is not None:
            return self.cluster.lender
        return None if self._peering is None else self._peering.lender

    def open(self, keyspaces: Keyspaces) -> None:
        """Begins to serve these stores."""
        if self._peering is not None and self._listener is not None:
            listener, self._listener = self._listener, None
            self._server = self._peering.serve(listener, keyspaces.in_use, self.cluster)
        if self.cluster is not None:
            self.cluster.start(keyspaces)

    def facts(self) -> dict[str, object]:
        """What a node's status shows."""
        found: dict[str, object] = {}
        if self._server is not None:
            found["peers"] = self._server.facts()
        if self._peering is not None and self._peering.carrying is not None:
            found["carrying"] = self._peering.carrying.facts()
        if self.cluster is not None:
            found["cluster"] = self.cluster.facts()
        return found

    def close(self) -> None:
        """Says goodbye to the cluster, then ends what others read. Idempotent."""
        if self.cluster is not None:
            self.cluster.close()
        if self._listener is not None:
            self._listener.close()
        if self._server is not None:
            self._server.stop(_STOP_S)
        if self._peering is not None:
            self._peering.close()
