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


@dataclass
class StepPlan(KVConnectorMetadata):
    """One step's orders to the workers."""

    arena: ArenaLocator | None = None
    loads: list[CopyJob] = field(default_factory=list)
    saves: list[CopyJob] = field(default_factory=list)
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

    def empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self.done or self.copied_bytes or self.passes)

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
        )
