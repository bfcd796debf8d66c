"""Puts huge pages behind the engine's KV cache in host memory, in the background, once.

A CPU engine allocates its KV cache in small pages. Attention reads all of a context's KV for every
token, and loads and saves copy through it; both wait for the TLB on small pages. The memory stays
where it is in the address space and keeps its contents: the kernel moves pages under the engine's
feet, one huge page at a time, at low priority, and gives way to its steps.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch

from kvist.tiers.mapping import HUGE_BYTES, collapse
from kvist.tiers.warmer import GiveWay, step_aside

_MOST_BYTES = 4 << 30  # of the pages that engines use first
_IN_A_ROW = 4  # huge pages of one layer before those of the next


def care_for(
    layers: Sequence[torch.Tensor],
    cpus: set[int] | None = None,
    give_way: GiveWay | None = None,
) -> threading.Thread | None:
    """Starts the thread; `None` where there is nothing for it to do.

    Args:
        layers: KV tensors of all layers, `[pages, ...]`, in host memory.
        cpus: where the thread may run; by default where the caller may.
        give_way: to the engine's steps.
    """
    if not HUGE_BYTES:
        return None
    thread = threading.Thread(
        target=_care,
        args=(list(layers), cpus, give_way or GiveWay()),
        name="kvist-pages",
        daemon=True,
    )
    thread.start()
    return thread


def _care(layers: Sequence[torch.Tensor], cpus: set[int] | None, give_way: GiveWay) -> None:
    step_aside(cpus)
    for address in _addresses(layers):
        give_way.let_through()
        collapse(address, HUGE_BYTES)


def _addresses(layers: Sequence[torch.Tensor]) -> Iterator[int]:
    """Of what can become huge pages: the first of every layer, then the next.

    Engines hand pages out from the first.
    """
    share = _MOST_BYTES // len(layers)
    spans = []
    for layer in layers:
        size = min(layer.numel() * layer.element_size(), share)
        first = -(-layer.data_ptr() // HUGE_BYTES) * HUGE_BYTES
        spans.append(range(first, layer.data_ptr() + size - HUGE_BYTES + 1, HUGE_BYTES))
    for start in range(0, max(map(len, spans)), _IN_A_ROW):
        for span in spans:
            yield from span[start : start + _IN_A_ROW]
