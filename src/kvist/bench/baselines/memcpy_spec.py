"""Lets vLLM's own offloading connector run on a CPU, as a baseline.

vLLM's tier manager, file tier, lookup and eviction are used unchanged. Only the copy between the
engine's pages and the host region, which vLLM has for GPUs alone, is replaced by a plain copy.

Names under `spec_name` and `spec_module_path` of `OffloadingConnector`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

Views = list[tuple[torch.Tensor, torch.Tensor]]


def copy_rows(views: Views, pages: Sequence[int], chunks: Sequence[int], *, store: bool) -> int:
    """Copies `pages` of the engine to `chunks` of the host, or back; returns the bytes copied.

    Args:
        views: for each KV tensor the engine's and the host's bytes, both `[row, byte]`.
        pages: rows of the engine's views.
        chunks: rows of the host's views, one for each page.
        store: from the engine to the host.
    """
    engine_rows = torch.as_tensor(pages, dtype=torch.long)
    host_rows = torch.as_tensor(chunks, dtype=torch.long)
    for engine, host in views:
        if store:
            host[host_rows] = engine[engine_rows]
        else:
            engine[engine_rows] = host[host_rows]
    return sum(len(pages) * int(engine.shape[1]) for engine, _ in views)


class MemcpyWorker(OffloadingWorker):  # type: ignore[misc]  # vLLM's classes carry no types
    """Copies at once, on the engine's thread; a job is finished when it was submitted."""

    def __init__(self, views: Views, region: Any) -> None:
        self._views, self._region = views, region
        self._finished: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """From pages to the host."""
        return self._submit(job_id, src_spec.block_ids, dst_spec.block_ids, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """From the host to pages."""
        return self._submit(job_id, dst_spec.block_ids, src_spec.block_ids, store=False)

    def _submit(
        self, job_id: int, pages: Sequence[int], chunks: Sequence[int], *, store: bool
    ) -> bool:
        began = time.perf_counter()
        size_bytes = copy_rows(self._views, pages, chunks, store=store)
        took_s = time.perf_counter() - began
        measured: dict[str, Any] = {"transfer_size": size_bytes, "transfer_time": took_s}
        self._finished.append(TransferResult(job_id, success=True, **measured))
        return True

    def get_finished(self) -> list[Any]:
        """Jobs finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def shutdown(self) -> None:
        """Lets go of the host region."""
        self._views = []
        self._region.cleanup()


class MemcpyTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiering spec with `MemcpyWorker` for the copies."""

    _worker: Any

    def get_worker(self, kv_caches: Any) -> Any:
        """The worker of this rank, made at the first call.

        Raises:
            ValueError: chunks of several pages were asked for.
        """
        if self._worker is None:
            if self.blocks_per_chunk != 1:
                raise ValueError("this baseline copies one page a chunk")
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            views = [
                (
                    t.tensor.view(torch.int8).view(-1, t.page_size_bytes),
                    region.create_next_worker_view(t.page_size_bytes),
                )
                for t in kv_caches.tensors
            ]
            self._worker = MemcpyWorker(views, region)
        return self._worker
