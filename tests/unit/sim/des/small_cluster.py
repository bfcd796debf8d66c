"""A small cluster and traffic that tests share."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvist.core.hints import Finish
from kvist.cost.catalogue import model
from kvist.cost.decode import DecodeCoefficients
from kvist.cost.device import Hardware, device
from kvist.cost.prefill import PrefillCoefficients
from kvist.sim.des.spec import ArrivalSpec, ClusterSpec, EngineSpec, Role, StoreSpec, TierSpec
from kvist.sim.traces import Request, Trace

BLOCK_TOKENS = 64
PREFILL = PrefillCoefficients(0.01, 1e-4, 1e-9)
DECODE = DecodeCoefficients(0.02, 1e-4, 1e-7)
LLAMA = model("Llama-3-8B")
BLOCK_BYTES = LLAMA.token_bytes * BLOCK_TOKENS


def engine(**changes: Any) -> EngineSpec:
    """Round coefficients; a step that takes any prompt."""
    base = EngineSpec(step_tokens=100_000, hbm_tokens=50_000, prefill=PREFILL, decode=DECODE)
    return dataclasses.replace(base, **changes)


def store(dram_blocks: int = 0, ssd_blocks: int = 0, policy: str = "lru", **more: Any) -> StoreSpec:
    """Tiers of so many blocks a node."""
    return StoreSpec(
        dram=TierSpec(dram_blocks * BLOCK_BYTES, policy),
        ssd=TierSpec(ssd_blocks * BLOCK_BYTES, policy),
        **more,
    )


def cluster(nodes: int = 1, **changes: Any) -> ClusterSpec:
    """Mixed nodes, spread off."""
    base = ClusterSpec(
        model=LLAMA,
        hardware=Hardware(device("h100")),
        roles=(Role.MIXED,) * nodes,
        engine=engine(),
        arrivals=ArrivalSpec(spread=False),
    )
    return dataclasses.replace(base, **changes)


def request(
    time_s: float, name: str, tokens: int, output: int | None = 1, shared: int = 0, tail: str = ""
) -> Request:
    """A prompt of `tokens`, whose first `shared` blocks belong to `name`, the rest to `tail`."""
    count = -(-tokens // BLOCK_TOKENS)
    names = [name if i < shared or not tail else tail for i in range(count)]
    keys = tuple(f"{n}/{i}".encode() for i, n in enumerate(names))
    return Request(time_s, keys, tokens, output, Finish.UNKNOWN)


def trace(*requests: Request) -> Trace:
    """A trace of these."""
    return Trace.of("small", BLOCK_TOKENS, list(requests))
