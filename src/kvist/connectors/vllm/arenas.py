"""The arenas that a worker has mapped: one, or two while a node gives way to the next.

An order names slots by offsets that are numbered through over all arenas of an engine (`base` of
their locators). One for an arena that is not mapped is refused: its bytes are elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from kvist.connectors.vllm.copier import JobKind, Moved, Mover
from kvist.connectors.vllm.messages import CopyJob
from kvist.core.errors import LeaseError
from kvist.tiers.dram import ArenaLocator


@runtime_checkable
class Closes(Protocol):
    """A mover that lets go of its arena."""

    def close(self) -> None:
        """Nothing is copied any more."""
        ...


@dataclass(frozen=True, slots=True)
class _Mapped:
    locator: ArenaLocator
    mover: Mover

    def holds(self, slots: tuple[int, ...]) -> bool:
        first = self.locator.base
        return first <= min(slots) and max(slots) < first + self.locator.size_bytes


class ArenaMovers:
    """Moves each job by the mover of its arena. `move` may run beside all else."""

    def __init__(self, make_mover: Callable[[ArenaLocator], Mover]) -> None:
        """`make_mover` maps an arena and may fail."""
        self._make_mover = make_mover
        self._mapped: tuple[_Mapped, ...] = ()

    def knows(self, locator: ArenaLocator) -> bool:
        """Whether this arena is mapped."""
        return any(mapped.locator == locator for mapped in self._mapped)

    def add(self, locator: ArenaLocator) -> bool:
        """Maps an arena; the last one stays mapped for jobs that are under way."""
        mapped = _Mapped(locator, self._make_mover(locator))
        self._mapped = (*self._mapped, mapped)
        return True

    def retire(self) -> None:
        """No job is under way: lets go of every arena but the last."""
        *old, last = self._mapped
        self._mapped = (last,)
        for mapped in old:
            if isinstance(mapped.mover, Closes):
                mapped.mover.close()

    @property
    def retirable(self) -> bool:
        """Whether an old arena is still mapped."""
        return len(self._mapped) > 1

    def move(self, kind: JobKind, job: CopyJob, *, wide: bool) -> Moved:
        """Copies.

        Raises:
            LeaseError: the job is for an arena that is not mapped.
        """
        if not job.slots:
            return Moved(0)
        mapped = next((m for m in self._mapped if m.holds(job.slots)), None)
        if mapped is None:
            raise LeaseError("the order is for an arena that is not mapped here")
        base = mapped.locator.base
        if not base:
            return mapped.mover.move(kind, job, wide=wide)
        inside = replace(job, slots=tuple(slot - base for slot in job.slots))
        moved = mapped.mover.move(kind, inside, wide=wide)
        return replace(moved, checksums={s + base: c for s, c in moved.checksums.items()})
