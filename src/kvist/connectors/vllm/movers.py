"""Movers: the copies themselves, for CPU pages (native code) and for accelerator pages (torch)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy as np
import torch

from kvist.connectors.pages import RegionMap, TensorView, page_map, strided_map
from kvist.connectors.plan import SKIP_PAGE
from kvist.connectors.vllm.copier import ALL_CPUS, JobKind, Moved
from kvist.connectors.vllm.cpu_layout import PageShape, learn
from kvist.connectors.vllm.engine_facts import EngineFacts, layer_index, rank_heads
from kvist.connectors.vllm.messages import CopyJob
from kvist.core.errors import LayoutError
from kvist.core.layout import HeadSlice
from kvist.native import Direction, move_pages, move_pages_checksum
from kvist.tiers.dram import ArenaMap

_WIDE_THREADS = 8  # beyond this, copies wait for memory, not for cores


def ordered_layers(caches: Mapping[str, torch.Tensor]) -> tuple[int, list[torch.Tensor]]:
    """This rank's layers in model order, and the index of the first.

    Raises:
        LayoutError: the layers are not a run, or two share one memory.
    """
    layers = sorted((layer_index(name), tensor) for name, tensor in caches.items())
    indices = [i for i, _ in layers]
    if indices != list(range(indices[0], indices[0] + len(indices))):
        raise LayoutError(f"layers {indices} are not a run")
    if len({t.data_ptr() for _, t in layers}) != len(layers):
        raise LayoutError("several layers share one KV tensor")
    return indices[0], [t for _, t in layers]


def region_of(
    tensor: torch.Tensor, facts: EngineFacts, heads: HeadSlice, isa: str | None
) -> RegionMap:
    """The page map of one layer: learned where `isa` says that the CPU backend packs it."""
    page_tokens = facts.geometry.page_tokens
    if isa is not None:
        shape = PageShape(heads.count, page_tokens, facts.layout.head_dim, tensor.dtype)
        want = (heads.count, page_tokens, 2 * facts.layout.head_dim)
        if tuple(tensor.shape[1:]) != want or not tensor[0].is_contiguous():
            raise LayoutError(f"unexpected CPU page {tuple(tensor.shape)}, want {want}")
        learned = learn(shape, isa)
        return RegionMap(learned.offsets, learned.heads, tensor.stride(0))
    view = TensorView(tuple(tensor.shape), tuple(tensor.stride()))
    return strided_map(view, facts.layout, heads.count, page_tokens)


def _wide(threads: int) -> int:
    return max(threads, min(len(ALL_CPUS), _WIDE_THREADS))


class CpuMover:
    """Native gather and scatter between CPU pages and the arena."""

    def __init__(
        self,
        arena: ArenaMap,
        caches: Mapping[str, torch.Tensor],
        facts: EngineFacts,
        tp_rank: int,
        region: RegionMap,
        threads: int,
    ) -> None:
        """`region` is that of every layer; `threads` is for copies beside a forward pass."""
        first, tensors = ordered_layers(caches)
        heads = rank_heads(facts.layout, tp_rank, facts.tp_size)
        self._arena, self._layout, self._threads = arena, facts.layout, threads
        self._alone = facts.world_size == 1  # no other rank fills a part of a block
        self.used_bytes = 0  # how far into the arena copies have gone
        self.first_layer = first
        self._page_bytes: int = sum(t[0].numel() * t.element_size() for t in tensors)
        self._map = page_map(
            region,
            [t.data_ptr() for t in tensors],
            facts.layout,
            heads,
            facts.geometry.page_tokens,
        )

    def move(self, kind: JobKind, job: CopyJob, *, wide: bool) -> Moved:
        """Copies every block of the job; takes the checksums of those that it fills whole."""
        threads = _wide(self._threads) if wide else self._threads
        direction = Direction.GATHER if kind is JobKind.SAVE else Direction.SCATTER
        if not job.slots:
            return Moved(0)
        self.used_bytes = max(self.used_bytes, max(job.slots) + self._layout.block_bytes)
        base = self._arena.address + self._layout.head_offset_bytes(self.first_layer, 0, 0)
        slots = np.asarray(job.slots, dtype=np.uint64) + np.uint64(base)
        pages = np.asarray(job.pages, dtype=np.int64)
        sums: list[int] = []
        if kind is JobKind.SAVE and self._alone and (pages != SKIP_PAGE).all():
            sums = move_pages_checksum(direction, slots, pages, self._map, threads=threads)
        else:
            move_pages(direction, slots, pages, self._map, threads=threads)
        size_bytes = int((pages != SKIP_PAGE).sum()) * self._page_bytes
        return Moved(size_bytes, dict(zip(job.slots, sums, strict=False)))

    def close(self) -> None:
        """Lets go of the arena; nothing is being copied."""
        self._arena.close()


class CpuPages:
    """Rows of one request between its pages and ordinary memory, on the calling thread."""

    def __init__(
        self, caches: Mapping[str, torch.Tensor], facts: EngineFacts, region: RegionMap
    ) -> None:
        _, tensors = ordered_layers(caches)
        self._map = page_map(
            region,
            [t.data_ptr() for t in tensors],
            facts.layout,
            HeadSlice(0, facts.layout.kv_heads),
            facts.geometry.page_tokens,
        )
        self._keep = tensors  # the map holds addresses only

    def move(self, direction: Direction, kv: torch.Tensor, pages: Seq[int]) -> None:
        """Moves `kv`, `[layers, 2, kv_heads, tokens, head_dim]` contiguous, as one long block.

        `pages` are those of all its tokens in order; `SKIP_PAGE` leaves a page alone.
        """
        slot = np.array([kv.data_ptr()], dtype=np.uint64)
        move_pages(direction, slot, np.array([pages], dtype=np.int64), self._map, threads=1)


class TorchMover:
    """Gather and scatter of strided pages on an accelerator, on a stream of its own.

    Pages are permuted on the device and cross the bus as one contiguous canonical block, through
    the arena registered as pinned memory.
    """

    def __init__(
        self,
        arena: ArenaMap,
        caches: Mapping[str, torch.Tensor],
        facts: EngineFacts,
        tp_rank: int,
    ) -> None:
        self.first_layer, self._tensors = ordered_layers(caches)
        self._layers = range(self.first_layer, self.first_layer + len(self._tensors))
        self._layout, self._geometry = facts.layout, facts.geometry
        self._heads = rank_heads(facts.layout, tp_rank, facts.tp_size)
        self._regions = [region_of(t, facts, self._heads, None) for t in self._tensors]
        self._arena = arena
        device = self._tensors[0].device
        self._index = [self._elements(r).to(device) for r in self._regions]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if device.type == "cuda":
            torch.cuda.cudart().cudaHostRegister(arena.address, arena.size_bytes, 0)

    @staticmethod
    def _elements(region: RegionMap) -> torch.Tensor:
        """`[kind, head, element]` offsets in a page."""
        return torch.from_numpy(region.heads[:, :, None] + region.offsets[:, None, :])

    def move(self, kind: JobKind, job: CopyJob, *, wide: bool) -> Moved:
        """Copies every block of the job."""
        del wide  # the copies run on the device
        moved = 0
        with torch.cuda.stream(self._stream) if self._stream else torch.no_grad():
            for slot, row in zip(job.slots, job.pages, strict=True):
                block = self._slot(slot)
                for column, page in enumerate(row):
                    if page != SKIP_PAGE:
                        moved += sum(self._page(kind, block, column, page, i) for i in self._layers)
        if self._stream is not None:
            self._stream.synchronize()
        return Moved(moved)

    def close(self) -> None:
        """Lets go of the arena; nothing is being copied."""
        if self._stream is not None:
            torch.cuda.cudart().cudaHostUnregister(self._arena.address)
        self._arena.close()

    def _slot(self, offset: int) -> torch.Tensor:
        """`[layer, kind, head, page, element]` view of a canonical block in the arena."""
        lay = self._layout
        view = self._arena.view(offset // self._arena.slot_bytes)[: lay.block_bytes]
        raw = torch.frombuffer(view, dtype=self._tensors[0].dtype)
        pages = self._geometry.pages_per_block
        return raw.view(lay.layers, lay.kinds, lay.kv_heads, pages, -1)

    def _page(self, kind: JobKind, block: torch.Tensor, column: int, page: int, layer: int) -> int:
        heads = slice(self._heads.start, self._heads.start + self._heads.count)
        i = layer - self.first_layer
        tensor = self._tensors[i]
        host = block[layer, :, heads, column]
        flat = tensor.as_strided((_span(tensor),), (1,), tensor.storage_offset())
        where = self._index[i] + page * self._regions[i].page_stride
        if kind is JobKind.SAVE:
            host.copy_(flat[where], non_blocking=False)
        else:
            flat[where] = host.to(tensor.device, non_blocking=True)
        return int(host.numel() * host.element_size())


def _span(tensor: torch.Tensor) -> int:
    """Elements from the first to the last that the tensor addresses."""
    return 1 + sum(
        (int(n) - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True)
    )
