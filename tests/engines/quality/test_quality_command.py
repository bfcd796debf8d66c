"""`kvist quality` as users meet it, on a tiny model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from kvist.cli.main import main

pytestmark = pytest.mark.engines

FEW = ["--contexts", "2", "--questions", "1", "--context-tokens", "64", "--block-tokens", "32"]


def test_table_and_json_have_a_row_for_each_codec(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "quality.json"
    args = ["quality", str(tiny_folder), "--codecs", "raw,cast-fp8", "--json", str(file), *FEW]
    assert main(args) == 0
    table = capsys.readouterr().out
    assert "KL mean" in table
    assert "cast-fp8" in table
    found = json.loads(file.read_text())
    assert found["complete"]
    assert found["settings"]["model"] == "tiny-llama"
    assert found["settings"]["texts"] == ["generated gazetteer"]
    assert [row["codec"] for row in found["codecs"]] == ["raw", "cast-fp8"]
    assert set(found["codecs"][0]) == {
        "codec", "contexts", "positions", "raw_bytes", "stored_bytes", "kl_nats_mean",
        "kl_nats_p95", "perplexity", "top1_ratio", "greedy_ratio", "encode_mb_s", "decode_mb_s",
        "questions", "f1", "exact_ratio", "fault",
    }  # fmt: skip
    assert main(["quality", "--show", str(file)]) == 0
    assert capsys.readouterr().out == table


def test_plain_text_files_are_measured_too(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "story.txt"
    text.write_text("Once upon a time there was a cache that forgot nothing. " * 9)
    args = ["quality", str(tiny_folder), "--codecs", "raw", "--texts", str(text), "--contexts", "1"]
    assert main([*args, "--questions", "0", "--context-tokens", "64", "--block-tokens", "32"]) == 0
    assert "story.txt" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--contexts", "0"], "--contexts: must be at least 1"),
        (["--codecs", "zip", *FEW], "there is no codec 'zip'"),
        (["--texts", "no-such-file"], "no-such-file: No such file"),
        (["--context-tokens", "16"], "--context-tokens: fewer than --block-tokens"),
        (["--codecs", "cachegen-1", *FEW], "--table: cachegen-1 needs a table"),
        (["--table", __file__], "test_quality_command.py: "),
        (["--table", "no-such-file"], "no-such-file: No such file"),
        (["--ratios", "0,2"], "--ratios: a ratio lies between 0 and 1"),
        (["--ratios", "some"], "--ratios: 'some' are no numbers"),
        (["--plot", "x.gif"], "neither .png nor .svg"),
        (["--json", "no/such/folder/f.json"], "is not a folder"),
        (["--show", "no-such-file"], "no-such-file: No such file"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    tiny_folder: Path, args: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quality", str(tiny_folder), *args]) == 2
    line = capsys.readouterr().err
    assert said in line
    assert line.count("\n") == 1


def test_folder_without_a_model_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quality", str(tmp_path)]) == 2
    assert "no folder of a Hugging Face model" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert main(["quality", str(tmp_path)]) == 2
    assert "cannot be loaded" in capsys.readouterr().err


def test_ctrl_c_keeps_the_rows_that_were_measured(tiny_folder: Path, tmp_path: Path) -> None:
    """A real signal to a real process, after its first samples."""
    rows, samples = tmp_path / "q.json", tmp_path / "q.jsonl"
    command = [sys.executable, "-m", "kvist.cli.main", "quality", str(tiny_folder)]
    command += ["--codecs", "raw,cast-fp8", "--contexts", "400", "--questions", "0"]
    command += ["--context-tokens", "64", "--block-tokens", "32"]
    command += ["--json", str(rows), "--samples", str(samples)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline and process.poll() is None:
                if samples.exists() and samples.read_bytes().count(b"\n") > 4:
                    break
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 130, errors.decode()
    assert "interrupted" in errors.decode()
    assert "Traceback" not in errors.decode()
    assert "cast-fp8" in out.decode()
    found = json.loads(rows.read_text())
    assert not found["complete"]
    assert found["codecs"][0]["contexts"] >= 2
