"""The scheduler's half of the connector: owns the store, decides, and never touches pages.

Life of a load: `match` finds blocks → `read` leases them (bytes move up from SSD meanwhile and the
engine is told to ask again) → only blocks that are in DRAM with their checksum proven are promised
→ the engine allocates pages → workers copy → the lease is released when every rank reports.

Life of a save: a step fills blocks → slots are reserved → workers copy after the forward pass →
when every rank reports, the blocks are committed. A finished request's pages are kept until then.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence as Seq
from typing import Any

from kvist.connectors.fallback import Fallback
from kvist.connectors.plan import load_span
from kvist.connectors.vllm.engine_facts import EngineFacts
from kvist.connectors.vllm.event_feed import EventFeed
from kvist.connectors.vllm.messages import CopyJob, StepPlan, StepReport
from kvist.connectors.vllm.sequences import Load, Save, Scopes, Sequence, new_chain, usable
from kvist.connectors.vllm.stats import Tally
from kvist.core.errors import LeaseError, NoSpaceError
from kvist.core.lease import BlockStore
from kvist.core.outcome import BlockRef, Tier
from kvist.tiers.dram import ArenaLocator

_NAP_S = 0.0005  # between empty steps while bytes move; no forward pass is waiting


class SchedulerSide:
    """State of one engine. Called by vLLM's scheduler thread only."""

    def __init__(
        self,
        store: BlockStore,
        arena: ArenaLocator,
        facts: EngineFacts,
        feed: EventFeed,
        *,
        load: bool,
        save: bool,
        save_decode: bool,
        min_load_tokens: int,
        read_deadline_s: float,
    ) -> None:
        self._store, self._arena, self._facts, self._feed = store, arena, facts, feed
        self._load, self._save, self._save_decode = load, save, save_decode
        self._min_load_tokens, self._read_deadline_s = min_load_tokens, read_deadline_s
        self._scopes = Scopes(facts.fingerprint)
        self._live: dict[str, Sequence] = {}
        self._held: dict[str, Sequence] = {}  # finished, but pages still being saved
        self._copying: dict[str, Load] = {}  # loads that workers may be copying
        self._out_loads: list[CopyJob] = []
        self._out_saves: list[CopyJob] = []
        self._release: list[str] = []
        self._acks: dict[int, int] = {}
        self._save_jobs: dict[int, Sequence] = {}
        self._failed: set[int] = set()
        self._next_job = 0
        self._nap = threading.Event()
        self.tally = Tally()
        self.fallback = Fallback()

    # -- requests come and go ---------------------------------------------------------------

    def arrive(self, request: Any) -> None:
        """A new request; one whose KV cannot be named is simply not known here."""
        if usable(request):
            chain = new_chain(
                request, self._scopes.seed(request), self._facts.geometry.block_tokens
            )
            self._live[request.request_id] = Sequence(request, chain)

    def finish(self, request: Any, table: Seq[int]) -> bool:
        """The request is over; true if its pages must be kept until its saves are done."""
        seq = self._live.pop(request.request_id, None)
        if seq is None:
            return False
        seq.drop_load()
        if request.request_id in self._copying:
            return False  # aborted while loading: vLLM keeps the pages until the load reports
        self.fallback.guard(
            "save at finish",
            lambda: self._offer(seq, request.num_computed_tokens, table),
            default=None,
        )
        if seq.saves:
            self._held[request.request_id] = seq
        return bool(seq.saves)

    def busy(self) -> bool:
        """Whether the engine must keep stepping for us to hear of copies under way."""
        return bool(self._save_jobs or self._copying or self._release)

    # -- loads ------------------------------------------------------------------------------

    def matched(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond `computed_tokens` that are ready to load; `None` = ask again."""
        seq = self._live.get(request.request_id)
        if seq is None or not self._load or seq.no_load or request.skip_reading_prefix_cache:
            return 0, False
        load = seq.load
        if load is not None and computed_tokens < load.span.first * self._block_tokens:
            seq.drop_load()  # the engine lost blocks that the lease does not cover
            load = None
        if load is None:
            load = seq.load = self._begin_load(seq, computed_tokens)
            if load is None:
                return 0, False
        if not load.lease.ready():
            return None, False
        return self._promise(seq, load, computed_tokens)

    def _begin_load(self, seq: Sequence, computed_tokens: int) -> Load | None:
        tokens = seq.request.all_token_ids
        keys = seq.chain.extend(tokens)
        # an asynchronous load may cover the whole prompt: vLLM steps back one token itself
        span = load_span(len(tokens), computed_tokens, self._facts.geometry, leave_tokens=0)
        if not span.blocks:
            return None
        tiers = self._store.match(keys[span.first : span.last]).tiers
        count = min(len(tiers), self._store.room_blocks())
        self.tally.add("kvist_blocks_queried_total", span.blocks)
        self.tally.add("kvist_blocks_matched_total", len(tiers))
        if span.tokens(count, self._block_tokens) < max(1, self._min_load_tokens):
            return None
        try:
            lease = self._store.read(
                keys[span.first : span.first + count], deadline_s=self._read_deadline_s
            )
        except NoSpaceError:
            self.tally.add("kvist_no_space_total", 1)
            return None
        return Load(span, lease, tiers[:count])

    def _promise(self, seq: Sequence, load: Load, computed_tokens: int) -> tuple[int, bool]:
        load.hits = load.lease.hits()
        gain = (load.span.first + load.hits) * self._block_tokens - computed_tokens
        if load.hits < len(load.tiers):
            self.tally.add("kvist_misses_total.unread", len(load.tiers) - load.hits)
        if gain < max(1, self._min_load_tokens):
            seq.drop_load()
            seq.no_load = True
            return 0, False
        return gain, True

    def allocated(
        self, request: Any, table: Seq[int], computed_tokens: int, external_tokens: int
    ) -> None:
        """vLLM gave the request pages; start copying what was promised."""
        seq = self._live[request.request_id]
        load, seq.load = seq.load, None
        if load is None:
            raise LeaseError(f"request {request.request_id} was promised blocks it does not hold")
        first = computed_tokens // self._block_tokens
        end = computed_tokens + external_tokens
        blocks = range(first, -(-end // self._block_tokens))
        geometry = self._facts.geometry
        pages = tuple(tuple(geometry.page_row(b, table, computed_tokens)) for b in blocks)
        slots = tuple(load.lease.slot(b - load.span.first) for b in blocks)
        self._copying[request.request_id] = load
        self._out_loads.append(CopyJob(self._job(), request.request_id, slots, pages))
        seq.loaded = self._count_tiers(load, blocks, external_tokens)

    def refuse(
        self, request: Any, table: Seq[int], computed_tokens: int, external_tokens: int
    ) -> None:
        """The promised load cannot be started: have the workers report its pages as not loaded.

        vLLM waits for a report; without one the request would hang.
        """
        first = computed_tokens // self._facts.geometry.page_tokens
        last = (computed_tokens + external_tokens) // self._facts.geometry.page_tokens
        pages = (tuple(table[first:last]),)
        self._out_loads.append(CopyJob(self._job(), request.request_id, (), pages))

    def _count_tiers(self, load: Load, blocks: range, tokens: int) -> dict[Tier, int]:
        by_tier: dict[Tier, int] = {}
        left = tokens
        for block in reversed(blocks):
            tier = load.tiers[block - load.span.first]
            share = min(left, self._block_tokens)
            by_tier[tier] = by_tier.get(tier, 0) + share
            left -= share
        for tier, count in by_tier.items():
            self.tally.add(f"kvist_tokens_loaded_total.{tier.value}", count)
        return by_tier

    def sources(self, request: Any) -> dict[Tier, int]:
        """Tokens of the request's last load, by the tier that they were in."""
        seq = self._live.get(request.request_id)
        return dict(seq.loaded) if seq else {}

    # -- saves ------------------------------------------------------------------------------

    def plan_step(self, output: Any) -> StepPlan:
        """One step's orders. Loads that were announced always go out, whatever else fails."""
        idle = output.total_num_scheduled_tokens == 0
        if self._save:
            self.fallback.guard("plan saves", lambda: self._plan_saves(output), default=None)
        plan = StepPlan(
            arena=self._arena,
            loads=self._out_loads,
            saves=self._out_saves,
            fence=self._lost_pages(),
            release=self._release,
            idle=idle,
        )
        self._out_loads, self._out_saves, self._release = [], [], []
        if idle and any(s.load for s in self._live.values()):
            self._nap.wait(_NAP_S)
        return plan

    def _plan_saves(self, output: Any) -> None:
        cached = output.scheduled_cached_reqs
        done = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        done.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for req_id, scheduled in output.num_scheduled_tokens.items():
            seq = self._live.get(req_id)
            if seq is None:
                continue
            seq.no_load = False  # it runs; should it be preempted, it may load again
            tokens = done[req_id] + scheduled
            if seq.cursor.full_blocks(tokens, self._known(seq), self._block_tokens):
                tables = output.kv_connector_block_state.get_block_ids(req_id)
                if tables is not None:
                    self._offer(seq, tokens, tables[0])

    def _known(self, seq: Sequence) -> int:
        request = seq.request
        return int(request.num_tokens if self._save_decode else request.num_prompt_tokens)

    def _offer(self, seq: Sequence, computed_tokens: int, table: Seq[int]) -> None:
        """Reserves slots for newly full blocks and orders their copies."""
        if not self._save:
            return
        blocks = seq.cursor.full_blocks(computed_tokens, self._known(seq), self._block_tokens)
        room = self._store.room_blocks()
        blocks = blocks[: max(0, room)]
        if not blocks:
            return
        keys = seq.chain.extend(seq.request.all_token_ids)
        refs = [BlockRef(keys[b], seq.chain.parent(b)) for b in blocks]
        try:
            lease = self._store.write(refs)
        except NoSpaceError:
            self.tally.add("kvist_no_space_total", 1)
            return  # offered again next step, while the pages live
        seq.cursor.advance(blocks.stop)
        new = tuple(i for i in range(len(blocks)) if not lease.present(i))
        if not new:
            lease.release()
            return
        geometry = self._facts.geometry
        job = self._job()
        seq.saves[job] = Save(lease, blocks, new, seq.request.num_preemptions)
        self._save_jobs[job] = seq
        slots = tuple(lease.slot(i) for i in new)
        pages = tuple(tuple(geometry.page_row(blocks[i], table)) for i in new)
        self._out_saves.append(CopyJob(job, seq.request.request_id, slots, pages))

    def _lost_pages(self) -> bool:
        """Whether pages of an unfinished save went back to the pool (preemption)."""
        ordered = {job.job_id for job in self._out_saves}
        return any(
            save.preemptions != seq.request.num_preemptions and job not in ordered
            for seq in {id(s): s for s in self._save_jobs.values()}.values()
            for job, save in seq.saves.items()
        )

    # -- what the workers report ------------------------------------------------------------

    def heard(self, report: StepReport | None, received: set[str]) -> None:
        """Copies are done: release what was read, commit what was written."""
        for req_id in received:
            load = self._copying.pop(req_id, None)
            if load is not None:
                load.lease.release()
        if report is None:
            return
        self.tally.add("kvist_bytes_copied_total", report.copied_bytes)
        self.tally.add("kvist_copy_seconds_total", report.copy_s)
        for job, ranks in report.done.items():
            total = self._acks.get(job, 0) + ranks
            self._acks[job] = total
            if job in report.failed and job in self._save_jobs:
                self._failed.add(job)
            if total >= self._facts.world_size:
                del self._acks[job]
                self._saved(job)

    def _saved(self, job: int) -> None:
        seq = self._save_jobs.pop(job, None)
        if seq is None:
            return
        save = seq.saves.pop(job)
        with save.lease:
            if job in self._failed:
                self._failed.discard(job)
            else:
                self._commit(seq, save)
        req_id = seq.request.request_id
        if not seq.saves and self._held.pop(req_id, None) is not None:
            self._release.append(req_id)

    def _commit(self, seq: Sequence, save: Save) -> None:
        fresh = [save.blocks[i] for i in save.indices if save.lease.commit(i)]
        self.tally.add("kvist_blocks_saved_total", len(fresh))
        self.tally.add("kvist_tokens_saved_total", len(fresh) * self._block_tokens)
        self._feed.saved(seq, fresh)

    # -- the rest ---------------------------------------------------------------------------

    @property
    def _block_tokens(self) -> int:
        return self._facts.geometry.block_tokens

    def _job(self) -> int:
        self._next_job += 1
        return self._next_job
