"""What the scheduler side tells the worker side each step, and what comes back.

vLLM pickles these between its own processes; they hold plain numbers and strings only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvist.tiers.dram import ArenaLocator


@dataclass(frozen=True, slots=True)
class CopyJob:
    """Blocks to copy between arena slots and engine pages.

    `slots[i]` is a byte offset in the arena, `pages[i]` the page ids of block i
    (`plan.SKIP_PAGE` = leave that page alone). `lost` are pages that a load promised and will not
    fill.
    """

    job_id: int
    req_id: str
    slots: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]
    lost: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RowRun:
    """Rows `[start, stop)` of a prompt that lie in the arena, computed at `source_start` and on.

    `slots` are byte offsets of canonical blocks, in order; the first row is row `first_row` of the
    first of them.
    """

    start: int
    stop: int
    source_start: int
    first_row: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlendJob:
    """KV to be made of cached rows for the pages of one request.

    `tokens` and `pages` are those of the prompt from its start to the end of the region. The first
    `computed_tokens` are in the pages already; up to `exact_tokens` the rows need no repair.
    """

    job_id: int
    req_id: str
    tokens: tuple[int, ...]
    computed_tokens: int
    exact_tokens: int
    runs: tuple[RowRun, ...]
    pages: tuple[int, ...]
    ratio: float
    most_deviation_ratio: float

    def lost(self) -> tuple[int, ...]:
        """Pages that hold nothing if the job fails."""
        return self.pages[self.computed_tokens * len(self.pages) // len(self.tokens) :]


@dataclass(frozen=True, slots=True)
class BlendNote:
    """How a blend went; not `blended`: it deviates too much, so all of it was computed."""

    blended: bool
    repaired_tokens: int
    deviation_ratio: float
    seconds: float


@dataclass
class StepPlan(KVConnectorMetadata):
    """One step's orders to the workers."""

    arena: ArenaLocator | None = None
    loads: list[CopyJob] = field(default_factory=list)
    saves: list[CopyJob] = field(default_factory=list)
    blends: list[BlendJob] = field(default_factory=list)
    fence: bool = False  # pages of unfinished saves are about to be overwritten: finish them now
    release: list[str] = field(default_factory=list)  # finished requests whose pages may go
    idle: bool = False  # no forward pass in this step
    timed: int = 0  # number of this step if its forward pass is to be timed, else 0


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """What the workers finished: job id → ranks done with it (well or badly), and what failed.

    `checksums`: arena slot → checksum of the saved block, where one rank fills whole blocks.
    `passes`: timed step → seconds of its forward pass, of the slowest rank.
    """

    done: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    copied_bytes: int = 0
    copy_s: float = 0.0
    loaded_bytes: int = 0  # of `copied_bytes`
    load_s: float = 0.0  # of `copy_s`
    checksums: dict[int, int] = field(default_factory=dict)
    passes: dict[int, float] = field(default_factory=dict)
    blends: dict[int, BlendNote] = field(default_factory=dict)  # by job, of those that did not fail
    can_blend: bool | None = None  # told once

    def empty(self) -> bool:
        """Whether there is nothing to tell."""
        told = self.can_blend is not None
        return not (self.done or self.copied_bytes or self.passes or told)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, StepReport)
        done = dict(self.done)
        for job, ranks in other.done.items():
            done[job] = done.get(job, 0) + ranks
        passes = dict(self.passes)
        for step, seconds in other.passes.items():
            passes[step] = max(passes.get(step, 0.0), seconds)
        return StepReport(
            done,
            self.failed | other.failed,
            self.copied_bytes + other.copied_bytes,
            self.copy_s + other.copy_s,
            self.loaded_bytes + other.loaded_bytes,
            self.load_s + other.load_s,
            self.checksums | other.checksums,
            passes,
            self.blends | other.blends,
            self.can_blend if other.can_blend is None else other.can_blend,
        )
