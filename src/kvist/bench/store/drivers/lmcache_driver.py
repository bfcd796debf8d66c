"""LMCache in process: its CPU backend, or its disk backend with O_DIRECT."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from lmcache.utils import CacheEngineKey  # type: ignore[import-not-found]
from lmcache.v1.config import LMCacheEngineConfig  # type: ignore[import-not-found]
from lmcache.v1.event_manager import EventManager  # type: ignore[import-not-found]
from lmcache.v1.metadata import LMCacheMetadata  # type: ignore[import-not-found]
from lmcache.v1.storage_backend.storage_manager import StorageManager  # type: ignore[import-not-found]
from obey import forget, load_blocks, obey, prove  # type: ignore[import-not-found]

_LAYERS, _HEADS, _DIM, _TOKENS = 32, 8, 128, 16
_SHAPE = torch.Size([2, _LAYERS, _TOKENS, _HEADS * _DIM])
_BATCH = 32
_GIB = 2**30
_POLL_S = 0.0005
_WRITTEN_S = 60.0


def _key(round_number: int, i: int) -> Any:
    return CacheEngineKey(
        model_name="blocks",
        world_size=1,
        worker_id=0,
        chunk_hash=(round_number << 20) + i,
        dtype=torch.bfloat16,
    )


class Peer:
    """Allocates its own memory objects and copies into and out of them with torch."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.source, self.target = load_blocks(settings)
        self.count = settings["count"]
        self.is_disk = settings["medium"] == "disk"
        self.folder = Path(settings["folder"]) / "data"
        size_gib = self.count * settings["block_bytes"] / _GIB
        options: dict[str, Any] = {"local_cpu": True, "max_local_cpu_size": 1.5 * size_gib}
        if self.is_disk:
            options |= {
                "local_cpu": False,
                "local_disk": str(self.folder),
                "max_local_disk_size": 4 * size_gib,
                "extra_config": {"use_odirect": True},
            }
        self.manager = StorageManager(
            config=LMCacheEngineConfig.from_defaults(chunk_size=_TOKENS, **options),
            metadata=LMCacheMetadata(
                model_name="blocks",
                world_size=1,
                local_world_size=1,
                worker_id=0,
                local_worker_id=0,
                kv_dtype=torch.bfloat16,
                kv_shape=(_LAYERS, 2, _TOKENS, _HEADS, _DIM),
                chunk_size=_TOKENS,
            ),
            event_manager=EventManager(),
        )
        self.backend = "LocalDiskBackend" if self.is_disk else "LocalCPUBackend"
        self.blocks = self._tensors(self.source)
        self.room = self._tensors(self.target)

    def _tensors(self, memory: Any) -> torch.Tensor:
        return torch.from_numpy(memory).view(torch.bfloat16).view(self.count, *_SHAPE)

    def write(self, round_number: int) -> float:
        """Allocates, copies and puts in batches; on disk until all is written and synced."""
        self._forget_all(round_number - 1)
        began = time.perf_counter()
        for first in range(0, self.count, _BATCH):
            run = range(first, min(first + _BATCH, self.count))
            objects = self.manager.batched_allocate(_SHAPE, torch.bfloat16, len(run))
            for i, held in zip(run, objects, strict=True):
                held.tensor.copy_(self.blocks[i])
            self.manager.batched_put([_key(round_number, i) for i in run], objects)
        if self.is_disk:
            self._wait_until_durable(round_number)
        return time.perf_counter() - began

    def _wait_until_durable(self, round_number: int) -> None:
        disk = self.manager.storage_backends[self.backend]
        give_up = time.monotonic() + _WRITTEN_S
        for i in range(self.count):
            while disk.exists_in_put_tasks(_key(round_number, i)):
                if time.monotonic() > give_up:
                    raise RuntimeError("a put did not end")
                threading.Event().wait(_POLL_S)
        for path in self.folder.iterdir():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

    def read(self, round_number: int) -> float:
        """Gets batches and copies them out."""
        forget(self.target)
        began = time.perf_counter()
        for first in range(0, self.count, _BATCH):
            run = range(first, min(first + _BATCH, self.count))
            keys = [_key(round_number, i) for i in run]
            for i, held in zip(run, self.manager.batched_get(keys, self.backend), strict=True):
                self.room[i].copy_(held.tensor)
                held.ref_count_down()
        took_s = time.perf_counter() - began
        prove(self.source, self.target)
        return took_s

    def _forget_all(self, round_number: int) -> None:
        if not self.is_disk:
            self.manager.clear()
        elif round_number >= 0:
            disk = self.manager.storage_backends[self.backend]
            for i in range(self.count):
                disk.remove(_key(round_number, i))

    def close(self) -> None:
        """Ends its threads."""
        self.manager.close()


if __name__ == "__main__":
    obey(Peer)
