"""The worker's half of the connector: maps the arena, copies blocks, reports.

Nothing here decides anything. Loads start as soon as their orders arrive, saves when the forward
pass that fills their pages is over, both on the copy thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from kvist.connectors.fallback import Fallback
from kvist.connectors.plan import SKIP_PAGE
from kvist.connectors.vllm.arenas import ArenaMovers
from kvist.connectors.vllm.copier import Copier, JobKind, Mover
from kvist.connectors.vllm.messages import BlendJob, BlendNote, CopyJob, StepPlan, StepReport
from kvist.core.errors import LeaseError
from kvist.tiers.dram import ArenaLocator
from kvist.tiers.warmer import GiveWay

log = logging.getLogger("kvist.vllm")

_FENCE_S = 10.0  # longest a step waits for saves whose pages it is about to overwrite
_NAP_S = 0.02  # longest an empty step waits for a copy to end
_CLOSE_S = 10.0


class Blender(Protocol):
    """Makes KV of cached rows and writes it to pages; synchronous; raises when it cannot."""

    def blend(self, job: BlendJob) -> BlendNote:
        """Computes and writes; says whether the result is blended or that of a whole pass."""
        ...

    def close(self) -> None:
        """Lets go of the arena."""
        ...


MakeMover = Callable[[ArenaLocator], Mover]
MakeBlender = Callable[[ArenaLocator], Blender]
Fence = Callable[[], Callable[[], None] | None]


class StopWatch(Protocol):
    """Times forward passes; the time of one may be known some steps later."""

    def start(self, step: int) -> None:
        """The pass of `step` is about to be launched."""
        ...

    def stop(self) -> None:
        """It was launched."""
        ...

    def take(self) -> dict[int, float]:
        """Seconds of passes that have ended since the last call."""
        ...


class HostWatch:
    """A pass is over when it returns."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began: tuple[int, float] | None = None
        self._done: dict[int, float] = {}

    def start(self, step: int) -> None:
        """The pass of `step` begins."""
        self._began = step, self._clock()

    def stop(self) -> None:
        """It is over."""
        if self._began is not None:
            step, began = self._began
            self._began, self._done[step] = None, self._clock() - began

    def take(self) -> dict[int, float]:
        """Seconds of passes since the last call."""
        done, self._done = self._done, {}
        return done


class WorkerSide:
    """State of one rank. Called by vLLM's worker thread only.

    `make_mover` maps the arena and may fail: then every copy fails, which is a recompute.
    `fence` is called after a forward pass is launched and returns what a save must wait for.
    `give_way` is told of every step.
    `make_blender` maps the arena as `make_mover` does; `None` where nothing is blended.
    """

    def __init__(
        self,
        make_mover: MakeMover,
        fence: Fence,
        *,
        cpus: set[int] | None,
        early_loads: bool,
        watch: StopWatch | None = None,
        give_way: GiveWay | None = None,
        make_blender: MakeBlender | None = None,
    ) -> None:
        self.fallback = Fallback()
        self._movers, self._fence = ArenaMovers(make_mover), fence
        self._watch, self._give_way = watch or HostWatch(), give_way or GiveWay()
        self._cpus, self._early_loads = cpus, early_loads
        self._copier: Copier | None = None
        self._make_blender = make_blender
        self._blender: tuple[ArenaLocator, Blender] | None = None
        self._told = False  # that this rank can blend
        self._plan = StepPlan()
        self._received: set[str] = set()
        self._unloaded: set[int] = set()
        self._report = StepReport()

    def begin_step(self, plan: StepPlan) -> None:
        """Orders for this step have arrived; the forward pass has not begun."""
        self._plan = plan
        self._give_way.begin()
        self._open_copier()
        if self._early_loads:
            self._start_loads()
        if plan.timed:
            self._watch.start(plan.timed)

    def preempted(self, plan: StepPlan) -> None:
        """Pages are about to be overwritten; saves that still read them must end first."""
        if plan.fence and self._copier is not None and not self._copier.drain_saves(_FENCE_S):
            log.warning("kvist: saves did not end within %g s; they are dropped", _FENCE_S)

    def after_forward(self) -> None:
        """The forward pass was launched (or there was none)."""
        if self._plan.timed:
            self._watch.stop()
        self._start_loads()
        blends, self._plan.blends = self._plan.blends, []
        for blend in blends:
            self._blend(blend)
        saves, self._plan.saves = self._plan.saves, []
        if saves:
            before = self._fence()
            for job in saves:
                self._submit(JobKind.SAVE, job, before)

    def finished(self, over: set[str]) -> tuple[set[str], set[str]]:
        """Requests whose pages may be freed, and requests whose load has ended."""
        del over  # the scheduler side says itself which pages were kept
        if self._copier is not None:
            if self._plan.idle and self._copier.pending():
                self._copier.wait_for_any(_NAP_S)
            self._collect(self._copier)
            if self._movers.retirable and not self._copier.pending():
                self._movers.retire()
        sent, self._plan.release = set(self._plan.release), []
        received, self._received = self._received, set()
        self._give_way.end()
        return sent, received

    def unloaded_pages(self) -> set[int]:
        """Pages whose load failed since the last call."""
        pages, self._unloaded = self._unloaded, set()
        return pages

    def report(self) -> StepReport | None:
        """What the scheduler side must know of this step, if anything."""
        report, self._report = self._report, StepReport()
        report.passes = self._watch.take()
        if self._make_blender is not None and not self._told:
            self._told = report.can_blend = True
        return None if report.empty() else report

    def close(self) -> None:
        """Ends the copy thread."""
        if self._copier is not None:
            self._copier.close(_CLOSE_S)
        if self._blender is not None:
            self._blender[1].close()

    # -- inside -----------------------------------------------------------------------------

    def _start_loads(self) -> None:
        loads, self._plan.loads = self._plan.loads, []
        for job in loads:
            self._submit(JobKind.LOAD, job, None)

    def _blend(self, job: BlendJob) -> None:
        """On this thread: the engine's modules are not made for two, and its pages lie still."""
        note = self.fallback.guard("blend", lambda: self._open_blender().blend(job), default=None)
        self._report.done[job.job_id] = 1
        if note is None:
            self._report.failed.add(job.job_id)
            self._unloaded.update(job.lost())
        else:
            self._report.blends[job.job_id] = note
        self._received.add(job.req_id)

    def _open_blender(self) -> Blender:
        """The blender of the arena that this step's orders are for."""
        arena = self._plan.arena
        if self._make_blender is None or arena is None:
            raise LeaseError("this rank cannot blend")
        if self._blender is None or self._blender[0] != arena:
            if self._blender is not None:
                self._blender[1].close()
                self._blender = None
            self._blender = arena, self._make_blender(arena)
        return self._blender[1]

    def _submit(self, kind: JobKind, job: CopyJob, before: Callable[[], None] | None) -> None:
        copier = self._open_copier()
        if copier is None:
            self._ended(kind, job, failed=True)
        else:
            copier.submit(kind, job, before, wide=self._plan.idle)

    def _open_copier(self) -> Copier | None:
        arena = self._plan.arena
        if arena is not None and not self._movers.knows(arena):
            mapped = self.fallback.guard(
                "map arena", lambda: self._movers.add(arena), default=False
            )
            if mapped and self._copier is None:
                self._copier = Copier(self._movers, self.fallback, self._cpus)
        return self._copier

    def _collect(self, copier: Copier) -> None:
        done = copier.take()
        for kind, job in done.jobs:
            self._ended(kind, job, failed=job.job_id in done.failed)
        self._report.checksums.update(done.checksums)
        self._report.copied_bytes += done.copied_bytes
        self._report.copy_s += done.copy_s
        self._report.loaded_bytes += done.loaded_bytes
        self._report.load_s += done.load_s

    def _ended(self, kind: JobKind, job: CopyJob, *, failed: bool) -> None:
        self._report.done[job.job_id] = 1
        if failed:
            self._report.failed.add(job.job_id)
        if kind is JobKind.SAVE:
            return
        self._unloaded.update(job.lost)
        if failed:
            self._unloaded.update(p for row in job.pages for p in row if p != SKIP_PAGE)
        self._received.add(job.req_id)


def no_fence() -> Any:
    """On a CPU the forward pass is over when it returns."""
    return None
