"""Who takes part in the benchmark: vLLM alone, with Kvist, and with what else keeps KV."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

VLLM = "vllm"
KVIST = "kvist"
OFFLOADING = "offloading"
LMCACHE = "lmcache"
SLOW_PLANNED = "kvist-slow-disk"
SLOW_ALWAYS = "kvist-slow-disk-always"

BLOCK_TOKENS = 128
MAX_MODEL_TOKENS = 8192
_ENGINE_KV_GIB = 2
_HOST_BYTES = 2 << 30
_DISK_BYTES = 8 << 30
_SLOW_BYTES_PER_S = 8_000_000  # any CPU computes a block of this model sooner than that brings it
_SLOW_HOST_BYTES = 64 << 20  # one prompt's blocks, so that the next one pushes them out


@dataclass(frozen=True, slots=True)
class Participant:
    """One kind of engine process.

    Attributes:
        name: in samples.
        cache: vLLM's `kv_transfer_config`, or nothing.
        has_memory: the cache's memory, which ends with the engine, is a place of its own.
        folder: files of the cache.
        python: the interpreter, if not ours.
        disk_knobs: what makes the cache read its files only when a request asks for them.
        slow_disk: takes part only where a slow disk is measured.
    """

    name: str
    cache: Mapping[str, Any] | None = None
    has_memory: bool = False
    folder: Path | None = None
    python: Path | None = None
    disk_knobs: Mapping[str, Any] = field(default_factory=dict)
    slow_disk: bool = False

    def from_disk(self) -> Participant:
        """The same with `disk_knobs`."""
        if self.cache is None or not self.disk_knobs:
            return self
        knobs = {**self.cache["kv_connector_extra_config"], **self.disk_knobs}
        return replace(self, cache={**self.cache, "kv_connector_extra_config": knobs})


def vllm_alone() -> Participant:
    """The engine as it comes, with its own prefix cache."""
    return Participant(VLLM)


def vllm_with_kvist(work: Path) -> Participant:
    """Kvist with a bounded DRAM arena and a folder on disk; everything else at its default."""
    folder = work / "kvist"
    knobs = {
        "store.dram.capacity": _HOST_BYTES,
        "store.ssd.path": str(folder),
        "store.ssd.capacity": _DISK_BYTES,
    }
    return Participant(
        KVIST,
        cache=_cache("KvistConnector", KVIST, knobs, kv_load_failure_policy="recompute"),
        has_memory=True,
        folder=folder,
        disk_knobs={"store.dram.restore": 0.0},
    )


def vllm_with_slow_disk(work: Path, name: str) -> Participant:
    """Kvist over a disk that is slower than computing; `name` says how it decides about loads."""
    folder = work / name
    knobs = {
        "store.dram.capacity": _SLOW_HOST_BYTES,
        "store.dram.restore": 0.0,
        "store.ssd.path": str(folder),
        "store.ssd.capacity": _DISK_BYTES,
        "connector.load_policy": "always" if name == SLOW_ALWAYS else "planned",
        "bench.read_bytes_per_s": _SLOW_BYTES_PER_S,
    }
    more = {
        "kv_connector_module_path": "kvist.bench.throttled",
        "kv_load_failure_policy": "recompute",
    }
    cache = _cache("ThrottledConnector", name, knobs, **more)
    return Participant(name, cache=cache, folder=folder, slow_disk=True)


def vllm_with_offloading(work: Path) -> Participant:
    """vLLM's own offloading: a CPU tier as large as Kvist's DRAM tier, and files."""
    folder = work / "offloading"
    knobs = {
        "spec_name": "MemcpyTieringSpec",
        "spec_module_path": "kvist.bench.baselines.memcpy_spec",
        "cpu_bytes_to_use": _HOST_BYTES,
        "secondary_tiers": [{"type": "fs", "root_dir": str(folder)}],
    }
    return Participant(
        OFFLOADING,
        cache=_cache("OffloadingConnector", OFFLOADING, knobs),
        has_memory=True,
        folder=folder,
    )


def vllm_with_lmcache(python: Path, port: int) -> Participant:
    """LMCache's multi-process mode. Its server outlives the engine and keeps KV in memory.

    Args:
        python: interpreter of the environment that has LMCache and vLLM.
        port: of its server.
    """
    knobs = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    return Participant(
        LMCACHE,
        cache=_cache("LMCacheMPConnector", LMCACHE, knobs),
        python=python,
    )


def engine_settings(model: Path, participant: Participant) -> dict[str, Any]:
    """Arguments of vLLM's `LLM`: the same for all but the cache."""
    settings: dict[str, Any] = {
        "model": str(model),
        "dtype": "bfloat16",
        "max_model_len": MAX_MODEL_TOKENS,
        "block_size": BLOCK_TOKENS,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        # The default hashes a pickle, which differs between processes; file names need one that
        # does not.
        "prefix_caching_hash_algo": "sha256_cbor",
    }
    if participant.cache is not None:
        settings["kv_transfer_config"] = dict(participant.cache)
    if participant.slow_disk:
        settings["disable_log_stats"] = False  # what the connector has learned is asked for
    return settings


def engine_environment(cores: str, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of every engine: the user's, without settings of Kvist."""
    base = os.environ if base is None else base
    env = {k: v for k, v in base.items() if not k.startswith("KVIST_")}
    env.update(
        VLLM_CPU_KVCACHE_SPACE=str(_ENGINE_KV_GIB),
        VLLM_CPU_OMP_THREADS_BIND=cores,
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        LMCACHE_TRACK_USAGE="false",
        HF_HUB_OFFLINE="1",
    )
    return env


def _cache(connector: str, name: str, knobs: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    # The engine's id names its shared memory, so that we can remove what a killed one leaves.
    return {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "engine_id": f"kvist-bench-{os.getpid()}-{name}",
        "kv_connector_extra_config": dict(knobs),
        **more,
    }
