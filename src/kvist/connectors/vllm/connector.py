"""KvistConnector: vLLM's V1 connector interface, thin over a scheduler side and a worker side.

vLLM builds one object per role in its own process. Every hook is guarded: whatever fails inside
becomes a recompute (`connectors/fallback.py`), because an exception here would kill the engine.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvist.assemble import open_store
from kvist.config import Config, load_config
from kvist.connectors.appraiser import Appraiser
from kvist.connectors.fallback import Fallback
from kvist.connectors.vllm import roles
from kvist.connectors.vllm.departures import Departures
from kvist.connectors.vllm.engine_facts import check_version, read_facts
from kvist.connectors.vllm.event_feed import EventFeed
from kvist.connectors.vllm.loads import LoadKnobs
from kvist.connectors.vllm.messages import StepPlan, StepReport
from kvist.connectors.vllm.saves import SaveKnobs
from kvist.connectors.vllm.scheduler_side import SchedulerSide
from kvist.connectors.vllm.stats import KvistPromMetrics, KvistStats, Totals
from kvist.connectors.vllm.worker_side import WorkerSide
from kvist.core.errors import LeaseError
from kvist.core.events import KvEvent
from kvist.core.outcome import Tier

log = logging.getLogger("kvist.vllm")

T = TypeVar("T")
D = TypeVar("D")

_SOURCE = {
    Tier.DRAM: CacheHitSource.HOST,
    Tier.SSD: CacheHitSource.DISK,
    Tier.PEER: CacheHitSource.P2P,
    Tier.REMOTE: CacheHitSource.P2P,
}
_GAUGE_PERIOD_S = 1.0
_CLOSE_S = 10.0


class KvistConnector(KVConnectorBase_V1):
    """KV that outlives the engine: loads and saves blocks through Kvist's store."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_version(vllm.__version__)
        config = load_config(overrides=vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._config: Config = config.config
        self._facts = read_facts(vllm_config, kv_cache_config, self._config.block_tokens)
        self._fallback = Fallback()
        self._computed: dict[str, int] = {}
        self._gauges_due_s = 0.0
        self._lower_totals = Totals()
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            _recompute_failed_loads(vllm_config.kv_transfer_config)
            self._feed = EventFeed(self._config.block_tokens, enabled=self._config.events.enabled)
            self._departures = Departures()
            self._store = open_store(
                self._config,
                block_bytes=self._facts.layout.block_bytes,
                fingerprint=self._facts.fingerprint,
                layout=self._facts.layout,
                shard=roles.data_parallel_shard(vllm_config),
                on_event=self._store_event,
            )
            self._recorder = roles.recorder(self._config, self._facts, vllm_config)
            self._scheduler = self._scheduler_side(
                vllm_config.kv_transfer_config, kv_cache_config.num_blocks
            )

    def _store_event(self, event: KvEvent) -> None:
        """From the store, on any of its threads."""
        self._feed.store_event(event)
        self._departures.store_event(event)

    def _scheduler_side(self, transfer: Any, pages: int) -> SchedulerSide:
        knobs, appraiser = self._config.connector, self._appraiser()
        loads = knobs.load and transfer.is_kv_consumer
        blend = roles.blends(
            self._config, self._store, self._facts, self._departures, appraiser, pages=pages
        )
        return SchedulerSide(
            self._store,
            roles.arena_of(self._store),
            self._facts,
            self._feed,
            LoadKnobs(
                enabled=loads,
                min_tokens=knobs.min_load_tokens,
                deadline_s=self._config.store.read_deadline_s,
                handover_s=knobs.handover_s,
            ),
            SaveKnobs(
                enabled=knobs.save and transfer.is_kv_producer,
                decode=knobs.save_decode,
                # which text is asked for again does not show in keys
                all_blocks=knobs.save_unseen == "always" or self._config.blend.enabled,
            ),
            appraiser,
            self._recorder,
            blend=blend if loads else None,
        )

    def _appraiser(self) -> Appraiser:
        knobs = self._config.connector
        self._kept = roles.kept_speeds(self._config)
        return Appraiser(
            roles.prefill_seed_of(self._vllm_config),
            block_tokens=self._facts.geometry.block_tokens,
            block_bytes=self._facts.layout.block_bytes,
            planned=knobs.load_policy == "planned",
            known=self._kept.load(self._facts.fingerprint) if self._kept else None,
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a dropped save is a future miss, never a reason to recompute."""
        return False

    # -- worker role ------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The engine's pages exist; learn their layout now, so that a misfit stops the start."""
        self._worker = roles.worker_side(
            kv_caches,
            self._facts,
            self._vllm_config,
            self._config.connector.copy_threads,
            blend=self._config.blend.enabled,
        )

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """First in a step, before pages are overwritten."""
        if isinstance(kv_connector_metadata, StepPlan):
            self._guard("preempt", lambda: self._rank.preempted(kv_connector_metadata), None)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Before the forward pass: loads may start."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepPlan):
            self._guard("begin step", lambda: self._rank.begin_step(connector_metadata), None)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads are asynchronous and started elsewhere."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs only when its load is over."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Whole blocks are saved after the pass, not layers during it."""

    def wait_for_save(self) -> None:
        """After the forward pass: saves may start. Their pages are held until they end."""
        self._guard("after forward", lambda: self._rank.after_forward(), None)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Requests whose pages may go, and requests whose load has ended."""
        empty: tuple[set[str], set[str]] = (set(), set())
        return self._guard("finish", lambda: self._rank.finished(finished_req_ids), empty)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Pages that were not loaded; vLLM recomputes from the first of them."""
        return self._guard("load errors", lambda: self._rank.unloaded_pages(), set[int]())

    def build_connector_worker_meta(self) -> StepReport | None:
        """What the scheduler side must know of this step."""
        return self._guard("report", lambda: self._rank.report(), None)

    @property
    def _rank(self) -> WorkerSide:
        if self._worker is None:
            raise LeaseError("vLLM has not registered its KV caches")
        return self._worker

    # -- scheduler role ---------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """A request has arrived."""
        self._guard("arrive", lambda: self._scheduler.arrive(request), None)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens beyond the engine's own that can be loaded; `None` = ask again."""
        self._computed[request.request_id] = num_computed_tokens
        nothing = (0, False)
        return self._guard(
            "match", lambda: self._scheduler.matched(request, num_computed_tokens), nothing
        )

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Pages were allocated for what was promised."""
        if num_external_tokens <= 0:
            return
        table = blocks.get_block_ids()[0]
        computed = self._computed.get(request.request_id, 0)
        args = (request, table, computed, num_external_tokens)
        self._fallback.rescue(
            "start load",
            lambda: self._scheduler.allocated(*args),
            lambda: self._scheduler.refuse(*args),
        )

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """The tiers that the loaded tokens came from."""
        tiers = self._guard("sources", lambda: self._scheduler.sources(request), dict[Tier, int]())
        found: dict[CacheHitSource, int] = {_SOURCE[t]: n for t, n in tiers.items() if n}
        if sum(found.values()) == num_external_tokens:
            return found
        return {self._cache_hit_source: num_external_tokens} if num_external_tokens else {}

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        """This step's orders."""
        plan = self._guard("plan", lambda: self._scheduler.plan_step(scheduler_output), None)
        return plan if plan is not None else StepPlan()

    def update_connector_output(self, connector_output: Any) -> None:
        """The workers reported."""
        report = connector_output.kv_connector_worker_meta
        received = set(connector_output.finished_recving or ())
        self._guard(
            "hear",
            lambda: self._scheduler.heard(
                report if isinstance(report, StepReport) else None, received
            ),
            None,
        )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request is over; keep its pages while blocks of it are being saved."""
        self._computed.pop(request.request_id, None)
        keep = self._guard("end", lambda: self._scheduler.finish(request, block_ids), default=False)
        return keep, None

    def has_pending_push_work(self) -> bool:
        """Keeps the engine stepping while copies are under way."""
        return self._guard("busy", lambda: self._scheduler.busy(), default=False)

    def take_events(self) -> Iterable[Any]:
        """KV events since the last step."""
        return self._guard("events", self._feed.take, [])

    def reset_cache(self) -> bool | None:
        """Forgets every stored block (`/reset_prefix_cache?reset_external=true`)."""
        return self._guard("reset", self._clear, default=False)

    def _clear(self) -> bool:
        self._store.clear()
        return True

    # -- both -------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KvistStats | None:
        """Samples since the last step."""
        samples = self._guard("stats", self._samples, dict[str, float]())
        return KvistStats(data=samples) if samples else None

    def _samples(self) -> dict[str, float]:
        if self._worker is not None:
            fallbacks = Counter(self._worker.fallback.take()) + Counter(self._fallback.take())
            return {f"kvist_fallbacks_total.{k}": float(n) for k, n in fallbacks.items()}
        tally = self._scheduler.tally
        for source in (self._fallback, self._scheduler.fallback):
            for name, count in source.take().items():
                tally.add(f"kvist_fallbacks_total.{name}", count)
        now_s = time.monotonic()
        if now_s >= self._gauges_due_s:
            self._gauges_due_s = now_s + _GAUGE_PERIOD_S
            for name, value in roles.gauges(self._store.stats()).items():
                tally.add(name, value)
            for name, value in roles.learned(self._scheduler.appraiser).items():
                tally.add(name, value)
            for name, value in self._lower_totals.since(roles.lower_samples(self._store)).items():
                tally.add(name, value)
            self._keep_speeds()
        return tally.take()

    def _keep_speeds(self) -> None:
        speeds = self._scheduler.appraiser.speeds()
        if self._kept is not None and speeds is not None:
            self._kept.keep(self._facts.fingerprint, speeds)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvistStats:
        """vLLM rebuilds our container from plain data."""
        return KvistStats(data=data if data is not None else {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvistPromMetrics:
        """Our series on vLLM's `/metrics` page."""
        return KvistPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Writes what is not on disk yet and lets go of everything."""
        if self._worker is not None:
            self._guard("shutdown", self._worker.close, None)
        elif self.role is KVConnectorRole.SCHEDULER:
            self._guard("keep speeds", self._keep_speeds, None)
            if self._recorder is not None:
                self._guard("shutdown", self._recorder.close, None)
            self._guard("shutdown", lambda: self._store.close(deadline_s=_CLOSE_S), None)

    def _guard(self, hook: str, call: Callable[[], T], default: D) -> T | D:
        return self._fallback.guard(hook, call, default=default)


def _recompute_failed_loads(transfer: Any) -> None:
    """vLLM fails a request whose load fails unless told otherwise; a cache must not do that."""
    if transfer.kv_load_failure_policy != "recompute":
        log.warning(
            "kvist: kv_load_failure_policy is %r, under which a failed load fails the request; "
            'using "recompute". Set it in --kv-transfer-config to silence this.',
            transfer.kv_load_failure_policy,
        )
        transfer.kv_load_failure_policy = "recompute"
