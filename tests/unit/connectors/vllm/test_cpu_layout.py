"""The learned map of vLLM's CPU attention against its own writes, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvist.connectors.pages import check_bijective, page_map
from kvist.connectors.vllm.cpu_layout import PageShape, _Probe, learn
from kvist.core.errors import LayoutError
from kvist.core.layout import BlockLayout, HeadSlice
from kvist.native import Direction, move_pages

pytestmark = [pytest.mark.engines]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HEADS, TOKENS, DIM = 3, 32, 64


def _isa(dtype: torch.dtype, tokens: int, dim: int) -> str:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(_get_attn_isa(dtype, tokens, dim, "auto"))


@pytest.fixture(scope="module", autouse=True)
def _custom_operations() -> None:
    """vLLM's CPU extension, which an engine would have loaded."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("tokens", [32, 128])
def test_gather_through_the_learned_map_gives_what_was_written(name: str, tokens: int) -> None:
    dtype = DTYPES[name]
    shape = PageShape(HEADS, tokens, DIM, dtype)
    isa = _isa(dtype, tokens, DIM)
    region = learn(shape, isa)
    check_bijective(region)
    probe = _Probe(shape, isa)
    kv = torch.randn(2, HEADS, tokens, DIM, generator=torch.Generator().manual_seed(3)).to(dtype)
    probe.write(kv[0].transpose(0, 1), kv[1].transpose(0, 1))
    layout = BlockLayout(1, HEADS, DIM, tokens, name)
    heads = HeadSlice(0, HEADS)
    moved = page_map(region, [probe.cache.data_ptr()], layout, heads, tokens)
    block = np.zeros(layout.block_bytes, np.uint8)
    slots, pages = np.array([block.ctypes.data], np.uint64), np.array([[1]], np.int64)
    move_pages(Direction.GATHER, slots, pages, moved)
    assert block.tobytes() == kv.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", DTYPES)
def test_scatter_through_the_learned_map_gives_the_bytes_that_vllm_writes(name: str) -> None:
    dtype = DTYPES[name]
    shape = PageShape(HEADS, TOKENS, DIM, dtype)
    isa = _isa(dtype, TOKENS, DIM)
    probe = _Probe(shape, isa)
    kv = torch.randn(2, HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(4)).to(dtype)
    probe.write(kv[0].transpose(0, 1), kv[1].transpose(0, 1))
    want = probe.cache.clone()
    layout = BlockLayout(1, HEADS, DIM, TOKENS, name)
    probe.cache.zero_()
    moved = page_map(
        learn(shape, isa), [probe.cache.data_ptr()], layout, HeadSlice(0, HEADS), TOKENS
    )
    block = np.frombuffer(kv.contiguous().view(torch.uint8).numpy().tobytes(), np.uint8).copy()
    slots, pages = np.array([block.ctypes.data], np.uint64), np.array([[1]], np.int64)
    move_pages(Direction.SCATTER, slots, pages, moved)
    assert torch.equal(probe.cache.view(torch.uint8), want.view(torch.uint8))


def test_dtype_whose_digits_are_not_known_is_refused() -> None:
    with pytest.raises(LayoutError, match="not supported"):
        learn(PageShape(1, 32, 64, torch.float64), "vec")
