"""Rows at scattered positions see what stands before them, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_decoder import attend_row

from kvist.accel.blend import attention
from kvist.accel.blend.attention import attend

TOKENS = 37
SCATTERED = [0, 1, 5, 6, 7, 19, 20, 30, 36]


def _tensors(heads: int, kv_heads: int) -> tuple[Any, Any, Any]:
    make = torch.Generator().manual_seed(1)
    q = torch.randn(TOKENS, heads, 8, generator=make)
    keys, values = torch.randn(2, kv_heads, TOKENS, 8, generator=make)
    return q, keys, values


@pytest.mark.parametrize("rows", [SCATTERED, [36], list(range(TOKENS)), list(range(11, 37)), []])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("elements", [1 << 20, 3 * TOKENS, 1])
def test_scattered_rows_equal_a_dense_reference(
    monkeypatch: pytest.MonkeyPatch, rows: list[int], heads: int, kv_heads: int, elements: int
) -> None:
    monkeypatch.setattr(attention, "_CHUNK_ELEMENTS", elements)
    q, keys, values = _tensors(heads, kv_heads)
    found = attend(q[rows], keys, values, torch.tensor(rows, dtype=torch.int64), 8**-0.5)
    k, v = keys.transpose(0, 1), values.transpose(0, 1)
    want = [attend_row(q[i], k[: i + 1], v[: i + 1], heads // kv_heads) for i in rows]
    assert found.shape == (len(rows), heads * 8)
    if rows:
        torch.testing.assert_close(found, torch.stack(want), rtol=1e-5, atol=1e-5)


def test_no_row_sees_what_comes_after_it() -> None:
    q, keys, values = _tensors(4, 2)
    rows = torch.tensor(SCATTERED)
    before = attend(q[rows], keys, values, rows, 1.0)
    keys[:, 8:19], values[:, 8:19] = 1e3, 1e3  # between two of the rows
    after = attend(q[rows], keys, values, rows, 1.0)
    assert torch.equal(before[:5], after[:5])
    assert not torch.isclose(before[5:], after[5:]).all(dim=-1).any()
