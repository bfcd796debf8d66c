"""What relocation and repair need of a model, whichever engine runs it.

An adapter reads the engine's own modules: it never builds weights, norms or frequencies again.
All tensors are torch tensors on the model's device, without a batch dimension: one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvist.accel.blend.relocate import Rope

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlendShape:
    """Sizes of a model's attention; `scale` multiplies query · key before the softmax."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float


class BlendModel(Protocol):
    """A decoder whose layers are: norm, attention, residual, norm, MLP, residual."""

    @property
    def shape(self) -> BlendShape:
        """Sizes, the same in every layer."""

    def embed(self, tokens: Tensor) -> Tensor:
        """`[n]` int64 token ids → `[n, hidden]`, what the first layer is given."""

    def project(
        self, layer: int, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Input norm, Q/K/V, their norms, and RoPE at `positions`.

        Args:
            layer: from 0.
            hidden: `[n, hidden]`.
            positions: `[n]` int64, each token's position in its sequence; any order, gaps allowed.

        Returns:
            q `[n, heads, head_dim]`, k and v `[n, kv_heads, head_dim]`.
        """

    def finish(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """Output projection, residual, norm, MLP and residual.

        Args:
            layer: from 0.
            hidden: `[n, hidden]`, what `project` was given for these tokens.
            attended: `[n, heads * head_dim]`.

        Returns:
            `[n, hidden]`: what the next layer is given.
        """

    def rope(self, layer: int) -> Rope | None:
        """How the keys of a layer are rotated; `None` for a layer without RoPE."""
