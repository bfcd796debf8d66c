"""The blended prefill: cached KV, of which the tokens that deviate most are computed again.

Theory of operation. KV of the first layer depends on the token and its position alone, so it is
computed for all. From the check layer on, tokens are computed that were not cached, and of those
cached the ones whose KV deviates most from what is stored; what is computed replaces what is stored
before any row attends to it. Tokens that deviate in one layer mostly do in the next, so each layer
chooses among those of the layer before, fewer and fewer. Rows attend by true position. Tokens that
were not cached do not compete: they are always computed.

Source: Yao et al., "CacheBlend" (EuroSys'25), §4. Different here: deviation is of K and V, each
relative to its size in that layer; fresh tokens never compete; a bound on the deviation left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from kvist.accel.blend.attention import attend
from kvist.accel.blend.model import BlendModel
from kvist.accel.blend.schedule import RepairPlan, kept_tokens

if TYPE_CHECKING:
    from torch import Tensor


class RepairOutcome(Enum):
    """What became of a prompt."""

    BLENDED = "blended"
    DEVIATES = "deviates"  # more than the plan allows, or no numbers: all was computed
    WHOLE = "whole"  # nothing was cached, or the plan computes all


@dataclass(frozen=True, slots=True)
class Repaired:
    """KV of a whole prompt.

    `keys` and `values` are `[layers, kv_heads, tokens, head_dim]`. `hidden` is
    `[fresh, hidden]`: the last layer's output for the tokens at `fresh_positions`, before the
    final norm. `repaired_tokens` were cached and computed again from the check layer on.
    `deviation_ratio` is the mean relative deviation, at that layer, of cached tokens that were not
    (0 where nothing was compared).
    """

    keys: Tensor
    values: Tensor
    hidden: Tensor
    fresh_positions: Tensor
    outcome: RepairOutcome
    repaired_tokens: int
    deviation_ratio: float


def repair(
    model: BlendModel,
    tokens: Tensor,
    keys: Tensor,
    values: Tensor,
    cached: Tensor,
    plan: RepairPlan,
    *,
    exact_tokens: int = 0,
) -> Repaired:
    """Computes KV of a prompt from what of it was cached.

    Args:
        model: whose KV it is.
        tokens: `[tokens]` int64, the whole prompt.
        keys: `[layers, kv_heads, tokens, head_dim]`, relocated already. Filled in and given back:
            the caller leaves it to us. What rows hold that are not cached does not matter.
        values: as `keys`.
        cached: `[tokens]` bool, rows that hold stored KV; not changed.
        plan: how much to compute again.
        exact_tokens: rows from the start that hold a matched prefix: exact, never computed.

    Returns:
        KV of the prompt, in the same tensors. Memory beside them is bounded by a layer.

    Raises:
        ValueError: shapes that do not belong together.
    """
    import torch

    _check(model, tokens, keys, values, cached, exact_tokens)
    with torch.no_grad():
        found = _Pass(model, tokens, keys, values, cached, plan, exact_tokens).run()
        if found is None:
            whole = replace(plan, ratio=1.0)
            found = _Pass(model, tokens, keys, values, cached, whole, exact_tokens).run()
            assert found is not None  # a whole pass is what the model says, whatever that is
            return replace(found, outcome=RepairOutcome.DEVIATES, deviation_ratio=math.inf)
        return found


class _Pass:
    def __init__(
        self,
        model: BlendModel,
        tokens: Tensor,
        keys: Tensor,
        values: Tensor,
        cached: Tensor,
        plan: RepairPlan,
        exact_tokens: int,
    ) -> None:
        import torch

        self._model = model
        self._keys = keys
        self._values = values
        self._plan = plan
        here = torch.arange(exact_tokens, len(tokens), device=tokens.device)
        self._rows = here  # positions computed in the layer at hand, ascending; replaced, not set
        self._spans = cached[exact_tokens:]  # which of them were cached
        self._cached_tokens = int(self._spans.sum())
        self._kept = kept_tokens(plan, self._cached_tokens, model.shape.layers)
        self._tokens = tokens
        self._deviation = 0.0
        self._repaired = 0
        self._outcome = (
            RepairOutcome.BLENDED if self._cached_tokens and plan.ratio < 1 else RepairOutcome.WHOLE
        )

    def run(self) -> Repaired | None:
        """KV of the prompt; `None` if stored KV made what was computed from it no numbers."""
        if self._plan.ratio == 0:
            self._narrow(~self._spans)
        hidden = self._model.embed(self._tokens[self._rows])
        for layer in range(self._model.shape.layers):
            hidden = self._layer(layer, hidden)
        if self._outcome is RepairOutcome.BLENDED and not bool(hidden.isfinite().all()):
            return None
        fresh = ~self._spans
        if self._outcome is RepairOutcome.WHOLE:
            self._repaired = self._cached_tokens
        return Repaired(
            self._keys,
            self._values,
            hidden[fresh],
            self._rows[fresh],
            self._outcome,
            self._repaired,
            self._deviation,
        )

    def _layer(self, layer: int, hidden: Tensor) -> Tensor:
        if not len(self._rows):
            return hidden
        q, k, v = self._model.project(layer, hidden, self._rows)
        keep = self._choose(layer, k, v)
        self._keys[layer][:, self._rows] = k.transpose(0, 1)
        self._values[layer][:, self._rows] = v.transpose(0, 1)
        if keep is not None:
            q, hidden = q[keep], hidden[keep]
            self._narrow(keep)
        attended = attend(
            q, self._keys[layer], self._values[layer], self._rows, self._model.shape.scale
        )
        return self._model.finish(layer, hidden, attended)

    def _narrow(self, keep: Tensor) -> None:
        self._rows, self._spans = self._rows[keep], self._spans[keep]

    def _choose(self, layer: int, k: Tensor, v: Tensor) -> Tensor | None:
        """Which rows go on, as `[rows]` bool, given their fresh KV; `None`: all of them."""
        step = layer - self._plan.check_layer
        if step < 0 or self._outcome is not RepairOutcome.BLENDED or self._plan.ratio == 0:
            return None
        spans = self._spans.nonzero()[:, 0]
        kept = self._kept[step]
        if kept >= len(spans) and step:
            return None
        rows = self._rows[spans]
        deviation = relative_deviation(
            k[spans].transpose(0, 1), self._keys[layer][:, rows]
        ) + relative_deviation(v[spans].transpose(0, 1), self._values[layer][:, rows])
        chosen = deviation.topk(kept).indices
        if step == 0:
            left = deviation.sum() - deviation[chosen].sum()
            self._deviation = float(left) / max(1, len(spans) - kept)
            # What is not a number is not within any bound.
            if not self._deviation <= self._plan.most_deviation_ratio:
                self._outcome = RepairOutcome.DEVIATES
                self._repaired = self._cached_tokens
                return None
            self._repaired = kept
        keep = ~self._spans
        keep[spans[chosen]] = True
        return keep


def relative_deviation(new: Tensor, stored: Tensor) -> Tensor:
    """Squared distance of each token's vectors over their mean squared size; `[n]` float32.

    Args:
        new: `[kv_heads, n, head_dim]`, as the model computes it now.
        stored: as `new`.
    """
    fresh = new.float()
    apart = (fresh - stored.float()).square().sum(dim=(0, 2))
    size = fresh.square().sum(dim=(0, 2)).mean()
    return apart / size.clamp_min(1e-12)


def _check(
    model: BlendModel, tokens: Tensor, keys: Tensor, values: Tensor, cached: Tensor, exact: int
) -> None:
    shape = model.shape
    want = (shape.layers, shape.kv_heads, len(tokens), shape.head_dim)
    if tuple(keys.shape) != want or tuple(values.shape) != want:
        raise ValueError(f"KV of shape {tuple(keys.shape)}, {tuple(values.shape)}; not {want}")
    if tuple(cached.shape) != (len(tokens),) or not 0 <= exact <= len(tokens):
        raise ValueError(f"{tuple(cached.shape)} marks, {exact} exact, of {len(tokens)} tokens")
