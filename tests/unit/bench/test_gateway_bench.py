"""The benchmark of the gateway at its smallest: every part is measured."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvist.bench.gateway.__main__ import Kept, main


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_every_part_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kept.json"
    sizes = ["--rounds", "1", "--requests", "40", "--streams", "20"]
    assert main([*sizes, "--json", str(file)]) == 0
    found = msgspec.json.decode(file.read_bytes(), type=Kept).outcomes
    assert found.added[0].gateway_p50_s > 0
    assert found.idle is not None
    assert (found.idle.streams, found.idle.after_bytes > 0) == (20, True)
    assert found.slow is not None
    out = capsys.readouterr().out
    assert "200 requests a second" in out
    assert "20 idle streams" in out
