"""Keys moved from the position at which they were stored to another.

RoPE turns each pair of a key's elements by `position × frequency`, so a key computed at one
position becomes that of another by turning it on by the difference. Values carry no position.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class RopeStyle(Enum):
    """Which two elements of a head turn together: (i, i + rotary_dim/2), or (2i, 2i + 1)."""

    HALVES = "halves"
    PAIRS = "pairs"


@dataclass(frozen=True, slots=True)
class Rope:
    """A layer's rotation: the model's own inverse frequencies, after its scaling, in radians/token.

    The first `rotary_dim` elements of a head turn, the others stay. An amplitude (YaRN) is in the
    stored keys already and is not applied again.
    """

    inverse_frequencies: tuple[float, ...]
    style: RopeStyle = RopeStyle.HALVES

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.inverse_frequencies)


class Relocation:
    """Rows that move together: their angles are worked out once for all layers with one `Rope`.

    Args:
        from_positions: `[n]` int64, where the rows were computed.
        to_positions: `[n]` int64, where they shall stand.
    """

    def __init__(self, from_positions: Tensor, to_positions: Tensor) -> None:
        self._from = from_positions
        self._to = to_positions
        self._turns: dict[Rope, tuple[Tensor, Tensor]] = {}

    def apply(self, keys: Tensor, rope: Rope | None) -> Tensor:
        """As `relocate`, for a layer's keys `[..., n, head_dim]`."""
        import torch

        if rope is None:
            return keys
        if rope not in self._turns:
            self._turns[rope] = self._angles(rope)
        cos, sin = self._turns[rope]  # [n, rotary_dim / 2]
        moved = keys.to(torch.float32, copy=True)
        if rope.style is RopeStyle.HALVES:
            half = rope.rotary_dim // 2
            first, second = slice(0, half), slice(half, rope.rotary_dim)
        else:
            first, second = slice(0, rope.rotary_dim, 2), slice(1, rope.rotary_dim, 2)
        a, b = moved[..., first].clone(), moved[..., second].clone()
        moved[..., first] = a * cos - b * sin
        moved[..., second] = b * cos + a * sin
        return moved.to(keys.dtype)

    def _angles(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """cos and sin in float32, of angles that are rounded as the model's are.

        A model rounds position × frequency to float32, by 1e-4 rad at 4,000 tokens.
        """
        import torch

        frequencies = torch.tensor(
            rope.inverse_frequencies, dtype=torch.float32, device=self._to.device
        )
        there = (self._to.to(torch.float32)[:, None] * frequencies).double()
        here = (self._from.to(torch.float32)[:, None] * frequencies).double()
        angle = there - here
        return angle.cos().float(), angle.sin().float()


def relocate(
    keys: Tensor, from_positions: Tensor, to_positions: Tensor, rope: Rope | None
) -> Tensor:
    """Keys as they would be at other positions. Values need nothing.

    Give it the *stored* keys: moving a copy again and again would add up rounding.

    Args:
        keys: `[..., n, head_dim]`, any float dtype; not changed.
        from_positions: `[n]` int64, where they were computed.
        to_positions: `[n]` int64, where they shall stand.
        rope: of their layer; `None`: the layer has no RoPE and the keys are returned as they are.

    Returns:
        A new tensor of the shape and dtype of `keys`, turned in float32.

    Source: Su et al., "RoFormer" (2021), §3.4.2: R(p) R(q) = R(p + q).
    """
    return Relocation(from_positions, to_positions).apply(keys, rope)
