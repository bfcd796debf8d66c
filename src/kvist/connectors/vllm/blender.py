"""The worker's part of a blend: cached rows are moved to where they stand now, and repaired.

Rows come from the arena (canonical blocks) and, for what the engine has computed itself, from its
own pages; the result goes to the request's new pages. Nothing is written before all is computed.
It runs on the engine's thread, between forward passes: what other requests wait for it is what
the repair costs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from kvist.accel.blend.model import BlendModel
from kvist.accel.blend.relocate import Relocation
from kvist.accel.blend.repair import RepairOutcome, repair
from kvist.accel.blend.schedule import RepairPlan
from kvist.connectors.plan import SKIP_PAGE
from kvist.connectors.vllm.messages import BlendJob, BlendNote, RowRun
from kvist.connectors.vllm.movers import CpuPages
from kvist.core.errors import LayoutError, LeaseError
from kvist.core.layout import BlockLayout
from kvist.native import Direction
from kvist.tiers.dram import ArenaMap


class CpuBlender:
    """Blends on a CPU engine of one rank."""

    def __init__(
        self,
        model: BlendModel,
        dtype: torch.dtype,
        arena: ArenaMap,
        layout: BlockLayout,
        pages: CpuPages,
        *,
        base: int = 0,
    ) -> None:
        """`base` is what offsets into `arena` begin with."""
        self._model, self._dtype = model, dtype
        self._arena, self._layout, self._pages = arena, layout, pages
        self._base = base

    def blend(self, job: BlendJob) -> BlendNote:
        """Fills the pages of a job's region; where it deviates too much, all of it is computed.

        Raises:
            LayoutError: the job's rows and pages do not belong together.
            LeaseError: its blocks are in another arena.
        """
        began_s = time.perf_counter()
        _check(job)
        with torch.inference_mode():
            kv = self._gather(job)
            cached = torch.zeros(len(job.tokens), dtype=torch.bool)
            for run in job.runs:
                cached[run.start : run.stop] = True
                self._fetch(run, kv)
            self._move(job.runs, kv[:, 0])
            plan = RepairPlan(job.ratio, most_deviation_ratio=job.most_deviation_ratio)
            done = repair(
                self._model,
                torch.tensor(job.tokens, dtype=torch.int64),
                kv[:, 0],
                kv[:, 1],
                cached,
                plan,
                exact_tokens=job.exact_tokens,
            )
            self._pages.move(Direction.SCATTER, kv, self._split(job)[1])
        took_s = time.perf_counter() - began_s
        blended = done.outcome is not RepairOutcome.DEVIATES
        return BlendNote(blended, done.repaired_tokens, done.deviation_ratio, took_s)

    def _gather(self, job: BlendJob) -> Tensor:
        """Room for the region's KV, with the rows that the engine has computed in it."""
        lay = self._layout
        kv = torch.empty(
            (lay.layers, lay.kinds, lay.kv_heads, len(job.tokens), lay.head_dim), dtype=self._dtype
        )
        theirs, _ = self._split(job)
        if job.computed_tokens:
            self._pages.move(Direction.GATHER, kv, theirs)
        return kv

    def _split(self, job: BlendJob) -> tuple[list[int], list[int]]:
        """The job's pages, once with those to be written left out, once those computed before."""
        tokens, pages = len(job.tokens), len(job.pages)
        size = tokens // pages if pages else 0
        if not size or tokens != size * pages or job.computed_tokens % size:
            raise LayoutError(
                f"{tokens} tokens, {job.computed_tokens} of them old, on {pages} pages"
            )
        old = job.computed_tokens // size
        theirs = [*job.pages[:old], *[SKIP_PAGE] * (pages - old)]
        return theirs, [*[SKIP_PAGE] * old, *job.pages[old:]]

    def _fetch(self, run: RowRun, kv: Tensor) -> None:
        """Copies a run's rows from the arena, as they are stored."""
        lay = self._layout
        at, row = run.start, run.first_row
        for slot in run.slots:
            count = min(lay.block_tokens - row, run.stop - at)
            if count <= 0:
                break
            block = torch.frombuffer(self._slot(slot), dtype=self._dtype).view(
                lay.layers, lay.kinds, lay.kv_heads, lay.block_tokens, lay.head_dim
            )
            kv[:, :, :, at : at + count] = block[:, :, :, row : row + count]
            at, row = at + count, 0
        if at != run.stop:
            raise LayoutError(f"{len(run.slots)} blocks do not hold rows {run.start} to {run.stop}")

    def _slot(self, offset: int) -> memoryview:
        """The block at an offset. One outside is of an arena that is not mapped here."""
        at, rest = divmod(offset - self._base, self._arena.slot_bytes)
        if rest or not 0 <= at * self._arena.slot_bytes < self._arena.size_bytes:
            raise LeaseError("the order is for an arena that is not mapped here")
        return self._arena.view(at)[: self._layout.block_bytes]

    def close(self) -> None:
        """Lets go of the arena."""
        self._arena.close()

    def _move(self, runs: Seq[RowRun], keys: Tensor) -> None:
        """Turns the keys of rows that stand elsewhere than they were computed."""
        moved = [run for run in runs if run.start != run.source_start]
        if not moved:
            return
        here = torch.cat([torch.arange(r.start, r.stop) for r in moved])
        there = torch.cat(
            [torch.arange(r.source_start, r.source_start + r.stop - r.start) for r in moved]
        )
        relocation = Relocation(there, here)
        for layer in range(len(keys)):
            rope = self._model.rope(layer)
            keys[layer][:, here] = relocation.apply(keys[layer][:, here], rope)


def _check(job: BlendJob) -> None:
    """The exact prefix is whole, and nothing else claims to be exact or lies outside."""
    at = job.computed_tokens
    for run in job.runs:
        if not at <= run.start < run.stop <= len(job.tokens):
            raise LayoutError(f"rows {run.start} to {run.stop} overlap others or lie outside")
        if run.start < job.exact_tokens and (run.source_start, run.start) != (at, at):
            raise LayoutError(f"rows from {at} to {job.exact_tokens} are not those of a prefix")
        at = run.stop
    if job.exact_tokens > job.computed_tokens and not any(
        run.stop == job.exact_tokens for run in job.runs
    ):
        raise LayoutError(f"no rows reach the end of the prefix at {job.exact_tokens}")
