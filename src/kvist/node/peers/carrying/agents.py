"""What moves bytes between two processes: `Agent`, inside a carrier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvist.node.peers.carrying.words import Piece


class Transfer(Protocol):
    """Pieces on their way."""

    def done(self) -> bool:
        """Whether they are all there.

        Raises:
            TierError: they will not come.
        """
        ...

    def release(self) -> None:
        """Lets go of it; only once it is done or has failed. Idempotent."""
        ...


class Agent(Protocol):
    """One memory that others read from and that they are read into. For one thread."""

    def contact(self) -> bytes:
        """What another agent needs to read from here.

        Raises:
            TierError: it cannot be said.
        """
        ...

    def meet(self, contact: bytes) -> str:
        """Makes another agent known; its name.

        Raises:
            TierError: it cannot be reached this way.
        """
        ...

    def leave(self, name: str) -> None:
        """Forgets an agent; transfers from it fail."""
        ...

    def fetch(self, name: str, pieces: Sequence[Piece]) -> Transfer:
        """Begins to read pieces.

        Raises:
            TierError: it cannot begin.
        """
        ...

    def progress(self) -> None:
        """Moves what is under way, others' reads too; returns at once.

        Raises:
            TierError: the transport has failed.
        """
        ...
