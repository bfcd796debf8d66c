"""Whether this worker can blend, found out at its start; if it cannot, it says why, once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from kvist.accel.blend.proof import prove
from kvist.connectors.pages import RegionMap
from kvist.connectors.vllm.blend_model import VllmBlendModel
from kvist.connectors.vllm.blender import CpuBlender
from kvist.connectors.vllm.engine_facts import EngineFacts
from kvist.connectors.vllm.engine_model import check_engine, engine_model
from kvist.connectors.vllm.movers import CpuPages
from kvist.connectors.vllm.worker_side import Blender, MakeBlender
from kvist.core.errors import KvistError, UnsupportedError
from kvist.tiers.dram import Arena, ArenaLocator

log = logging.getLogger("kvist.vllm")

# What modules raise that are not built, or not used, as their kind is.
_ODDITIES = (RuntimeError, AttributeError, TypeError, LookupError, ValueError, AssertionError)


def blender_maker(
    caches: Mapping[str, torch.Tensor], facts: EngineFacts, vllm_config: Any, region: RegionMap
) -> MakeBlender | None:
    """What makes this rank's blender once the arena is known; `None` if it cannot blend."""
    try:
        model = _proven_model(caches, facts, vllm_config)
    except (KvistError, *_ODDITIES) as error:
        why = str(error) if isinstance(error, KvistError) else f"the proof failed: {error!r}"
        log.warning("kvist: blend is off: %s", why)
        return None
    pages = CpuPages(caches, facts, region)
    log.warning(
        "kvist: blend is on: text that was cached behind other text is reused, repaired but not "
        "equal to a whole pass. Answers change."
    )

    def make(locator: ArenaLocator) -> Blender:
        arena = Arena.join(locator)
        return CpuBlender(model, model.dtype, arena, facts.layout, pages, base=locator.base)

    return make


def _proven_model(
    caches: Mapping[str, torch.Tensor], facts: EngineFacts, vllm_config: Any
) -> VllmBlendModel:
    check_engine(vllm_config)
    if next(iter(caches.values())).device.type != "cpu":
        raise UnsupportedError("blend runs on CPU engines only, so far")
    layers = vllm_config.compilation_config.static_forward_context
    model = VllmBlendModel(engine_model({name: layers[name] for name in caches}), vllm_config)
    shape, layout = model.shape, facts.layout
    if (shape.layers, shape.kv_heads, shape.head_dim, 2) != (
        layout.layers,
        layout.kv_heads,
        layout.head_dim,
        layout.kinds,
    ):
        raise UnsupportedError(f"the engine's modules are {shape}, its KV is {layout}")
    if str(model.dtype).removeprefix("torch.") != layout.dtype:
        raise UnsupportedError(f"the engine computes in {model.dtype}, its KV is {layout.dtype}")
    with torch.inference_mode():
        vocabulary = vllm_config.model_config.get_vocab_size()
        prove(model, vocabulary, model.device, most_positions=model.positions)
    return model
