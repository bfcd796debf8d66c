"""What quantising needs to know of a block: its shape, its numbers, and how they are rounded."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Scheme(IntEnum):
    """What a value becomes: a step of a scale, or for INT4 of a scale above a zero point."""

    INT8 = 0
    FP8 = 1
    INT4 = 2


class Number(IntEnum):
    """What a block's values are."""

    BFLOAT16 = 0
    FLOAT16 = 1
    FLOAT32 = 2

    @property
    def width(self) -> int:
        """Bytes of a value."""
        return 4 if self is Number.FLOAT32 else 2


@dataclass(frozen=True, slots=True)
class QuantShape:
    """A canonical block `[layers][kinds][heads][tokens][dim]` and its groups.

    With two kinds, the first (K) is grouped by channel: `group` tokens of one channel share a
    scale. All else (V, a latent) is grouped by token: `group` channels of one token do. The last
    group may be shorter.
    """

    layers: int
    kinds: int
    heads: int
    tokens: int
    dim: int
    number: Number
    scheme: Scheme
    group: int

    def __post_init__(self) -> None:
        sizes = (self.layers, self.kinds, self.heads, self.tokens, self.dim, self.group)
        if min(sizes) < 1 or max(sizes) > 1 << 24:
            raise ValueError(f"a size in {self} is not from 1 to 2**24")

    @property
    def block_bytes(self) -> int:
        """Size of the block in bytes."""
        return self.layers * self.kinds * self.heads * self.tokens * self.dim * self.number.width

    def by_channel(self, kind: int) -> bool:
        """Whether a group of `kind` runs along the tokens of a channel."""
        return self.kinds == 2 and kind == 0

    def groups(self, kind: int) -> int:
        """Groups of one head of `kind`."""
        if self.by_channel(kind):
            return -(-self.tokens // self.group) * self.dim
        return self.tokens * -(-self.dim // self.group)

    @property
    def all_groups(self) -> int:
        """Groups of the whole block."""
        return self.layers * self.heads * sum(self.groups(k) for k in range(self.kinds))

    @property
    def row_bytes(self) -> int:
        """Bytes of the codes of one token of one head."""
        return (self.dim + 1) // 2 if self.scheme is Scheme.INT4 else self.dim

    @property
    def least_bytes(self) -> int:
        """Size of a body in which no group is raw: a scale, perhaps a zero, and codes."""
        zero_bytes = self.number.width if self.scheme is Scheme.INT4 else 0
        rows = self.layers * self.kinds * self.heads * self.tokens
        return self.all_groups * (2 + zero_bytes) + rows * self.row_bytes
