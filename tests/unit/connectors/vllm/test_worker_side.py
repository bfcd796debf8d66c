"""The worker's half: orders in, reports out; a failing copy hangs nobody."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from vllm_fakes import ARENA

from kvist.connectors.plan import SKIP_PAGE
from kvist.connectors.vllm import worker_side
from kvist.connectors.vllm.copier import JobKind, Moved, Mover
from kvist.connectors.vllm.messages import BlendJob, BlendNote, CopyJob, StepPlan, StepReport
from kvist.connectors.vllm.worker_side import HostWatch, WorkerSide, no_fence
from kvist.tiers.dram import ArenaLocator
from kvist.tiers.warmer import GiveWay

LOAD = CopyJob(1, "a", (0, 100), ((5, 6), (SKIP_PAGE, 7)))
SAVE = CopyJob(2, "b", (200,), ((8,),))


class ListedMover:
    """Remembers what it moved; fails for the kinds in `failing`."""

    def __init__(self) -> None:
        self.moved: list[tuple[JobKind, int]] = []
        self.failing: set[JobKind] = set()

    def move(self, kind: JobKind, job: CopyJob, *, wide: bool) -> Moved:
        del wide
        self.moved.append((kind, job.job_id))
        if kind in self.failing:
            raise OSError("the copy fails")
        return Moved(10, dict.fromkeys(job.slots, 7) if kind is JobKind.SAVE else {})


@pytest.fixture
def mover() -> ListedMover:
    return ListedMover()


@pytest.fixture
def side(mover: ListedMover) -> Iterator[WorkerSide]:
    side = WorkerSide(lambda _arena: mover, no_fence, cpus=None, early_loads=True)
    yield side
    side.close()


def step(side: WorkerSide, plan: StepPlan) -> tuple[set[str], set[str], set[int]]:
    """One engine step: what may be freed, what was received, which pages were not loaded."""
    side.preempted(plan)
    side.begin_step(plan)
    side.after_forward()
    sent, received = side.finished(set())
    return sent, received, side.unloaded_pages()


def until_received(side: WorkerSide) -> tuple[set[str], set[int]]:
    """Steps without a forward pass until a load is reported."""
    for _ in range(5000):
        _, received, pages = step(side, StepPlan(arena=ARENA, idle=True))
        if received:
            return received, pages
    raise AssertionError("the load was never reported: the request would hang")


def until_reported(side: WorkerSide) -> StepReport:
    for _ in range(5000):
        step(side, StepPlan(arena=ARENA, idle=True))
        report = side.report()
        if report is not None and report.done:
            return report
    raise AssertionError("the save was never reported: its pages would be held for ever")


def test_load_is_received_once_its_pages_are_copied(side: WorkerSide, mover: ListedMover) -> None:
    side.begin_step(StepPlan(arena=ARENA, loads=[LOAD]))
    assert until_received(side) == ({"a"}, set())
    assert mover.moved == [(JobKind.LOAD, 1)]
    assert step(side, StepPlan())[1] == set()  # said once


def test_failed_load_names_its_pages_and_is_received_all_the_same(
    side: WorkerSide, mover: ListedMover
) -> None:
    mover.failing = {JobKind.LOAD}
    side.begin_step(StepPlan(arena=ARENA, loads=[LOAD]))
    assert until_received(side) == ({"a"}, {5, 6, 7})
    assert side.unloaded_pages() == set()
    assert side.fallback.take() == {"OSError": 1}


def test_arena_that_cannot_be_mapped_fails_every_copy_at_once() -> None:
    def no_arena(locator: ArenaLocator) -> Mover:
        raise FileNotFoundError("the engine core is gone")

    side = WorkerSide(no_arena, no_fence, cpus=None, early_loads=True)
    plan = StepPlan(arena=ARENA, loads=[LOAD], saves=[SAVE])
    _, received, pages = step(side, plan)
    assert received == {"a"}
    assert pages == {5, 6, 7}
    report = side.report()
    assert report is not None
    assert report.done == {1: 1, 2: 1}
    assert report.failed == {1, 2}


def test_refused_promise_is_reported_with_its_pages(side: WorkerSide) -> None:
    """The scheduler side sends no slots for pages that it promised and cannot fill."""
    side.begin_step(StepPlan(arena=ARENA, loads=[CopyJob(3, "c", (), (), lost=(4, 5))]))
    assert until_received(side) == ({"c"}, {4, 5})


def test_background_work_gives_way_from_the_beginning_of_a_step_to_its_end(
    mover: ListedMover,
) -> None:
    told: list[str] = []

    class Watched(GiveWay):
        def begin(self) -> None:
            told.append("begin")

        def end(self) -> None:
            told.append("end")

    side = WorkerSide(
        lambda _arena: mover, no_fence, cpus=None, early_loads=True, give_way=Watched()
    )
    side.begin_step(StepPlan(arena=ARENA))
    side.after_forward()
    assert told == ["begin"]
    side.finished(set())
    assert told == ["begin", "end"]
    side.close()


def test_saves_start_only_after_the_forward_pass(side: WorkerSide, mover: ListedMover) -> None:
    side.begin_step(StepPlan(arena=ARENA, saves=[SAVE], loads=[LOAD]))
    side.finished(set())
    assert (JobKind.SAVE, 2) not in mover.moved
    side.after_forward()
    report = until_reported(side)
    assert report.done.keys() <= {1, 2}
    assert 2 in report.done
    assert report.failed == set()
    assert mover.moved == [(JobKind.LOAD, 1), (JobKind.SAVE, 2)]


def test_late_loads_start_after_the_forward_pass_where_early_ones_would_disturb_it(
    mover: ListedMover,
) -> None:
    side = WorkerSide(lambda _arena: mover, no_fence, cpus=None, early_loads=False)
    side.begin_step(StepPlan(arena=ARENA, loads=[LOAD]))
    assert side.finished(set()) == (set(), set())
    assert mover.moved == []
    side.after_forward()
    assert until_received(side)[0] == {"a"}
    side.close()


def test_orders_are_carried_out_once_though_hooks_run_twice(
    side: WorkerSide, mover: ListedMover
) -> None:
    plan = StepPlan(arena=ARENA, loads=[LOAD], saves=[SAVE])
    side.begin_step(plan)
    side.after_forward()
    side.after_forward()
    until_reported(side)
    assert sorted(mover.moved) == [(JobKind.LOAD, 1), (JobKind.SAVE, 2)]


def test_save_waits_for_what_the_fence_says(mover: ListedMover) -> None:
    waited: list[str] = []
    side = WorkerSide(
        lambda _arena: mover, lambda: lambda: waited.append("device"), cpus=None, early_loads=True
    )
    step(side, StepPlan(arena=ARENA, saves=[SAVE]))
    until_reported(side)
    assert waited == ["device"]
    side.close()


def test_failed_save_is_reported_as_failed(side: WorkerSide, mover: ListedMover) -> None:
    mover.failing = {JobKind.SAVE}
    step(side, StepPlan(arena=ARENA, saves=[SAVE]))
    assert until_reported(side).failed == {2}


def test_fence_that_times_out_drops_the_late_saves(
    side: WorkerSide, mover: ListedMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, inside = threading.Event(), threading.Event()
    quick = mover.move

    def slow(kind: JobKind, job: CopyJob, *, wide: bool) -> int:
        inside.set()
        assert gate.wait(10)
        return quick(kind, job, wide=wide)

    monkeypatch.setattr(mover, "move", slow)
    monkeypatch.setattr(worker_side, "_FENCE_S", 0.01)
    step(side, StepPlan(arena=ARENA, saves=[SAVE]))
    assert inside.wait(10)
    side.preempted(StepPlan(arena=ARENA, fence=True))
    gate.set()
    assert until_reported(side).failed == {2}


def test_step_without_a_fence_does_not_wait_for_saves(
    side: WorkerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(side, StepPlan(arena=ARENA, saves=[SAVE]))
    until_reported(side)
    assert side._copier is not None

    def never(_timeout_s: float) -> bool:
        raise AssertionError("it waited")

    monkeypatch.setattr(side._copier, "drain_saves", never)
    side.preempted(StepPlan(arena=ARENA))


def test_released_requests_are_passed_on_once(side: WorkerSide) -> None:
    sent, _, _ = step(side, StepPlan(release=["x", "y"]))
    assert sent == {"x", "y"}
    assert side.finished(set())[0] == set()


def test_quiet_step_reports_nothing(side: WorkerSide) -> None:
    step(side, StepPlan(arena=ARENA))
    assert side.report() is None


def test_reports_of_two_ranks_add_up() -> None:
    one = StepReport({1: 1, 2: 1}, {1}, 10, 0.5)
    two = StepReport({1: 1}, set(), 20, 0.25)
    both = one.aggregate(two)
    assert isinstance(both, StepReport)
    assert both == StepReport({1: 2, 2: 1}, {1}, 30, 0.75)


def test_the_pass_of_a_timed_step_is_reported_and_no_other(mover: ListedMover) -> None:
    now = iter([1.0, 1.5, 7.0, 9.0])
    watch = HostWatch(lambda: next(now))
    side = WorkerSide(lambda _arena: mover, no_fence, cpus=None, early_loads=True, watch=watch)
    passes = []
    for timed in (3, 0, 4):
        step(side, StepPlan(timed=timed))
        report = side.report()
        passes.append(report.passes if report else None)
    assert passes == [{3: 0.5}, None, {4: 2.0}]


def test_of_several_ranks_the_slowest_says_how_long_a_pass_took() -> None:
    one, two = StepReport(passes={1: 0.5}), StepReport(passes={1: 0.7, 2: 0.1})
    merged = one.aggregate(two)
    assert isinstance(merged, StepReport)
    assert merged.passes == {1: 0.7, 2: 0.1}


BLEND = BlendJob(5, "d", (1, 2, 3, 4, 5, 6), 2, 2, (), (20, 21, 22), 0.15, 1.0)


class FakeBlender:
    """Answers with `note`, or raises."""

    def __init__(self, note: BlendNote | None) -> None:
        self.note = note
        self.jobs: list[BlendJob] = []
        self.closed = False

    def blend(self, job: BlendJob) -> BlendNote:
        self.jobs.append(job)
        if self.note is None:
            raise RuntimeError("the model fails")
        return self.note

    def close(self) -> None:
        self.closed = True


def test_a_blend_is_made_in_the_arena_that_the_step_is_for() -> None:
    made: dict[int, FakeBlender] = {}
    note = BlendNote(blended=True, repaired_tokens=3, deviation_ratio=0.1, seconds=0.2)

    def make(locator: ArenaLocator) -> FakeBlender:
        made[locator.base] = FakeBlender(note)
        return made[locator.base]

    side = WorkerSide(
        lambda _arena: ListedMover(), no_fence, cpus=None, early_loads=True, make_blender=make
    )
    for base in (0, 0, 4):
        step(side, StepPlan(arena=ArenaLocator(1, 2, 3, 4, base=base), blends=[BLEND]))
    assert [len(blender.jobs) for blender in made.values()] == [2, 1]
    assert [blender.closed for blender in made.values()] == [True, False]
    side.close()
    assert made[4].closed


def blend_step(blender: FakeBlender | None) -> tuple[set[str], set[int], StepReport]:
    """One step with a blend: what was received, which pages were lost, and the report."""
    side = WorkerSide(
        lambda _arena: ListedMover(),
        no_fence,
        cpus=None,
        early_loads=True,
        make_blender=None if blender is None else lambda _arena: blender,
    )
    plan = StepPlan(arena=ARENA, blends=[BLEND])
    side.begin_step(plan)
    if blender is not None:
        assert blender.jobs == []  # not before the forward pass, which fills pages it may read
    _, received, pages = step(side, plan)
    report = side.report()
    side.close()
    assert report is not None
    return received, pages, report


def test_blend_is_received_with_its_note() -> None:
    note = BlendNote(blended=True, repaired_tokens=3, deviation_ratio=0.1, seconds=0.2)
    received, pages, report = blend_step(FakeBlender(note))
    assert received == {"d"}
    assert pages == set()
    assert report.done == {5: 1}
    assert report.blends == {5: note}
    assert report.can_blend is True


@pytest.mark.parametrize("blender", [FakeBlender(None), None])
def test_blend_that_fails_names_its_pages_and_is_received_all_the_same(
    blender: FakeBlender | None,
) -> None:
    received, pages, report = blend_step(blender)
    assert received == {"d"}
    assert pages == {21, 22}
    assert report.failed == {5}
    assert report.blends == {}


def test_a_rank_says_once_that_it_can_blend() -> None:
    side = WorkerSide(
        lambda _arena: ListedMover(),
        no_fence,
        cpus=None,
        early_loads=True,
        make_blender=lambda _arena: FakeBlender(None),
    )
    first, second = side.report(), side.report()
    assert first is not None
    assert first.can_blend is True
    assert second is None
    side.close()
