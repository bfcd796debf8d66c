"""What survives an orderly end, and what becomes of a store that is damaged meanwhile."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from vllm_engine import FEW, MEDIUM, TREE, Reference, VllmEngine, kvist

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1200)]

PROMPTS = [*FEW, *TREE[:8]]
BLOCK = 32
SMALL_DRAM = "64MiB"  # 45 blocks: the prompts' 67 do not fit, so loads come from disk again
HEADER_BYTES = 4096


@pytest.fixture(scope="module")
def written(
    start_engine: Any, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder that an engine filled before it ended in order."""
    folder = tmp_path_factory.mktemp("written") / "ssd"
    engine = start_engine(kv_transfer_config=kvist(folder))
    assert engine.generate(PROMPTS).tokens == reference.of(PROMPTS)
    engine.reset()
    engine.close()
    return folder


@pytest.fixture(scope="module")
def copied(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of that folder, made before anyone opened it again."""
    return Path(shutil.copytree(written, tmp_path_factory.mktemp("copied") / "ssd"))


@pytest.fixture(scope="module")
def restarted(start_engine: Any, written: Path, copied: Path) -> VllmEngine:
    """Another engine on the same folder, with a DRAM tier that the prompts do not fit in."""
    del copied
    return start_engine(kv_transfer_config=kvist(written, dram=SMALL_DRAM))


def test_restarted_engine_loads_from_disk_what_the_last_one_saved(
    restarted: VllmEngine, reference: Reference
) -> None:
    for prompt in FEW:  # one by one, so that DRAM holds what each needs
        answer = restarted.generate([prompt])
        assert answer.tokens == reference.of([prompt])
        assert answer.cached == [len(prompt) // BLOCK * BLOCK]
    assert restarted.loaded_tokens("ssd") == sum(len(p) // BLOCK * BLOCK for p in FEW)


def test_requests_aborted_while_they_load_harm_nobody(
    restarted: VllmEngine, reference: Reference
) -> None:
    """Aborts strike at many moments: before, during and after the load, with others under way."""
    before = restarted.loaded_tokens()
    for turn in range(12):
        restarted.reset()
        victims = restarted.ask("start", prompts=PROMPTS, max_tokens=6, name=f"v{turn}")["ids"]
        kept = restarted.ask("start", prompts=FEW[:1], max_tokens=6, name=f"k{turn}")["ids"]
        after_s = turn * 0.01
        assert restarted.ask("abort", ids=victims, after_s=after_s)["unfinished"] == 1
        finished = restarted.ask("drain")["tokens"]
        assert [finished[name] for name in kept] == reference.of(FEW[:1])
    restarted.reset()  # succeeds only if no page is held for a request that is gone
    assert restarted.loaded_tokens() > before
    at_last = restarted.loaded_tokens()
    assert restarted.generate(PROMPTS).tokens == reference.of(PROMPTS)
    assert restarted.loaded_tokens() > at_last


@pytest.fixture(scope="module")
def flipped(start_engine: Any, copied: Path) -> VllmEngine:
    """An engine on a folder in which one bit of every segment was flipped."""
    segments = sorted(copied.rglob("*.kvs"))
    assert segments
    for i, segment in enumerate(segments):
        data = bytearray(segment.read_bytes())
        end = len(data.rstrip(b"\0"))
        data[HEADER_BYTES + (end - HEADER_BYTES) * (i + 1) // (len(segments) + 1)] ^= 0x10
        segment.write_bytes(data)
    return start_engine(kv_transfer_config=kvist(copied, dram=SMALL_DRAM))


def test_flipped_bit_in_every_segment_is_a_miss_and_never_a_wrong_token(
    flipped: VllmEngine, reference: Reference
) -> None:
    for prompt in PROMPTS:
        answer = flipped.generate([prompt])
        assert answer.tokens == reference.of([prompt])
    distinct = {tuple(p[:end]) for p in PROMPTS for end in range(BLOCK, len(p) + 1, BLOCK)}
    # some were loaded, and the damaged ones were not
    assert 0 < flipped.loaded_tokens("ssd") < len(distinct) * BLOCK


def test_folder_deleted_under_the_engine_is_survived(
    flipped: VllmEngine, reference: Reference, copied: Path
) -> None:
    shutil.rmtree(copied)
    for salt in ("", "", "new"):
        flipped.reset()
        prompts = [*PROMPTS, *MEDIUM[4:6]]
        answer = flipped.generate(prompts, salt=salt)
        assert answer.tokens == reference.of(prompts)
        assert set(answer.finish) == {"length"}
    flipped.reset()
    before = flipped.loaded_tokens("dram")
    assert flipped.generate(MEDIUM[4:6], salt="new").tokens == reference.of(MEDIUM[4:6])
    assert flipped.loaded_tokens("dram") > before
