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

    Source: Su et al., "RoFormer" (2021), §3.4.2: R(p) R(q) = R(p + q). Angles are rounded to
    float32 at both ends as models do, so that their rounding is moved as well.
    """
    import torch

    if rope is None:
        return keys
    frequencies = torch.tensor(rope.inverse_frequencies, dtype=torch.float32, device=keys.device)
    # The model rounds position × frequency to float32: 1e-4 rad at 4,000 tokens.
    there = (to_positions.to(torch.float32)[:, None] * frequencies).double()
    here = (from_positions.to(torch.float32)[:, None] * frequencies).double()
    angle = there - here
    cos, sin = angle.cos().float(), angle.sin().float()  # [n, rotary_dim / 2]
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
