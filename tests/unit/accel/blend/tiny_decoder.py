"""A decoder of a few lines that repair can see, and the dense computation it is held to."""

from __future__ import annotations

from typing import Any

import torch

from kvist.accel.blend.model import BlendShape
from kvist.accel.blend.relocate import Rope, relocate

VOCABULARY = 61


class TinyDecoder:
    """Random weights; counts the rows that each layer is asked for."""

    def __init__(self, layers: int = 6, heads: int = 4, kv_heads: int = 2, dim: int = 8) -> None:
        self.shape = BlendShape(layers, heads, kv_heads, dim, scale=dim**-0.5)
        make = torch.Generator().manual_seed(3)
        hidden = heads * dim
        sizes = [heads * dim, kv_heads * dim, kv_heads * dim, hidden]
        self._table = torch.randn(VOCABULARY, hidden, generator=make)
        self._weights = [
            [torch.randn(hidden, n, generator=make) * hidden**-0.5 for n in (*sizes, hidden)]
            for _ in range(layers)
        ]
        self._rope = Rope(tuple(0.7 / 3**i for i in range(dim // 2)))
        self.projected: list[list[int]] = [[] for _ in range(layers)]
        self.finished: list[list[int]] = [[] for _ in range(layers)]
        self._rows: Any = None

    def embed(self, tokens: Any) -> Any:
        return self._table[tokens]

    def project(self, layer: int, hidden: Any, positions: Any) -> tuple[Any, Any, Any]:
        self.projected[layer] = positions.tolist()
        x = hidden / hidden.norm(dim=-1, keepdim=True) * hidden.shape[-1] ** 0.5
        q, k, v = (
            (x @ w).view(len(hidden), -1, self.shape.head_dim) for w in self._weights[layer][:3]
        )
        start = torch.zeros_like(positions)
        q, k = (
            relocate(t.transpose(0, 1), start, positions, self._rope).transpose(0, 1)
            for t in (q, k)
        )
        return q, k, v

    def finish(self, layer: int, hidden: Any, attended: Any) -> Any:
        self.finished[layer] = [len(hidden)]
        hidden = hidden + attended @ self._weights[layer][3]
        return hidden + torch.tanh(hidden @ self._weights[layer][4])

    def rope(self, layer: int) -> Rope:
        return self._rope


def dense(model: TinyDecoder, tokens: Any, frozen: Any = None) -> tuple[Any, Any, Any]:
    """Keys, values and hidden of all tokens, one row after another and without any kernel.

    `frozen` is (rows [tokens] bool, keys, values): rows whose KV is given in every layer.
    """
    places = torch.arange(len(tokens))
    hidden, all_keys, all_values = model.embed(tokens), [], []
    group = model.shape.heads // model.shape.kv_heads
    for layer in range(model.shape.layers):
        q, k, v = model.project(layer, hidden, places)
        if frozen is not None:
            rows, keys, values = frozen
            k, v = k.clone(), v.clone()
            k[rows] = keys[layer].transpose(0, 1)[rows]
            v[rows] = values[layer].transpose(0, 1)[rows]
        attended = torch.stack([attend_row(q[i], k[: i + 1], v[: i + 1], group) for i in places])
        hidden = model.finish(layer, hidden, attended)
        all_keys.append(k.transpose(0, 1))
        all_values.append(v.transpose(0, 1))
    return torch.stack(all_keys), torch.stack(all_values), hidden


def attend_row(q: Any, keys: Any, values: Any, group: int) -> Any:
    """One row's attention: q `[heads, d]` to all of keys `[n, kv_heads, d]` → `[heads * d]`."""
    out = []
    for head in range(len(q)):
        k, v = keys[:, head // group], values[:, head // group]
        weights = ((k @ q[head]) * q.shape[-1] ** -0.5).softmax(dim=0)
        out.append(weights @ v)
    return torch.cat(out)
