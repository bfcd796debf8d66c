"""The life pipes of sessions: who may still touch which slots.

Every process that maps the arena for a session keeps the writing end of its pipe open. The end of
the pipe, not that of the connection, says that nobody is left who could.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from kvist.node.keyspaces import Keyspace
from kvist.node.peer import Peer, Stage
from kvist.node.sessions import Session

_DRAINED_BYTES = 64 << 10


class Lives:
    """The reading ends of those that have not ended, with what each is of."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Keyspace, Peer]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, life: object) -> bool:
        return life in self._of

    def __iter__(self) -> Iterator[tuple[Keyspace, Peer]]:
        return iter(list(self._of.values()))

    def add(self, keyspace: Keyspace, peer: Peer) -> None:
        """Owns the pipe of `peer` from here on."""
        self._of[peer.life] = (keyspace, peer)

    @property
    def lingering(self) -> int:
        """How many outlive their connection."""
        return sum(peer.stage is Stage.GONE for _, peer in self._of.values())

    def keyspace(self, life: int) -> Keyspace:
        """Where its session is."""
        return self._of[life][0]

    def over(self, life: int) -> tuple[Keyspace, Peer] | None:
        """Takes a pipe out that has ended; `None` if it has not.

        An event may be of a descriptor that had the same number before, so it is asked again.
        """
        try:
            if os.read(life, _DRAINED_BYTES):
                return None
        except BlockingIOError:
            return None
        return self._of.pop(life)

    def sessions(self, keyspace: Keyspace) -> dict[int, Session]:
        """The sessions of a keyspace by their pipes."""
        found = {life: (of, peer.session) for life, (of, peer) in self._of.items()}
        return {life: s for life, (of, s) in found.items() if of is keyspace and s is not None}

    def close(self) -> None:
        """Lets go of all of them. Idempotent."""
        while self._of:
            os.close(self._of.popitem()[0])
