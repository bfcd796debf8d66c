"""The benchmark of the node measures what it says, on few small blocks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvist.bench.node import __main__ as command
from kvist.bench.node.run import Outcomes, Round, Settings, measure

SMALL = Settings(rounds=1, blocks=16, block_bytes=1 << 16, lease_blocks=5, turns=20)


def test_run_has_every_value() -> None:
    lines: list[str] = []
    found = measure(SMALL, lines.append)
    assert len(found.rounds) == len(lines) == 1
    assert min(found.put_ratio, found.get_ratio, found.operations_rps) > 0
    assert found.operations == 6 * SMALL.turns


def test_ratios_are_of_values_of_one_round() -> None:
    rounds = [Round(10.0, 10.0, 9.0, 5.0), Round(1.0, 1.0, 0.8, 0.9), Round(2.0, 2.0, 2.0, 2.0)]
    found = Outcomes(SMALL, rounds, operations=100, operations_s=0.5, node_cpu_s=0.01)
    assert (found.put_ratio, found.get_ratio) == (0.9, 0.9)
    assert (found.operations_rps, found.operations_rps_of_core) == (200.0, 10_000.0)


def test_json_has_machine_and_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = Outcomes(SMALL, [Round(4e9, 4e9, 3e9, 2e9)], 100, 0.5, 0.01)
    monkeypatch.setattr(command, "measure", lambda settings, tell: done)
    assert command.main(["--json", str(tmp_path / "r.json")]) == 0
    kept = json.loads((tmp_path / "r.json").read_text())
    assert (kept["part"], kept["put_ratio"], kept["operations_rps_of_core"]) == ("node", 0.75, 1e4)
    assert "put: node 3.00 GB/s, memcpy 4.00 GB/s, ratio 0.75" in capsys.readouterr().out
