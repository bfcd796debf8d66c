"""The benchmark of remotes measures what it says, on few small blocks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvist.bench.remotes import __main__ as command
from kvist.bench.remotes.run import MEDIA, Outcomes, Settings, Values, measure
from kvist.bench.store.contender import ContenderError

SMALL = Settings(rounds=1, blocks=6, block_bytes=1 << 16, connections=2)


def test_run_measures_every_medium_that_is_here_and_says_what_is_not() -> None:
    lines: list[str] = []
    found = measure(SMALL, lines.append)
    assert found.media.keys() | found.missing.keys() == set(MEDIA)
    assert "files" in found.media  # which needs nothing
    assert len(lines) == len(found.media)
    for values in found.media.values():
        for way in (values.put, values.get):
            assert {who: len(kept) for who, kept in way.items()} == {"kvist": 1, "plain": 1}
        assert min(values.ratio("put"), values.ratio("get")) > 0
    for why in found.missing.values():
        assert "installed" in why or "imported" in why


def test_ratios_are_of_values_of_the_same_round() -> None:
    values = Values(put={"plain": [10.0, 1.0, 2.0], "kvist": [9.0, 0.5, 2.0]})
    assert (values.ratio("put"), values.median("put", "kvist")) == (0.9, 2.0)


DONE = Outcomes(
    SMALL,
    {
        "files": Values(
            put={"plain": [4e9], "kvist": [3e9]},
            get={"plain": [2e9], "kvist": [4e9]},
        )
    },
    {"redis": "redis-server is not installed"},
)


def test_json_can_be_made_a_page_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "measure", lambda settings, tell: DONE)
    kept, doc = tmp_path / "r.json", tmp_path / "page.md"
    doc.write_text(f"# Page\n\n{command.MARK}\n\nold figures\n")
    assert command.main(["--json", str(kept)]) == 0
    found = json.loads(kept.read_text())
    assert (found["part"], found["put_ratio"], found["get_ratio"]) == (
        "remotes",
        {"files": 0.75},
        {"files": 2.0},
    )
    for _ in range(2):
        assert command.main(["--from", str(kept), "--page", str(doc)]) == 0
    text = doc.read_text()
    assert text.count("| files |") == 1
    assert "old figures" not in text
    assert "4.00 GB/s | 3.00 GB/s | 0.75 | 2.00 GB/s | 4.00 GB/s | 2.00 |" in text
    assert "redis was not measured: redis-server is not installed." in text
    assert "files put: kvist 3.00 GB/s, plain 4.00 GB/s, ratio 0.75" in capsys.readouterr().out


def test_service_that_fails_ends_the_run_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(settings: Settings, tell: object) -> Outcomes:
        raise ContenderError("a block did not come back")

    monkeypatch.setattr(command, "measure", fails)
    assert command.main([]) == 2
    assert "a block did not come back" in capsys.readouterr().err
