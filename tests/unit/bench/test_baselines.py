"""The copy that lets vLLM's offloading run on a CPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default")]  # vLLM's own warnings


def test_pages_go_to_the_host_and_come_back_to_other_pages_unchanged() -> None:
    pytest.importorskip("vllm")
    from kvist.bench.baselines.memcpy_spec import copy_rows

    first = torch.arange(40, dtype=torch.int8).view(5, 8)
    second = torch.arange(20, dtype=torch.int8).view(5, 4)
    region = torch.zeros(3, 12, dtype=torch.int8)
    views = [(first, region[:, :8]), (second, region[:, 8:])]
    assert copy_rows(views, [4, 1], [0, 2], store=True) == 24
    want = [first[4].clone(), first[1].clone(), second[4].clone(), second[1].clone()]
    assert region[1].eq(0).all()
    assert copy_rows(views, [0, 3], [0, 2], store=False) == 24
    got = [first[0], first[3], second[0], second[3]]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
