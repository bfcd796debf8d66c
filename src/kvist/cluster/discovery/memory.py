"""Discovery in one process: the reference, for tests and simulations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvist.cluster.record import NodeRecord


@dataclass(slots=True)
class Board:
    """What nodes of one process share: records, and when each is over."""

    notes: dict[str, tuple[NodeRecord, float]] = field(default_factory=dict)


class MemoryDiscovery:
    """A `Discovery` over a `Board`. `clock` gives seconds that never go back."""

    def __init__(self, board: Board, clock: Callable[[], float]) -> None:
        self._board = board
        self._clock = clock

    def announce(self, record: NodeRecord, *, ttl_s: float) -> None:
        self._board.notes[record.node] = (record, self._clock() + ttl_s)

    def withdraw(self, node: str) -> None:
        self._board.notes.pop(node, None)

    def members(self) -> list[NodeRecord]:
        now_s = self._clock()
        for node, (_, over_s) in list(self._board.notes.items()):
            if over_s <= now_s:
                del self._board.notes[node]
        return [self._board.notes[node][0] for node in sorted(self._board.notes)]

    def close(self) -> None:
        return
