"""`kvist quality` without an engine: a kept result is shown, and a run says what is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvist.bench.quality.samples import CodecRow, Result, Settings
from kvist.bench.samples import Machine, write
from kvist.cli.main import main


@pytest.fixture
def without_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    settings = Settings(
        model="m",
        texts=["t"],
        contexts=1,
        context_tokens=64,
        follow_tokens=2,
        greedy_tokens=4,
        block_tokens=32,
        questions=1,
        answer_tokens=8,
    )
    machine = Machine("a cpu", 2, 1 << 30, "6.1", "3.11", {}, "abc", 0.0)
    row = CodecRow(codec="int8", raw_bytes=100, stored_bytes=52, kl_nats_mean=1e-4)
    path = tmp_path / "kept.json"
    write(Result(started="now", machine=machine, settings=settings, codecs=[row]), path)
    return path


def test_run_without_an_engine_says_what_to_install(
    without_engine: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quality"]) == 2
    said = capsys.readouterr().err
    assert said == "kvist: error: this needs torch; pip install 'kvist[demo]'\n"


def test_kept_result_is_shown_and_written_without_an_engine(
    without_engine: None, kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    assert main(["quality", "--show", str(kept), "--page", str(page)]) == 0
    assert "52.0%" in capsys.readouterr().out
    assert f"`{kept}`" in page.read_text()
    assert "| int8 | 52.0% | 0.0001 |" in page.read_text()


def test_file_that_is_no_result_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    path.write_text("[]")
    assert main(["quality", "--show", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
