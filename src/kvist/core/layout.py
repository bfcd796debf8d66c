"""The canonical block: what the bytes of one block mean, for every engine and every TP size.

`[layer][k|v][kv_head][token][head_dim]` in the KV dtype, C-contiguous. For multi-head latent
attention (MLA) there is one latent a token and no head: `[layer][token][latent]`. Heads are
contiguous per (layer, k|v), so a tensor-parallel rank reads and writes slices of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvist.core.errors import LayoutError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3": 1, "float8_e5m2": 1}


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """The KV heads `[start, start + count)` that one tensor-parallel rank holds."""

    start: int
    count: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Shape of one canonical block.

    `kinds` is 2 for separate K and V and 1 for an MLA latent (then `kv_heads` is 1 and
    `head_dim` the latent size).
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    kinds: int = 2

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise LayoutError(f"unknown KV dtype {self.dtype!r}; known: {sorted(DTYPE_BYTES)}")
        for name in ("layers", "kv_heads", "head_dim", "block_tokens"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.kinds not in (1, 2):
            raise LayoutError(f"kinds must be 1 (latent) or 2 (K and V), not {self.kinds}")

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one kind in one layer: `block_tokens × head_dim` elements."""
        return self.block_tokens * self.head_dim * self.itemsize

    @property
    def block_bytes(self) -> int:
        return self.layers * self.kinds * self.kv_heads * self.head_bytes

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all layers and heads."""
        return self.block_bytes // self.block_tokens

    def head_offset_bytes(self, layer: int, kind: int, head: int) -> int:
        """Byte offset of `[layer][kind][head]` in a block."""
        return ((layer * self.kinds + kind) * self.kv_heads + head) * self.head_bytes

    def head_slice(self, rank: int, size: int) -> HeadSlice:
        """The heads of tensor-parallel `rank` of `size`.

        Where there are fewer heads than ranks, neighbours hold copies of one head, as vLLM does.

        Raises:
            LayoutError: neither number divides the other.
        """
        if not 0 <= rank < size:
            raise LayoutError(f"rank {rank} is not in a group of {size}")
        if self.kv_heads % size == 0:
            count = self.kv_heads // size
            return HeadSlice(rank * count, count)
        if size % self.kv_heads == 0:
            return HeadSlice(rank * self.kv_heads // size, 1)
        raise LayoutError(f"{self.kv_heads} KV heads cannot be split over {size} ranks")
