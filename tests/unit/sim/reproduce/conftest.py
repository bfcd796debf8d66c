"""Two small traces in the layout of the public ones."""

import json
import random
from pathlib import Path

import pytest

BLOCK_TOKENS = 512


def write_trace(path: Path, *, seed: str, sessions: int, turns: int, bin_ms: int) -> None:
    """Sessions that share one system prompt and grow by a few blocks a turn."""
    rng = random.Random(seed)
    lines, next_id = [], 10
    for _ in range(sessions):
        chain, at_ms = [0, 1], rng.randrange(60_000)
        for _ in range(turns):
            grown = rng.randrange(2, 12)
            chain = chain + list(range(next_id, next_id + grown))
            next_id += grown
            lines.append(
                {
                    "timestamp": at_ms // bin_ms * bin_ms,
                    "input_length": BLOCK_TOKENS * len(chain) - rng.randrange(BLOCK_TOKENS),
                    "output_length": rng.randrange(2, 80),
                    "hash_ids": chain,
                }
            )
            at_ms += rng.randrange(5_000, 40_000)
    lines.sort(key=lambda line: line["timestamp"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """A folder that `--traces` takes."""
    folder = tmp_path / "traces"
    conversation = folder / "mooncake" / "conversation_trace.jsonl"
    write_trace(conversation, seed="talk", sessions=12, turns=4, bin_ms=3000)
    synthetic = folder / "mooncake" / "synthetic_trace.jsonl"
    write_trace(synthetic, seed="made", sessions=8, turns=3, bin_ms=1)
    return folder


@pytest.fixture
def public_traces() -> Path:
    """The public traces; skips where they are not there."""
    folder = Path(__file__).resolve().parents[5] / "shared" / "traces"
    if not (folder / "mooncake" / "conversation_trace.jsonl").is_file():
        pytest.skip("../shared/traces/mooncake is not there")
    return folder
