"""Speeds in a file: kept, found again, and harmless when they cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvist.connectors.speeds import KeptSpeeds, Speeds

ONE, TWO = bytes(32), bytes(31) + b"\1"
SPEEDS = Speeds(1e-3, 1e-4, 1e-9)


def _keep(folder: Path, fingerprint: bytes, speeds: Speeds) -> None:
    kept = KeptSpeeds(folder)
    kept.keep(fingerprint, speeds)
    assert kept.finish(10.0)


def test_each_keyspace_finds_its_own(tmp_path: Path) -> None:
    _keep(tmp_path, ONE, SPEEDS)
    _keep(tmp_path, TWO, Speeds(0.0, 2e-4, 0.0))
    assert KeptSpeeds(tmp_path).load(ONE) == SPEEDS
    assert KeptSpeeds(tmp_path).load(TWO) == Speeds(0.0, 2e-4, 0.0)
    assert [path.name for path in tmp_path.iterdir()] == ["speeds.json"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"00": {"a_s": 1}}', '{"00": {"a_s": -1, "b_s": 1, "c_s": 1}}', "\0" * 99],
    ids=["empty", "list", "torn", "field", "negative", "zeros"],
)
def test_a_file_that_is_no_such_thing_says_nothing_and_is_replaced(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "speeds.json").write_text(text)
    assert KeptSpeeds(tmp_path).load(ONE) is None
    _keep(tmp_path, ONE, SPEEDS)
    assert KeptSpeeds(tmp_path).load(ONE) == SPEEDS


def test_a_folder_that_cannot_be_written_costs_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _keep(tmp_path / "absent", ONE, SPEEDS)
    assert "speeds are not kept" in caplog.text
    assert KeptSpeeds(tmp_path / "absent").load(ONE) is None


def test_the_file_is_not_written_at_every_call(tmp_path: Path) -> None:
    now = [0.0]
    kept = KeptSpeeds(tmp_path, lambda: now[0])
    for b_s, at in ((1e-4, 0.0), (2e-4, 10.0), (3e-4, 1000.0)):
        now[0] = at
        kept.keep(ONE, Speeds(0.0, b_s, 0.0))
        assert kept.finish(10.0)
        found = KeptSpeeds(tmp_path).load(ONE)
        assert found is not None
        assert found.b_s == (1e-4 if at < 1000 else 3e-4)


def test_the_file_stays_small(tmp_path: Path) -> None:
    for i in range(80):
        _keep(tmp_path, bytes([i]) * 32, SPEEDS)
    assert (tmp_path / "speeds.json").stat().st_size < 1 << 14
    assert KeptSpeeds(tmp_path).load(bytes([79]) * 32) == SPEEDS
