"""Blocks know no ranks: two ranks read what one wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_engine import EngineError, kvist, random_tokens

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1200)]

BLOCK = 32
PROMPTS = [random_tokens(200 + i, n, 1000) for i, n in enumerate((100, 300, 64))]
OTHERS = [random_tokens(300 + i, n, 1000) for i, n in enumerate((150, 96))]


def test_two_ranks_read_what_one_wrote_and_each_other(
    start_engine: Any, small_llama: Path, tmp_path: Path
) -> None:
    transfer = kvist(tmp_path / "ssd", dram="16MiB", capacity="64MiB")
    one = start_engine(model=small_llama, kv_transfer_config=transfer)
    cold = one.generate([*PROMPTS, *OTHERS], max_tokens=12, salt="reference")
    right = one.generate(PROMPTS, max_tokens=12)
    assert right.tokens == cold.tokens[: len(PROMPTS)]
    assert one.loaded_tokens() == 0  # nothing was there: this is the reference
    one.reset()
    one.close()
    try:
        two = start_engine(
            model=small_llama, kv_transfer_config=transfer, cores="0|1", tensor_parallel_size=2
        )
    except EngineError as e:
        if "kvist" in str(e).lower().split("traceback")[-1]:
            raise
        pytest.skip(f"vLLM does not start two ranks here: {str(e).strip().splitlines()[-1]}")
    answer = two.generate(PROMPTS, max_tokens=12)
    assert answer.tokens == right.tokens
    assert two.loaded_tokens("ssd") == sum(len(p) // BLOCK * BLOCK for p in PROMPTS)
    # and what two ranks write, two ranks read: a block is committed when both have filled it
    assert two.generate(OTHERS, max_tokens=12).tokens == cold.tokens[len(PROMPTS) :]
    two.reset()
    before = two.loaded_tokens("dram")
    assert two.generate(OTHERS, max_tokens=12).tokens == cold.tokens[len(PROMPTS) :]
    assert two.loaded_tokens("dram") - before == sum(len(p) // BLOCK * BLOCK for p in OTHERS)
