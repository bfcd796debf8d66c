"""Builds the worker side for the device at hand, and small readings for the scheduler side."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from kvist.accel.blend.spans import SpanIndex
from kvist.config import Config, ssd_folders
from kvist.connectors.appraiser import Appraiser
from kvist.connectors.recorder import TraceRecorder
from kvist.connectors.speeds import KeptSpeeds
from kvist.connectors.vllm.blend_cost import BlendCost
from kvist.connectors.vllm.blend_plan import BlendLimits
from kvist.connectors.vllm.blend_start import blender_maker
from kvist.connectors.vllm.blends import BlendKnobs, Blends
from kvist.connectors.vllm.copier import Mover, copy_cpus
from kvist.connectors.vllm.departures import Departures
from kvist.connectors.vllm.device_watch import DeviceWatch
from kvist.connectors.vllm.engine_facts import EngineFacts, rank_heads
from kvist.connectors.vllm.movers import CpuMover, TorchMover, ordered_layers, region_of
from kvist.connectors.vllm.page_care import care_for
from kvist.connectors.vllm.stats import Tally
from kvist.connectors.vllm.taint import Taint
from kvist.connectors.vllm.worker_side import HostWatch, WorkerSide, no_fence
from kvist.core.errors import KvistError
from kvist.core.lease import BlockStore
from kvist.core.outcome import Tier
from kvist.cost.device import DEVICES, Hardware, device
from kvist.cost.model import shape_from_config
from kvist.cost.prefill import PrefillCoefficients
from kvist.cost.seed import prefill_seed
from kvist.node.client import NodeStore
from kvist.store.tiered import TieredStore
from kvist.tiers.dram import Arena, ArenaLocator, ArenaMap
from kvist.tiers.protocol import Sampled
from kvist.tiers.warmer import GiveWay, Warmer


def worker_side(
    caches: Mapping[str, torch.Tensor],
    facts: EngineFacts,
    vllm_config: Any,
    copy_threads: int | str,
    *,
    blend: bool = False,
) -> WorkerSide:
    """The worker side of this rank; proves now that the pages can be mapped.

    Raises:
        LayoutError: they cannot.
    """
    from vllm.distributed import get_tensor_model_parallel_rank

    rank = get_tensor_model_parallel_rank()
    _, tensors = ordered_layers(caches)
    on_cpu = tensors[0].device.type == "cpu"
    isa = _cpu_isa(facts, tensors[0], vllm_config) if on_cpu else None
    region = region_of(tensors[0], facts, rank_heads(facts.layout, rank, facts.tp_size), isa)
    cpus = copy_cpus() if on_cpu else None
    give_way = GiveWay()
    if on_cpu:
        care_for(tensors, cpus, give_way)
    threads = (len(cpus) if cpus else 1) if copy_threads == "auto" else int(copy_threads)

    def make_mover(locator: ArenaLocator) -> Mover:
        arena: ArenaMap = Arena.join(locator)
        if on_cpu:
            mover = CpuMover(arena, caches, facts, rank, region, threads)
            Warmer(arena, lambda: mover.used_bytes, cpus=cpus, give_way=give_way).start()
            return mover
        return TorchMover(arena, caches, facts, rank)  # maps the whole arena for the device

    fence = no_fence if on_cpu else _device_fence
    watch = HostWatch() if on_cpu else DeviceWatch()
    return WorkerSide(
        make_mover,
        fence,
        cpus=cpus,
        early_loads=on_cpu,
        watch=watch,
        give_way=give_way,
        make_blender=blender_maker(caches, facts, vllm_config, region) if blend else None,
    )


def _cpu_isa(facts: EngineFacts, tensor: torch.Tensor, vllm_config: Any) -> str:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(
        _get_attn_isa(
            vllm_config.model_config.dtype,
            facts.geometry.page_tokens,
            facts.layout.head_dim,
            vllm_config.cache_config.cache_dtype,
        )
    )


def _device_fence() -> Any:
    """A save may read pages only when the kernels that write them are done."""
    event = torch.cuda.Event()
    event.record()
    return event.synchronize


def arena_of(store: TieredStore | NodeStore) -> Callable[[], ArenaLocator | None]:
    """Asks where the store's arena is now; a node may come back with another."""
    return store.locator if isinstance(store, NodeStore) else store.arena.locator


def data_parallel_shard(vllm_config: Any) -> str:
    """Engines of one data-parallel group keep stores of their own; '' where there is one engine."""
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size <= 1:
        return ""
    return f"dp{parallel.data_parallel_index}"


def blends(
    config: Config,
    store: BlockStore,
    facts: EngineFacts,
    departures: Departures,
    appraiser: Appraiser,
    *,
    pages: int,
) -> Callable[[Tally, Callable[[], int]], Blends] | None:
    """What makes the scheduler's half of blending, for an engine of `pages`; `None`: it is off."""
    knobs = config.blend
    if not knobs.enabled:
        return None
    limits = BlendLimits(knobs.min_tokens, knobs.max_tokens)
    told = BlendKnobs(knobs.max_deviation, limits, config.store.read_deadline_s)

    def make(tally: Tally, job: Callable[[], int]) -> Blends:
        index = SpanIndex(most_tokens=knobs.index_tokens)
        taint = Taint(2 * pages)
        cost = BlendCost(appraiser, facts.layout.layers, knobs.ratio)
        return Blends(store, facts.geometry, told, tally, job, taint, index, departures, cost)

    return make


def gauges(stats: Any) -> dict[str, float]:
    """Gauge samples of the store's state."""
    samples: dict[str, float] = {}
    for tier in ("dram", "ssd"):
        for quantity in ("blocks", "bytes"):
            value = getattr(stats, f"{tier}_{quantity}", None)
            if value is not None:
                samples[f"kvist_tier_{quantity}.{tier}"] = float(value)
    return samples


def lower_samples(store: object) -> Mapping[str, float]:
    """Samples of the medium below the store's DRAM, where it has any of its own."""
    return store.samples() if isinstance(store, Sampled) else {}


def learned(appraiser: Appraiser) -> dict[str, float]:
    """Gauge samples of what the appraiser has learned, as far as it has."""
    samples: dict[str, float] = {}
    for tier in (Tier.DRAM, Tier.SSD, Tier.PEER, Tier.REMOTE):
        rate = appraiser.bytes_per_s(tier)
        if rate is not None:
            samples[f"kvist_tier_bytes_per_second.{tier.value}"] = rate
    if appraiser.prefill_error_ratio is not None:
        samples["kvist_prefill_error_ratio"] = appraiser.prefill_error_ratio
    return samples


def kept_speeds(config: Config) -> KeptSpeeds | None:
    """Where what is learned is kept: beside the blocks that outlive the engine."""
    return KeptSpeeds(ssd_folders(config)[0]) if config.store.ssd.enabled else None


def recorder(config: Config, facts: EngineFacts, vllm_config: Any) -> TraceRecorder | None:
    """What records the traffic, if the configuration asks for it."""
    if not config.record.path:
        return None
    path = Path(config.record.path).expanduser()
    name = Path(str(vllm_config.model_config.model)).name
    block_tokens = facts.geometry.block_tokens
    return TraceRecorder(path, block_tokens, name, max_bytes=config.record.capacity)


def prefill_seed_of(vllm_config: Any) -> PrefillCoefficients:
    """A first guess of prefill times; a device that is not in the catalogue is taken for an A100.

    It only gives the time model its shape: nothing is decided before passes were observed.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    shape = shape_from_config(model.hf_config, name=str(model.model))
    return prefill_seed(shape, _hardware(parallel.world_size))


def _hardware(ranks: int) -> Hardware:
    if not torch.cuda.is_available():
        return Hardware(DEVICES["cpu"], max(1, len(os.sched_getaffinity(0))))
    try:
        return Hardware(device(torch.cuda.get_device_name()), ranks)
    except KvistError:
        return Hardware(DEVICES["a100"], ranks)
