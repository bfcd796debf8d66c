"""Tiers that are too small, and a disk that is really full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_engine import FEW, LONG, MEDIUM, TREE, Reference, VllmEngine, kvist

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1200)]

PROMPTS = [*FEW, *TREE[:8]]


def _refused(engine: VllmEngine) -> float:
    return engine.metrics().get("kvist_no_space", 0.0)


def test_dram_smaller_than_one_prompt_and_a_tiny_disk_tier_only_cost_hits(
    start_engine: Any, reference: Reference, tmp_path: Path
) -> None:
    """Five blocks of DRAM, sixteen on disk; LONG alone has 28."""
    folder = tmp_path / "ssd"
    engine = start_engine(kv_transfer_config=kvist(folder, dram="8MiB", capacity="24MiB"))
    for _ in range(3):
        assert engine.generate(PROMPTS).tokens == reference.of(PROMPTS)
        engine.reset()
    for _ in range(2):  # its tail pushes its head off the disk: right, whether loaded or not
        assert engine.generate([LONG], salt="again").tokens == reference.of([LONG])
        engine.reset()
    refused = _refused(engine)
    for turn in range(20):  # the second time, what DRAM can hold at once is loaded
        before, refused_before = engine.loaded_tokens(), refused
        refused = _refused(engine)
        assert engine.generate(MEDIUM[:1], salt="again").tokens == reference.of(MEDIUM[:1])
        engine.reset()
        if engine.loaded_tokens() > before:
            break
        # Nothing but a save that found no room is an excuse: the disk may be slow today.
        assert turn == 0 or _refused(engine) > refused_before
    assert engine.loaded_tokens() > before
    held = sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file())
    assert held <= 24 << 20


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "kvist-test", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a small file system: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], timeout=30, check=True)


def test_disk_that_is_really_full_only_costs_hits(
    start_engine: Any, reference: Reference, tiny_disk: Path
) -> None:
    engine = start_engine(
        kv_transfer_config=kvist(tiny_disk / "ssd", dram="32MiB", capacity="1GiB")
    )
    for salt in ("", "", "more"):
        answer = engine.generate(PROMPTS, salt=salt)
        assert answer.tokens == reference.of(PROMPTS)
        assert set(answer.finish) == {"length"}
        engine.reset()
    before = engine.loaded_tokens()
    for _ in range(2):
        assert engine.generate([MEDIUM[0]], salt="last").tokens == reference.of([MEDIUM[0]])
        engine.reset()
    assert engine.loaded_tokens() > before
