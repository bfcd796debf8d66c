"""Three small traces in the layout of the public ones; lets tests import `small_cluster`."""

from __future__ import annotations

import gzip
import json
import random
import sys
from pathlib import Path

import pytest

from kvist.sim.routing.setting import ALL_TRAFFIC, Traffic

if (folder := str(Path(__file__).resolve().parents[1] / "des")) not in sys.path:
    sys.path.insert(0, folder)


def _write(path: Path, traffic: Traffic, *, sessions: int, turns: int, block_tokens: int) -> None:
    """Sessions that share a system prompt and grow by a few blocks a turn, an hour in all."""
    rng = random.Random(traffic.name)
    lines, next_id = [], 10
    for _ in range(sessions):
        chain, at_s = [0, 1], rng.uniform(0, 60 * traffic.rate)
        for _ in range(turns):
            grown = rng.randrange(2, 12)
            chain = chain + list(range(next_id, next_id + grown))
            next_id += grown
            lines.append(
                {
                    "timestamp": round(at_s * 1000),
                    "input_length": block_tokens * len(chain) - rng.randrange(block_tokens),
                    "output_length": rng.randrange(2, 80),
                    "hash_ids": chain,
                }
            )
            at_s += rng.uniform(5, 40) * traffic.rate
    lines.sort(key=lambda line: line["timestamp"])
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """A folder that `--traces` takes."""
    folder = tmp_path / "traces"
    for traffic in ALL_TRAFFIC:
        size = 64 if traffic.file.endswith("b64.jsonl.gz") else 512
        _write(folder / traffic.file, traffic, sessions=10, turns=4, block_tokens=size)
    return folder
