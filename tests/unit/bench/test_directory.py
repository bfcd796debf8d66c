"""The directory's benchmark runs and prints every figure."""

from __future__ import annotations

import pytest

from kvist.bench.directory import main


def test_every_figure_is_printed_with_its_unit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nodes", "3", "--blocks", "100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert all(line.split()[-1] for line in lines)
    assert sum(line.endswith(" us") for line in lines) == 6
