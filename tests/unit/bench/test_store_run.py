"""A run of the store benchmark: its samples, its file and its tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvist.bench.__main__ import main
from kvist.bench.machine import describe_machine
from kvist.bench.pages import page
from kvist.bench.samples import write
from kvist.bench.store import samples
from kvist.bench.store.contender import ContenderError
from kvist.bench.store.files import PlainFiles
from kvist.bench.store.report import bound_rows, limit_rows, peer_rows, tables
from kvist.bench.store.run import StoreRun, in_turn
from kvist.bench.store.samples import (
    FILES,
    KVIST,
    LIMIT,
    REDIS,
    Row,
    StoreResult,
    StoreSettings,
)
from kvist.core.errors import ConfigError

SMALL = StoreSettings(
    rounds=2, medium="x", dram_blocks=2, disk_blocks=2, match_keys=64, indexed_blocks=128
)


class Quiet:
    def __init__(self) -> None:
        self.steps = 0

    def say(self, text: str) -> None:
        pass

    def step(self, text: str) -> None:
        self.steps += 1


def empty(settings: StoreSettings = SMALL) -> StoreResult:
    return StoreResult("2026-01-01 00:00 UTC", describe_machine(), settings)


@pytest.fixture
def judged() -> StoreResult:
    result = empty()
    for turn in range(5):
        for row in Row:
            result.add(row, KVIST, turn, 8e9)
            result.add(row, LIMIT, turn, 1e10)
        result.add(Row.DRAM_WRITE, FILES, turn, 4e9)
        result.add(Row.DRAM_READ, FILES, turn, 1.6e10)
    result.absent[f"{REDIS} dram"] = "redis-server is not installed"
    return result


def test_a_run_measures_every_row_in_every_round(tmp_path: Path) -> None:
    result, screen = empty(), Quiet()
    run = StoreRun(result, tmp_path, screen, peers=False, seed=1)
    run.run()
    for row in Row:
        assert set(result.values(row, KVIST)) == {0, 1}, row
    for row in (Row.DRAM_WRITE, Row.DRAM_READ, Row.DISK_WRITE, Row.DISK_READ):
        assert set(result.values(row, LIMIT)) == set(result.values(row, FILES)) == {0, 1}
    assert screen.steps == run.steps()
    assert list(tmp_path.iterdir()) == []
    assert result.absent["mooncake disk"] == "not asked for (--peers)"


def test_a_peer_that_fails_is_left_out_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: PlainFiles, round_number: int) -> float:
        raise ContenderError(f"round {round_number}")

    monkeypatch.setattr(PlainFiles, "read", fail)
    result = empty()
    StoreRun(result, tmp_path, Quiet(), peers=False, seed=1).run()
    assert result.absent["files dram"] == result.absent["files disk"] == "round 0"
    assert set(result.values(Row.DISK_READ, KVIST)) == {0, 1}


def test_another_contender_is_first_every_turn() -> None:
    turns = ["".join(in_turn("abcdef", i)) for i in range(6)]
    assert all(sorted(turn) == list("abcdef") for turn in turns)
    before_a = {turn[turn.index("a") - 1] for turn in turns if turn[0] != "a"}
    assert len(before_a) > 2
    assert turns == ["".join(in_turn("abcdef", i)) for i in range(6)]


def test_a_target_is_met_or_not_by_the_ratio_of_medians(judged: StoreResult) -> None:
    words = {row[0]: row[-1] for row in limit_rows(judged)}
    assert words["DRAM write: gather from pages"] == "NOT met"
    assert words["... write with the checksum"] == "met"
    assert words["... write, pages with keys transposed"] == "–"
    assert {row[-1] for row in bound_rows(judged)} == {"NOT met"}


def test_too_few_rounds_are_no_verdict() -> None:
    result = empty()
    result.add(Row.MATCH, KVIST, 0, 0.0001)
    words = {row[0]: row[-1] for row in bound_rows(result)}
    assert words["match of 64 keys"] == "too few rounds"
    assert words["index memory a block"] == "not measured"


def test_a_row_where_kvist_is_behind_says_so(judged: StoreResult) -> None:
    words = {(row[0], row[1]): row[-1] for row in peer_rows(judged)}
    assert words["write to DRAM", "plain files"] == "ahead"
    assert words["read from DRAM", "plain files"] == "BEHIND"
    assert words["read from DRAM", "Redis"] == "not measured: redis-server is not installed"
    assert words["read from disk", "Redis"] == "not measured: keeps no blocks there"


def test_a_store_result_is_read_back_as_it_was_written(judged: StoreResult, tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    write(judged, path)
    assert samples.is_store(path)
    assert samples.read(path) == judged
    judged.schema = 9
    write(judged, path)
    with pytest.raises(ConfigError, match="schema 9"):
        samples.read(path)


def test_a_file_that_is_no_store_result_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    assert not samples.is_store(path)
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"bad\.json"):
        samples.read(path)


def test_a_kept_store_result_is_shown_and_put_on_the_page(
    judged: StoreResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, shown = tmp_path / "store.json", tmp_path / "page.md"
    write(judged, path)
    assert main(["--show", str(path), "--page", str(shown)]) == 0
    assert "DRAM write: gather from pages" in capsys.readouterr().out
    assert shown.read_text() == page(None, (judged, str(path)))
    assert shown.read_text().count("\n## ") == len(tables(judged)) == 3
