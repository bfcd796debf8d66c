"""Puts huge pages behind the engine's KV cache in host memory, in the background, once.

A CPU engine allocates its KV cache in small pages. Attention reads all of a context's KV for every
token, and loads and saves copy through it; both wait for the TLB on small pages. The memory stays
where it is in the address space and keeps its contents: the kernel moves pages under the engine's
feet, a few MiB at a time, at low priority.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from kvist.tiers.mapping import HUGE_BYTES, collapse
from kvist.tiers.warmer import STEP_BYTES, step_aside

_MOST_BYTES = 4 << 30  # of the pages that engines use first


def care_for(
    layers: Sequence[torch.Tensor], cpus: set[int] | None = None
) -> threading.Thread | None:
    """Starts the thread; `None` where there is nothing for it to do.

    Args:
        layers: KV tensors of all layers, `[pages, ...]`, in host memory.
        cpus: where the thread may run; by default where the caller may.
    """
    if not HUGE_BYTES:
        return None
    thread = threading.Thread(
        target=_care, args=(list(layers), cpus), name="kvist-pages", daemon=True
    )
    thread.start()
    return thread


def _care(layers: Sequence[torch.Tensor], cpus: set[int] | None) -> None:
    step_aside(cpus)
    sizes = [layer.numel() * layer.element_size() for layer in layers]
    share = _MOST_BYTES // len(layers)
    # the first pages of every layer, then the next: engines hand pages out from the first
    for start in range(0, min(max(sizes), share), STEP_BYTES):
        for layer, size in zip(layers, sizes, strict=True):
            if start < size:
                collapse(layer.data_ptr() + start, min(STEP_BYTES, size - start))
