"""The benchmark of the router's index: Kvist's driver answers, and a page tells both sides."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from kvist.bench.environments import PEERS_VARIABLE
from kvist.bench.index.__main__ import main
from kvist.bench.index.report import MARK, rows, with_section
from kvist.bench.index.run import (
    ALL_CORES,
    DYNAMO,
    ENGINES,
    KVIST,
    ONE_CORE,
    SEVERAL,
    Figure,
    Outcome,
    Settings,
)
from kvist.bench.samples import Machine

MACHINE = Machine("cpu", 2, 1 << 30, "6", "3.11", {}, "abc", 0.0)
SMALL = ["--workers", "3", "--entries", "600", "--prompt-blocks", "100", "--shared-blocks", "20"]
NAMES = (
    "entry_s",
    "entry_cpu_s",
    "entry_bytes",
    "match_one_s",
    "match_none_s",
    "match_all_s",
    "hash_s",
)


def _outcome(ours: float, theirs: float) -> Outcome:
    def figures(value: float) -> dict[str, Figure]:
        return {name: Figure.of([value] * 200) for name in NAMES}

    sides = {name: figures(ours) for name in (KVIST, SEVERAL, ENGINES)}
    sides[DYNAMO] = figures(theirs)
    return Outcome(MACHINE, Settings(), {ONE_CORE: sides, ALL_CORES: sides}, {})


def test_every_figure_of_kvist_is_measured_without_its_peer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PEERS_VARIABLE, str(tmp_path))
    file, page = tmp_path / "kept.json", tmp_path / "page.md"
    page.write_text(f"# Text\n\n{MARK}\n\nold figures\n")
    sizes = [*SMALL, "--rounds", "1", "--samples", "3"]
    assert main([*sizes, "--json", str(file), "--page", str(page)]) == 0
    assert "dynamo: not measured: no environment" in capsys.readouterr().out
    kept = msgspec.json.decode(file.read_bytes(), type=Outcome)
    for way in (ONE_CORE, ALL_CORES):
        assert set(kept.figures[way]) == {KVIST, SEVERAL, ENGINES}
        for contender, name in ((KVIST, n) for n in (*NAMES, "match_many_s")):
            assert kept.figures[way][contender][name].median > 0.0, (contender, name)
    assert page.read_text().startswith(f"# Text\n\n{MARK}\n\nMedian")
    assert "old figures" not in page.read_text()


def test_ratio_above_one_means_that_kvist_is_ahead() -> None:
    for row in rows(_outcome(1e-6, 2.5e-6)):
        assert set(row[-1].split(" / ")) == {"2.50"}, row
    for row in rows(_outcome(2e-6, 1e-6)):
        assert set(row[-1].split(" / ")) == {"0.50"}, row


def test_peer_that_was_not_measured_has_no_ratio() -> None:
    outcome = _outcome(1e-6, 1e-6)
    for sides in outcome.figures.values():
        sides.pop(DYNAMO, None)  # both ways have the same sides
    assert {row[2:3] + row[4:] for row in rows(outcome)} == {("not measured", "–")}


def test_few_samples_have_no_99th_percentile() -> None:
    assert Figure.of([3.0, 1.0, 2.0]) == Figure(3, 2.0, None)
    assert Figure.of([float(n) for n in range(200)]) == Figure(200, 99.5, 198.0)


def test_page_without_a_place_for_figures_is_refused() -> None:
    with pytest.raises(ValueError, match="does not say where"):
        with_section("# Text\n", _outcome(1.0, 1.0))


def test_driver_that_fails_is_named_with_its_last_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "dynamo" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho it broke >&2\nexit 3\n")
    python.chmod(0o700)
    monkeypatch.setenv(PEERS_VARIABLE, str(tmp_path))
    file = tmp_path / "kept.json"
    assert main([*SMALL, "--rounds", "1", "--samples", "1", "--json", str(file)]) == 0
    assert "dynamo: not measured: it broke" in capsys.readouterr().out
    assert json.loads(file.read_text())["missing"] == {"dynamo": "it broke"}
