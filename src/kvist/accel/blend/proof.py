"""Start-up checks: that keys can be moved, and that repair computes what the model computes.

A model that fails has blend off; nothing else changes for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvist.accel.blend.model import BlendModel
from kvist.accel.blend.relocate import relocate
from kvist.accel.blend.repair import repair
from kvist.accel.blend.schedule import RepairPlan
from kvist.core.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

_TOKENS = 24
_SHIFTS = (1, 37, 4000)
# Relative error of a key. Half-precision models round cos and sin as well: four roundings.
_EPSILONS = 4.0
_LEAST_ERROR = 1e-4  # float32 angles at 4,000 tokens


class OwnPass(BlendModel, Protocol):
    """A model that can also be asked what it computes by itself."""

    def own_pass(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[n]` → keys, values `[layers, kv_heads, n, head_dim]`, logits `[n, vocabulary]`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """`[n, hidden]` → `[n, vocabulary]`."""


def prove_relocation(
    model: BlendModel, tokens: Tensor, *, most_positions: int | None = None
) -> None:
    """Compares shifted keys with the model's own projection at the new positions, layer by layer.

    Args:
        model: whose keys shall be moved.
        tokens: `[n]` int64, any ids of its vocabulary, on its device.
        most_positions: that the model has, if it has a limit.

    Raises:
        UnsupportedError: they differ by more than their dtype's rounding.
    """
    import torch

    room = None if most_positions is None else most_positions - len(tokens)
    shifts = sorted({shift if room is None else min(shift, room) for shift in _SHIFTS})
    with torch.no_grad():
        hidden = model.embed(tokens)
        here = torch.arange(len(tokens), device=tokens.device)
        for layer in range(model.shape.layers):
            _, stored, values = model.project(layer, hidden, here)
            for shift in shifts:
                _, own, same = model.project(layer, hidden, here + shift)
                moved = relocate(stored.transpose(0, 1), here, here + shift, model.rope(layer))
                _same(moved.transpose(0, 1), own, f"keys of layer {layer} moved by {shift}")
                _same(values, same, f"values of layer {layer} moved by {shift}")


def prove_model(model: OwnPass, tokens: Tensor) -> None:
    """Compares a repair that computes everything with the model's own forward pass.

    Raises:
        UnsupportedError: they differ by more than their dtype's rounding adds up to.
    """
    import torch

    keys, values, logits = model.own_pass(tokens)
    nothing = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    found = repair(
        model, tokens, torch.empty_like(keys), torch.empty_like(values), nothing, RepairPlan(1.0)
    )
    depth = model.shape.layers
    _same(found.keys, keys, "keys of a whole pass", depth)
    _same(found.values, values, "values of a whole pass", depth)
    _same(model.logits(found.hidden), logits, "logits of a whole pass", depth)


def prove(
    model: OwnPass,
    vocabulary: int,
    device: object = "cpu",
    *,
    most_positions: int | None = None,
) -> None:
    """Both proofs, on made-up tokens below `vocabulary` and below `most_positions`, if given.

    Raises:
        UnsupportedError: the model cannot be blended.
    """
    import torch

    numbers = torch.arange(1, _TOKENS + 1, dtype=torch.int64, device=device)
    tokens = (numbers * 7919 + 13) % vocabulary
    prove_relocation(model, tokens, most_positions=most_positions)
    prove_model(model, tokens)


def _same(found: Tensor, want: Tensor, what: str, layers: int = 1) -> None:
    import torch

    exact = want.detach().float()
    apart = (found.detach().float() - exact).norm(dim=-1)
    size = exact.norm(dim=-1)
    limit = max(_LEAST_ERROR, _EPSILONS * torch.finfo(want.dtype).eps * max(1.0, layers**0.5))
    # A vector of almost nothing is all rounding: it is held to the mean size.
    worst = float((apart / size.clamp_min(float(size.mean()) * 0.1 + 1e-9)).max())
    if not worst <= limit:  # not a number fails too
        raise UnsupportedError(
            f"blend: {what} are off by {worst:.2g} (at most {limit:.2g})", remedy="leave blend off"
        )
