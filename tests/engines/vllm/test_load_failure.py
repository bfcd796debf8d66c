"""A load that fails in the worker becomes a recompute: right tokens, no failed request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_engine import FEW, TREE, Reference, kvist

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_failed_loads_are_recomputed_and_others_still_load(
    start_engine: Any, reference: Reference, tmp_path: Path
) -> None:
    engine = start_engine(
        kv_transfer_config=kvist(
            tmp_path / "ssd", connector="FaultyConnector", module="faulty_connector"
        )
    )
    prompts = [*FEW, *TREE[:6]]
    assert engine.generate(prompts).tokens == reference.of(prompts)
    engine.reset()
    answer = engine.generate(prompts)
    assert answer.tokens == reference.of(prompts)
    assert set(answer.finish) == {"length"}
    found = engine.metrics()
    assert found["kvist_fallbacks.OSError"] > 0
    assert found["kvist_tokens_loaded.dram"] > 0
    engine.reset()  # succeeds only if no page was left behind
    assert engine.generate(prompts).tokens == reference.of(prompts)
