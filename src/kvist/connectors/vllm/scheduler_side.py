"""The scheduler's half of the connector: owns the store, decides, and never touches pages.

`loads.py` and `saves.py` hold the two lives; here is what happens to a request and in a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

from kvist.connectors.appraiser import Appraiser
from kvist.connectors.fallback import Fallback
from kvist.connectors.recorder import TraceRecorder
from kvist.connectors.vllm.blends import Blends
from kvist.connectors.vllm.engine_facts import EngineFacts
from kvist.connectors.vllm.event_feed import EventFeed
from kvist.connectors.vllm.handovers import Handovers
from kvist.connectors.vllm.loads import LoadKnobs, Loads
from kvist.connectors.vllm.messages import StepPlan, StepReport
from kvist.connectors.vllm.saves import SaveKnobs, Saves
from kvist.connectors.vllm.sequences import (
    Scopes,
    Sequence,
    handed_tokens_of,
    hints_of,
    must_save,
    new_chain,
    session_of,
    tenant_of,
    usable,
)
from kvist.connectors.vllm.stats import Tally
from kvist.core.lease import BlockStore
from kvist.core.outcome import Tier
from kvist.tiers.dram import ArenaLocator

_MOST_TIMED = 64  # steps whose pass may be unreported
_MOST_DECODES = 0.1  # of the tokens of a pass that is taken for a prefill
_NAP_S = 0.02  # longest an empty step waits for blocks to arrive; a new request waits as long


class SchedulerSide:
    """State of one engine. Called by vLLM's scheduler thread only."""

    def __init__(
        self,
        store: BlockStore,
        arena: Callable[[], ArenaLocator | None],
        facts: EngineFacts,
        feed: EventFeed,
        load: LoadKnobs,
        save: SaveKnobs,
        appraiser: Appraiser,
        recorder: TraceRecorder | None = None,
        clock: Callable[[], float] = time.monotonic,
        blend: Callable[[Tally, Callable[[], int]], Blends] | None = None,
    ) -> None:
        self._store, self._arena, self._facts = store, arena, facts  # asked in every step
        self._scopes = Scopes(facts.fingerprint)
        self._live: dict[str, Sequence] = {}
        self._ending: dict[str, Sequence] = {}  # over, but for their last saves
        self._last_job = 0
        self.tally = Tally()
        self.fallback = Fallback()
        self.appraiser = appraiser
        self._recorder, self._clock = recorder, clock
        self._timed: dict[int, list[tuple[int, int]]] = {}  # step → (new, cached) tokens
        self._steps = 0
        geometry, world, tally = facts.geometry, facts.world_size, self.tally
        size = facts.layout.block_bytes
        self._loads = Loads(store, geometry, load, size, world, tally, self._job, appraiser)
        most_s = load.handover_s if load.enabled else 0.0
        self._handovers = Handovers(store, geometry, appraiser, most_s, tally, clock)
        ratio = appraiser.save_ratio
        self._saves = Saves(store, geometry, save, world, feed, tally, self._job, ratio)
        self._blends = blend(tally, self._job) if blend is not None else None

    def arrive(self, request: Any) -> None:
        """A new request; one whose KV cannot be named is simply not known here."""
        if usable(request):
            seed = self._scopes.seed(request)
            chain = new_chain(request, seed, self._facts.geometry.block_tokens)
            self._live[request.request_id] = Sequence(
                request,
                chain,
                tenant=tenant_of(request),
                arrived_s=self._clock(),
                must_save=must_save(request),
                handed_tokens=handed_tokens_of(request),
            )

    def matched(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond `computed_tokens` to be loaded, and whether the request waits for them."""
        seq = self._live.get(request.request_id)
        if seq is not None and not seq.asked:
            seq.asked = True
            self._saves.asked(seq)
        if seq is None or request.skip_reading_prefix_cache:
            return 0, False
        if self._handovers.waits(seq, computed_tokens):
            return None, False
        if self._blends is not None:
            self._blends.marks(seq, computed_tokens)
            answer = self._try_blend(self._blends, seq, computed_tokens)
            if answer is not None:
                self._loads.withdraw(request.request_id)  # leased before blends were possible
                return answer
        return self._loads.offer(seq, computed_tokens)

    def _try_blend(
        self, blends: Blends, seq: Sequence, computed_tokens: int
    ) -> tuple[int | None, bool] | None:
        """What is promised of spans; whatever fails here leaves the prompt to an ordinary load."""
        failed = object()
        answer = self.fallback.guard(
            "find spans", lambda: blends.offer(seq, computed_tokens), default=failed
        )
        if answer is failed:
            seq.no_blend = True
            blends.withdraw(seq.request.request_id)
            return None
        return answer  # type: ignore[return-value]

    def allocated(
        self, request: Any, table: Seq[int], computed_tokens: int, external_tokens: int
    ) -> None:
        """vLLM gave the request pages; blocks will be copied there as they arrive."""
        seq = self._live[request.request_id]
        if self._blends is not None and self._blends.start(
            seq, table, computed_tokens, external_tokens
        ):
            return
        self._loads.start(seq, table, computed_tokens, external_tokens)

    def refuse(
        self, request: Any, table: Seq[int], computed_tokens: int, external_tokens: int
    ) -> None:
        """Blocks that were promised cannot be loaded after all: they will be recomputed."""
        if self._blends is not None:
            self._blends.refuse(request.request_id)
        self._loads.refuse(request.request_id, table, computed_tokens, external_tokens)

    def sources(self, request: Any) -> dict[Tier, int]:
        """Tokens of the request's last load, by the tier that they were in."""
        seq = self._live.get(request.request_id)
        return dict(seq.loaded) if seq else {}

    def plan_step(self, output: Any) -> StepPlan:
        """One step's orders. Loads that were announced always go out, whatever else fails."""
        done = _computed(output)
        self.fallback.guard("plan saves", lambda: self._offer_saves(output, done), default=None)
        idle = output.total_num_scheduled_tokens == 0
        if idle:
            blending = self._blends is not None and self._blends.wait_for_arrival(_NAP_S)
            if not blending and not self._loads.wait_for_arrival(_NAP_S):
                self._handovers.nap()
        else:
            self._loads.computing()
        released = self._saves.released()
        for req_id in released:
            self._tell_end(self._ending.pop(req_id, None))
        return StepPlan(
            arena=self._arena(),
            loads=self._loads.orders(),
            saves=self._saves.orders(),
            blends=self._blends.orders() if self._blends is not None else [],
            fence=self._saves.lost_pages(),
            release=released,
            idle=idle,
            timed=self._time(output.num_scheduled_tokens, done),
        )

    def _time(self, scheduled: Mapping[str, int], done: Mapping[str, int]) -> int:
        """A number for this step if it shows how long a prefill takes; else 0."""
        tokens = sum(scheduled.values())
        decodes = sum(count == 1 for count in scheduled.values())
        if tokens <= 1 or decodes > _MOST_DECODES * tokens:
            return 0
        self._steps += 1
        self._timed[self._steps] = [(n, done[req]) for req, n in scheduled.items() if req in done]
        if len(self._timed) > _MOST_TIMED:
            del self._timed[next(iter(self._timed))]
        return self._steps

    def _offer_saves(self, output: Any, done: Mapping[str, int]) -> None:
        tables = output.kv_connector_block_state
        for req_id, scheduled in output.num_scheduled_tokens.items():
            seq = self._live.get(req_id)
            if seq is not None:
                seq.no_load = seq.no_blend = False
                self._saves.offer(seq, done[req_id] + scheduled, partial(_table, tables, req_id))
                self._remember(seq)

    def _remember(self, seq: Sequence) -> None:
        """Text of blocks that were offered to the store can be found; blended KV is marked."""
        blends = self._blends
        if blends is not None:
            blends.still(seq)
            self.fallback.guard("register spans", lambda: blends.register(seq), default=None)

    def heard(self, report: StepReport | None, received: set[str]) -> None:
        """Copies are done: release what was read, commit what was written."""
        for req_id in received:
            self._loads.received(req_id)
            if self._blends is not None:
                self._blends.received(req_id)
        if report is not None:
            self.tally.add("kvist_bytes_copied_total", report.copied_bytes)
            self.tally.add("kvist_copy_seconds_total", report.copy_s)
            self._learn(report)
            self._loads.heard(report)
            self._saves.heard(report)
            if self._blends is not None:
                self._blends.heard(report)

    def _learn(self, report: StepReport) -> None:
        self.appraiser.copied(report.loaded_bytes, report.load_s)
        for step, seconds in report.passes.items():
            requests = self._timed.pop(step, None)
            if requests:
                self.appraiser.passed(requests, seconds)

    def finish(self, request: Any, table: Seq[int]) -> bool:
        """The request is over; true if its pages must be kept until its saves are done."""
        req_id = request.request_id
        seq = self._live.pop(req_id, None)
        if seq is None:
            return False
        self._handovers.forget(req_id)
        if self._blends is not None and self._blends.abandon(req_id):
            return False
        if self._loads.abandon(req_id):
            return False  # aborted while loading: vLLM keeps the pages until the load reports
        computed = request.num_computed_tokens
        self.fallback.guard(
            "save at finish",
            lambda: self._saves.offer(seq, computed, lambda: table),
            default=None,
        )
        self._remember(seq)
        if self._saves.hold(req_id):
            self._ending[req_id] = seq  # the end is told when its last blocks are there
            return True
        self._tell_end(seq)
        return False

    def _record(self, seq: Sequence) -> None:
        if self._recorder is not None:
            request = seq.request
            hints = hints_of(request)
            tokens = request.num_prompt_tokens
            keys = seq.chain.extend(request.all_token_ids)
            self._recorder.record(
                seq.arrived_s, keys, tokens, hints.output_tokens, hints.finish, session_of(request)
            )

    def _tell_end(self, seq: Sequence | None) -> None:
        """Now is known how the generation ended that used these blocks."""
        if seq is not None:
            self.fallback.guard("record", lambda: self._record(seq), default=None)
            self.fallback.guard(
                "tell end",
                lambda: self._store.ended(seq.chain.keys, hints_of(seq.request)),
                default=None,
            )

    def busy(self) -> bool:
        """Whether the engine must keep stepping for us to hear of copies under way."""
        blending = self._blends is not None and self._blends.busy()
        return blending or self._loads.busy() or self._saves.busy()

    def _job(self) -> int:
        self._last_job += 1
        return self._last_job


def _computed(output: Any) -> dict[str, int]:
    """Tokens that each scheduled request has computed before this step."""
    cached = output.scheduled_cached_reqs
    done = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
    done.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return done


def _table(tables: Any, req_id: str) -> Seq[int]:
    """The request's page table, resolved only when it is needed."""
    table: Seq[int] = tables.get_block_ids(req_id)[0]
    return table
