"""`bench/quality/samples.py` and `report.py`: lines of samples, rows made from them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvist.bench.quality import samples
from kvist.bench.quality.report import (
    codec_grid,
    codec_row,
    copy_mb_s,
    notes,
    smaller_at_no_more_kl,
)
from kvist.bench.quality.samples import (
    AnswerSample,
    CodecRow,
    CodecSample,
    Result,
    SampleLog,
    Settings,
)
from kvist.bench.samples import Machine, write
from kvist.core.errors import ConfigError

SETTINGS = Settings(
    model="m",
    texts=["t"],
    contexts=2,
    context_tokens=64,
    follow_tokens=2,
    greedy_tokens=4,
    block_tokens=32,
    questions=1,
    answer_tokens=8,
)
FIRST = CodecSample("int8", 0, 1000, 500, 0.001, 0.0005, 0.0001, [0.1, 0.3], [1.0, 1.0], 2, 4, 4)
SECOND = CodecSample("int8", 1, 1000, 300, 0.001, 0.0015, 0.0001, [0.0, 0.0], [2.0, 0.0], 1, 2, 4)


def _result(*rows: CodecRow) -> Result:
    machine = Machine("cpu", 2, 1, "6.1", "3.11", {}, "abc", 0.0)
    return Result(started="now", machine=machine, settings=SETTINGS, codecs=list(rows))


def test_row_is_over_all_positions_and_bytes_of_its_samples() -> None:
    log = SampleLog(SETTINGS)
    log.add(SECOND)
    log.add(FIRST)
    log.add(AnswerSample("int8", 0, "x", 0.5, False))
    row = codec_row("int8", log)
    assert (row.contexts, row.positions) == (2, 4)
    assert row.kl_nats_mean == pytest.approx(0.1)
    assert row.kl_nats_p95 == 0.3
    assert row.perplexity == pytest.approx(2.71828, abs=1e-5)
    assert (row.top1_ratio, row.greedy_ratio) == (0.75, 0.75)
    assert (row.raw_bytes, row.stored_bytes) == (2000, 800)
    assert (row.encode_mb_s, row.decode_mb_s) == (1.0, 1.0)
    assert (row.questions, row.f1, row.exact_ratio) == (1, 0.5, 0.0)
    assert copy_mb_s(log, ["int8"]) == 10.0


def test_codec_without_samples_has_a_row_without_figures() -> None:
    row = codec_row("int4", SampleLog(SETTINGS))
    assert row == CodecRow(codec="int4")
    (cells,) = codec_grid(_result(row)).rows
    assert cells == ["int4", *["–"] * 8]


def test_faulty_samples_are_named_and_do_not_count() -> None:
    log = SampleLog(SETTINGS)
    log.add(FIRST)
    log.add(CodecSample("int8", 1, 1000, 0, 0, 0, 0, fault="bad block"))
    row = codec_row("int8", log)
    assert row.contexts == 1
    assert row.fault == "text 2: bad block"
    assert "int8: text 2: bad block" in notes(_result(row))


def test_exactly_nothing_is_told_from_a_little() -> None:
    rows = [
        CodecRow(codec="raw", raw_bytes=10, stored_bytes=10, kl_nats_mean=0.0),
        CodecRow(codec="near", raw_bytes=10, stored_bytes=9, kl_nats_mean=1.2345e-7),
    ]
    cells = codec_grid(_result(*rows)).rows
    assert [c[:3] for c in cells] == [["raw", "100.0%", "0"], ["near", "90.0%", "1.2e-07"]]


def test_samples_are_read_again_and_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    log = SampleLog(SETTINGS, path)
    log.add(FIRST)
    log.add(AnswerSample("int8", 3, "x", 0.25, True))
    again = SampleLog(SETTINGS, path)
    assert again.codecs("int8") == [FIRST]
    assert again.has(AnswerSample, "int8", 3)
    assert not again.has(AnswerSample, "int8", 0)
    with pytest.raises(ConfigError, match="samples of other settings"):
        SampleLog(msgspec.structs.replace(SETTINGS, contexts=3), path)


def test_sample_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    log = SampleLog(SETTINGS, path)
    log.add(FIRST)
    log.add(SECOND)
    path.write_bytes(path.read_bytes()[:-9])
    again = SampleLog(SETTINGS, path)
    assert again.codecs("int8") == [FIRST]
    again.add(SECOND)
    assert SampleLog(SETTINGS, path).codecs("int8") == [FIRST, SECOND]


@pytest.mark.parametrize("content", [b"hello\n", b"{}\n", b"\n\n", b'{"type":"codec"}'])
def test_file_of_something_else_is_refused_and_left_as_it_is(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="quality samples"):
        SampleLog(SETTINGS, path)
    assert path.read_bytes() == content


def test_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write(_result(CodecRow(codec="raw", kl_nats_mean=0.0)), path)
    assert samples.read(path) == _result(CodecRow(codec="raw", kl_nats_mean=0.0))
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 9'))
    with pytest.raises(ConfigError, match="schema 9"):
        samples.read(path)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="no quality result"):
        samples.read(path)


def test_samples_of_one_table_are_not_mixed_with_those_of_another(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    SampleLog(SETTINGS, path).add(FIRST)
    log = SampleLog(SETTINGS, path)  # a table may come later
    log.use_table("aa")
    log.add(SECOND)
    again = SampleLog(SETTINGS, path)
    again.use_table("aa")
    assert again.codecs("int8") == [FIRST, SECOND]
    with pytest.raises(ConfigError, match="samples of another table"):
        SampleLog(SETTINGS, path).use_table("bb")


def test_faulty_samples_are_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    log = SampleLog(SETTINGS, path)
    log.add(CodecSample("int8", 0, 1000, 0, 0, 0, 0, fault="bad block"))
    log.add(SECOND)
    again = SampleLog(SETTINGS, path)
    assert not again.has(CodecSample, "int8", 0)
    again.add(FIRST)
    assert SampleLog(SETTINGS, path).codecs("int8") == [FIRST, SECOND]


def test_smallest_codec_of_no_more_kl_is_named_beside_one_that_it_beats() -> None:
    rows = [
        CodecRow(codec=name, raw_bytes=100, stored_bytes=stored, kl_nats_mean=kl)
        for name, stored, kl in (
            ("raw", 100, 0.0),
            ("wide", 50, 1e-3),
            ("fair", 40, 1e-3),
            ("fine", 25, 9e-4),
            ("coarse", 10, 1e-2),
        )
    ]
    best = [smaller_at_no_more_kl(row, rows) for row in rows]
    assert [b.codec if b else "" for b in best] == ["", "fine", "fine", "", ""]
    assert smaller_at_no_more_kl(CodecRow(codec="absent"), rows) is None
    said = (
        "At no more KL, fine is 2.00 times smaller than wide, fine is 1.60 times smaller than fair."
    )
    assert said in notes(_result(*rows))
