"""Blocks on disk that are smaller, or sealed, give the answers that raw ones give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_engine import FEW, Reference, kvist

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1200)]

BLOCK = 32


def _config(folder: Path, codec: str, keys: Path, dram: str = "64MiB") -> dict[str, Any]:
    config = kvist(folder, dram=dram)
    config["kv_connector_extra_config"]["store"]["ssd"] |= {"codec": codec, "keys": str(keys)}
    return config


def test_an_engine_answers_alike_from_sealed_lossless_blocks_of_another(
    start_engine: Any, reference: Reference, tmp_path: Path
) -> None:
    pytest.importorskip("cryptography")
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text("first " + "5a" * 32)
    folder = tmp_path / "ssd"
    # Room for all: on a busy machine blocks come faster than they are encoded.
    engine = start_engine(kv_transfer_config=_config(folder, "lossless+aead", keys, "128MiB"))
    assert engine.generate(FEW).tokens == reference.of(FEW)
    engine.reset()
    engine.close()
    again = start_engine(kv_transfer_config=_config(folder, "lossless", keys))
    for prompt in FEW:
        answer = again.generate([prompt])
        assert answer.tokens == reference.of([prompt])
        assert answer.cached == [len(prompt) // BLOCK * BLOCK]
    assert again.loaded_tokens("ssd") == sum(len(p) // BLOCK * BLOCK for p in FEW)
