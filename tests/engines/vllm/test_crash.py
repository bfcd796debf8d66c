"""An engine killed in the middle of saving, and the next one on what it left.

Blocks of 64 tokens lie over pages of 32, and prompts are computed in chunks of 256 tokens.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from vllm_engine import (
    CHAT_TOKENS,
    EDGES,
    LONG,
    MEDIUM,
    TREE,
    Reference,
    VllmEngine,
    kvist,
    loaded_in,
)

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1200)]

CHUNKS = {"max_num_batched_tokens": 256, "enable_chunked_prefill": True}
BLOCK = 64
PAGES = 42  # four requests of MEDIUM fit at first and outgrow it while they generate
ON_DISK_BYTES = 60_000_000
WAIT_S = 120.0
PROMPTS = [LONG, *TREE[:6], *EDGES]


def _written_bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*.kvs"))


@pytest.fixture(scope="module")
def killed(
    start_engine: Any, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of an engine that got SIGKILL, all processes at once, while it was saving."""
    folder = tmp_path_factory.mktemp("killed") / "ssd"
    engine = start_engine(kv_transfer_config=kvist(folder, block_tokens=BLOCK), **CHUNKS)
    assert engine.generate(PROMPTS).tokens == reference.of(PROMPTS)
    deadline = time.monotonic() + WAIT_S
    while _written_bytes(folder) < ON_DISK_BYTES and time.monotonic() < deadline:
        time.sleep(0.2)
    before = _written_bytes(folder)
    engine.send("generate", prompts=MEDIUM, max_tokens=6)
    while _written_bytes(folder) == before and time.monotonic() < deadline:
        time.sleep(0.02)
    engine.kill()
    assert _written_bytes(folder) > before
    return folder


@pytest.fixture(scope="module")
def survivor(start_engine: Any, killed: Path) -> VllmEngine:
    """The next engine on that folder, with so few pages that requests are preempted."""
    return start_engine(
        kv_transfer_config=kvist(killed, block_tokens=BLOCK, restore=1.0),
        num_gpu_blocks_override=PAGES,
        **CHUNKS,
    )


def test_engine_after_kill_9_loads_what_was_whole_and_answers_right(
    survivor: VllmEngine, reference: Reference
) -> None:
    answer = survivor.generate(PROMPTS)
    assert answer.tokens == reference.of(PROMPTS)
    assert survivor.loaded_tokens() > 0  # from DRAM, where it was restored, or the disk
    survivor.reset()
    assert survivor.generate(MEDIUM).tokens == reference.of(MEDIUM)


def test_blocks_of_two_pages_are_loaded_whole_in_chunked_prefill(
    survivor: VllmEngine, reference: Reference
) -> None:
    assert survivor.generate([LONG], salt="chunks").tokens == reference.of([LONG])
    survivor.reset()
    before = survivor.loaded_tokens()
    assert survivor.generate([LONG], salt="chunks").tokens == reference.of([LONG])
    assert survivor.loaded_tokens() - before == len(LONG) // BLOCK * BLOCK


def test_preempted_requests_are_right_cold_and_loaded_when_warm(
    survivor: VllmEngine, reference: Reference
) -> None:
    """A preempted request finds most of its pages in vLLM's own cache; what is lost is loaded."""
    loaded = []
    for _ in range(2):
        before = survivor.metrics()
        answer = survivor.generate(MEDIUM, max_tokens=CHAT_TOKENS, salt="preempt")
        assert answer.tokens == reference.of(MEDIUM, CHAT_TOKENS)
        assert set(answer.finish) == {"length"}
        now = survivor.metrics()
        assert now["vllm:num_preemptions"] > before["vllm:num_preemptions"]
        loaded.append(loaded_in(now) - loaded_in(before))
        survivor.reset()  # succeeds only if preemption left no page behind
    assert loaded[1] >= len(MEDIUM) * (len(MEDIUM[0]) // BLOCK * BLOCK)
