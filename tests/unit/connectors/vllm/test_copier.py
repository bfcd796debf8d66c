"""The copy thread: order, failures, fences."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from kvist.connectors.fallback import Fallback
from kvist.connectors.vllm import copier as copier_module
from kvist.connectors.vllm.copier import Copier, Finished, JobKind, Moved, copy_cpus
from kvist.connectors.vllm.messages import CopyJob

LIMIT_S = 10.0


class SteeredMover:
    """Waits at the gate, fails where told, remembers the order."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Event()
        self.failing: set[int] = set()
        self.order: list[int] = []
        self.wide: list[bool] = []

    def move(self, kind: JobKind, job: CopyJob, *, wide: bool) -> Moved:
        self.wide.append(wide)
        self.started.set()
        assert self.gate.wait(LIMIT_S)
        self.order.append(job.job_id)
        if job.job_id in self.failing:
            raise OSError("this copy fails")
        return Moved(100, {slot: slot + 1 for slot in job.slots})


def job(number: int) -> CopyJob:
    return CopyJob(number, f"r{number}", (0,), ((number,),))


@pytest.fixture
def mover() -> SteeredMover:
    return SteeredMover()


@pytest.fixture
def copier(mover: SteeredMover) -> Iterator[Copier]:
    copier = Copier(mover, Fallback())
    yield copier
    mover.gate.set()
    copier.close(LIMIT_S)


def collect(copier: Copier, count: int) -> Finished:
    """Everything, once `count` jobs have ended."""
    total = Finished()
    for _ in range(int(LIMIT_S * 100)):
        copier.wait_for_any(0.01)
        done = copier.take()
        total.jobs += done.jobs
        total.failed |= done.failed
        total.checksums |= done.checksums
        total.copied_bytes += done.copied_bytes
        if len(total.jobs) >= count:
            return total
    raise AssertionError("jobs did not end")


def hold(copier: Copier, mover: SteeredMover, number: int = 0) -> None:
    """Keeps the thread inside a save, so that what follows stays queued."""
    mover.gate.clear()
    copier.submit(JobKind.SAVE, job(number))
    assert mover.started.wait(LIMIT_S)


def test_loads_go_before_saves_and_each_in_order(copier: Copier, mover: SteeredMover) -> None:
    hold(copier, mover)
    for number, kind in (
        (1, JobKind.SAVE),
        (2, JobKind.LOAD),
        (3, JobKind.SAVE),
        (4, JobKind.LOAD),
    ):
        copier.submit(kind, job(number))
    mover.gate.set()
    collect(copier, 5)
    assert mover.order == [0, 2, 4, 1, 3]


def test_failed_job_is_reported_and_the_next_is_done(copier: Copier, mover: SteeredMover) -> None:
    mover.failing = {1}
    for number in (1, 2):
        copier.submit(JobKind.LOAD, job(number))
    done = collect(copier, 2)
    assert done.failed == {1}
    assert [(kind, j.job_id) for kind, j in done.jobs] == [(JobKind.LOAD, 1), (JobKind.LOAD, 2)]
    assert done.copied_bytes == 100
    assert copier.pending() == 0


def test_a_job_in_parts_reports_the_checksums_of_all_and_a_failed_one_none(
    copier: Copier, mover: SteeredMover
) -> None:
    slots = tuple(range(0, 200, 10))  # more than one part holds
    copier.submit(JobKind.SAVE, CopyJob(1, "r", slots, tuple((n,) for n in slots)))
    assert collect(copier, 1).checksums == {slot: slot + 1 for slot in slots}
    assert mover.order.count(1) > 1
    mover.failing = {2}
    copier.submit(JobKind.SAVE, job(2))
    assert collect(copier, 1).checksums == {}


def test_what_must_come_before_runs_on_the_copy_thread(copier: Copier) -> None:
    names: list[str] = []
    copier.submit(JobKind.SAVE, job(1), lambda: names.append(threading.current_thread().name))
    collect(copier, 1)
    assert names == ["kvist-copy"]


def test_failing_wait_for_the_device_fails_the_save(copier: Copier, mover: SteeredMover) -> None:
    def broken() -> None:
        raise RuntimeError("the device is gone")

    copier.submit(JobKind.SAVE, job(1), broken)
    assert collect(copier, 1).failed == {1}
    assert mover.order == []


def test_drain_waits_for_saves_that_are_under_way(copier: Copier, mover: SteeredMover) -> None:
    hold(copier, mover)
    threading.Timer(0.05, mover.gate.set).start()
    assert copier.drain_saves(LIMIT_S)
    done = copier.take()
    assert [j.job_id for _, j in done.jobs] == [0]
    assert done.failed == set()


def test_drain_that_times_out_spoils_every_late_save(copier: Copier, mover: SteeredMover) -> None:
    """Their pages are overwritten from here on: what they copy must never be committed."""
    hold(copier, mover, 1)
    copier.submit(JobKind.SAVE, job(2))
    assert not copier.drain_saves(0.01)
    mover.gate.set()
    assert collect(copier, 2).failed == {1, 2}
    copier.submit(JobKind.SAVE, job(3))
    assert collect(copier, 1).failed == set()


def test_drain_does_not_wait_for_loads(copier: Copier, mover: SteeredMover) -> None:
    mover.gate.clear()
    copier.submit(JobKind.LOAD, job(1))
    assert copier.drain_saves(0)


def test_close_finishes_what_is_queued(mover: SteeredMover) -> None:
    copier = Copier(mover, Fallback())
    for number in range(5):
        copier.submit(JobKind.SAVE, job(number))
    copier.close(LIMIT_S)
    assert len(copier.take().jobs) == 5


def test_copy_is_wide_only_where_no_forward_pass_runs(copier: Copier, mover: SteeredMover) -> None:
    copier.submit(JobKind.LOAD, job(1), wide=True)
    collect(copier, 1)
    copier.submit(JobKind.LOAD, job(2))
    collect(copier, 1)
    assert mover.wide == [True, False]


@pytest.mark.parametrize(("mine", "want"), [({0}, {1, 2, 3}), ({0, 1, 2, 3}, {0, 1, 2, 3})])
def test_copy_thread_avoids_the_cores_that_the_engine_is_pinned_to(
    monkeypatch: pytest.MonkeyPatch, mine: set[int], want: set[int]
) -> None:
    monkeypatch.setattr(copier_module, "ALL_CPUS", {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: mine)
    assert copy_cpus() == want


def test_long_save_is_cut_so_that_a_load_can_go_between_and_is_reported_once(
    copier: Copier, mover: SteeredMover
) -> None:
    hold(copier, mover)
    blocks = 40
    long = CopyJob(1, "a", tuple(range(blocks)), tuple((i,) for i in range(blocks)))
    copier.submit(JobKind.SAVE, long)
    copier.submit(JobKind.LOAD, job(2))
    mover.gate.set()
    done = collect(copier, 3)
    assert [j.job_id for _, j in done.jobs] == [0, 2, 1]
    assert done.jobs[-1] == (JobKind.SAVE, long)
    parts = [number for number in mover.order if number == 1]
    assert len(parts) > 1
