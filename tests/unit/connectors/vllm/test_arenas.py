"""A worker copies in the arena that an order was meant for, or not at all."""

from __future__ import annotations

import pytest

from kvist.connectors.vllm.arenas import ArenaMovers
from kvist.connectors.vllm.copier import JobKind, Moved
from kvist.connectors.vllm.messages import CopyJob, StepPlan
from kvist.connectors.vllm.worker_side import WorkerSide, no_fence
from kvist.core.errors import LeaseError
from kvist.tiers.dram import ArenaLocator

FIRST = ArenaLocator(1, 3, 1 << 20, 4096)
SECOND = ArenaLocator(1, 5, 1 << 20, 4096, 1 << 48)


class NamedMover:
    """Remembers which slots it was asked for."""

    def __init__(self, locator: ArenaLocator) -> None:
        self.locator = locator
        self.slots: list[int] = []
        self.closed = False

    def move(self, kind: JobKind, job: CopyJob, *, wide: bool) -> Moved:
        self.slots += job.slots
        return Moved(1, dict.fromkeys(job.slots, 7))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def made() -> list[NamedMover]:
    return []


@pytest.fixture
def movers(made: list[NamedMover]) -> ArenaMovers:
    def make(locator: ArenaLocator) -> NamedMover:
        made.append(NamedMover(locator))
        return made[-1]

    return ArenaMovers(make)


def load(*slots: int) -> CopyJob:
    return CopyJob(1, "a", slots, tuple((i,) for i in range(len(slots))))


def test_each_order_goes_to_its_own_arena(movers: ArenaMovers, made: list[NamedMover]) -> None:
    movers.add(FIRST)
    movers.add(SECOND)
    movers.move(JobKind.LOAD, load(0, 4096), wide=False)
    moved = movers.move(JobKind.SAVE, load(SECOND.base + 8192), wide=False)
    assert [mover.slots for mover in made] == [[0, 4096], [8192]]
    assert dict(moved.checksums) == {SECOND.base + 8192: 7}


def test_order_for_an_arena_that_is_not_mapped_is_refused(
    movers: ArenaMovers, made: list[NamedMover]
) -> None:
    """The node died between the order and its copy; the same offset now means other bytes."""
    movers.add(SECOND)
    for slots in ((0,), (SECOND.base, 0), (SECOND.base + SECOND.size_bytes,)):
        with pytest.raises(LeaseError):
            movers.move(JobKind.LOAD, load(*slots), wide=False)
    assert made[0].slots == []


def test_old_arena_is_let_go_when_no_job_is_under_way(
    movers: ArenaMovers, made: list[NamedMover]
) -> None:
    movers.add(FIRST)
    assert not movers.retirable
    movers.add(SECOND)
    assert movers.retirable
    movers.retire()
    assert [mover.closed for mover in made] == [True, False]
    assert not movers.knows(FIRST)
    assert movers.knows(SECOND)


def test_worker_maps_the_arena_of_the_next_node(made: list[NamedMover]) -> None:
    def make(locator: ArenaLocator) -> NamedMover:
        made.append(NamedMover(locator))
        return made[-1]

    side = WorkerSide(make, no_fence, cpus=None, early_loads=True)
    try:
        for arena, slot, failed in (
            (FIRST, 0, False),
            (None, 4096, False),  # the node is away; what was ordered before is still copied
            (SECOND, 8192, False),  # an order of the first arena in the second's first step
            (SECOND, 12288, True),  # the first arena is gone
            (SECOND, SECOND.base, False),
        ):
            job = load(slot)
            side.begin_step(StepPlan(arena=arena, loads=[job], idle=True))
            received: set[str] = set()
            for _ in range(200):
                received |= side.finished(set())[1]
                if received:
                    break
            assert received == {"a"}
            assert bool(side.unloaded_pages()) is failed
        assert [mover.slots for mover in made] == [[0, 4096, 8192], [0]]
        assert [mover.closed for mover in made] == [True, False]
        assert dict(side.fallback.take()) == {"LeaseError": 1}
    finally:
        side.close()
