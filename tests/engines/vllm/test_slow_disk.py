"""A disk slower than computing costs next to nothing, and the answers stay what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_engine import FEW, LONG, MEDIUM, Reference, kvist

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1200)]

_BYTES_PER_S = 3_000_000  # a block of 32 tokens is 1.4 MB in float32


def _slow_engine(start_engine: Any, folder: Path) -> Any:
    config = kvist(
        folder,
        connector="ThrottledConnector",
        module="kvist.bench.throttled",
        dram="64MiB",
        load_policy="planned",
    )
    config["kv_connector_extra_config"]["bench.read_bytes_per_s"] = _BYTES_PER_S
    return start_engine(kv_transfer_config=config)


def test_loads_from_a_slow_disk_are_cut_off_and_then_not_tried_with_unchanged_answers(
    start_engine: Any, reference: Reference, tmp_path: Path
) -> None:
    engine = _slow_engine(start_engine, tmp_path / "ssd")
    prompts = [*MEDIUM, LONG]
    assert [engine.generate([p]).tokens[0] for p in prompts] == reference.of(prompts)
    for _ in range(2):
        for prompt in FEW:
            engine.reset()
            assert engine.generate([prompt]).tokens == reference.of([prompt])
    found = engine.metrics()
    decisions = {k: v for k, v in found.items() if k.startswith("kvist_load_decisions.")}
    assert found["kvist_loads_cut_off"] >= 1, decisions
    assert decisions.get("kvist_load_decisions.recompute_faster", 0) >= 1, decisions
    assert found["kvist_prefill_error_ratio"] < 1.0
    engine.close()

    again = _slow_engine(start_engine, tmp_path / "ssd")  # which knows from before
    for prompt in FEW:
        assert again.generate([prompt]).tokens == reference.of([prompt])
    assert "kvist_load_decisions.unmeasured" not in again.metrics()
