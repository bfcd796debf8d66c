"""The benchmark between nodes measures what it says, on few small blocks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvist.bench import peers as command
from kvist.bench.between.run import Outcomes, Settings, measure

SMALL = Settings(rounds=1, blocks=12, block_bytes=1 << 16, streams=2, peers=False)


def test_run_brings_every_block_by_every_way() -> None:
    lines: list[str] = []
    found = measure(SMALL, lines.append)
    assert {way: len(values) for way, values in found.rounds.items()} == {"socket": 1, "kvist": 1}
    assert found.ratio("kvist") > 0
    assert found.missing == {}


def test_ratios_are_of_values_of_the_same_round() -> None:
    found = Outcomes(SMALL, {"socket": [10.0, 1.0, 2.0], "kvist": [9.0, 0.5, 2.0]})
    assert (found.ratio("kvist"), found.bytes_per_s("kvist")) == (0.9, 2.0)


def test_json_has_machine_and_ratios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = Outcomes(SMALL, {"socket": [4e9], "kvist": [3e9]}, {"redis": "not installed"})
    monkeypatch.setattr(command, "measure", lambda settings, tell: done)
    assert command.main(["--json", str(tmp_path / "r.json")]) == 0
    kept = json.loads((tmp_path / "r.json").read_text())
    assert (kept["part"], kept["ratio_to_socket"]["kvist"]) == ("peers", 0.75)
    printed = capsys.readouterr().out
    assert "kvist: 3.00 GB/s, 0.75 of a plain socket" in printed
    assert "redis: not measured: not installed" in printed
