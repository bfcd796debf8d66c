"""`kvist advise` and `kvist record` from the command line: reports, pages, and one-line errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvist.cli.advise import write_whole
from kvist.cli.main import EXIT_ERROR, main
from kvist.connectors.recorder import TraceRecorder
from kvist.core.hints import Finish

RAG = ["advise", "--synthetic", "rag", "--requests", "300", "--quick"]
RECORD = {"timestamp": 0, "input_length": 1000, "output_length": 9, "hash_ids": [1, 2]}


def _fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == EXIT_ERROR
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_report_starts_with_the_verdict_and_ends_with_assumptions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(RAG) == 0
    out = capsys.readouterr().out
    assert out.startswith("non-prefix: Use non-prefix reuse")
    titles = [
        "Traffic",
        "Hit ratio of tokens",
        "Tiers",
        "Simulated",
        "Savings",
        "Why",
        "Assumptions",
    ]
    places = [out.index(f"\n{title}") for title in titles]
    assert places == sorted(places)
    assert "--dram-price" in out


def test_json_and_page_come_from_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.html"
    assert main([*RAG, "--json", "--html", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "non-prefix"
    assert found["sentence"] in path.read_text().replace("&#x27;", "'")
    assert list(tmp_path.iterdir()) == [path]


def test_a_recording_is_summed_up_and_advised_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "traffic.jsonl"
    recorder = TraceRecorder(path, 128, "Llama-3-70B")
    keys = [bytes([n]) * 32 for n in range(40)]
    for n in range(30):
        recorder.record(n * 2.0, keys[: 10 + n], 128 * (10 + n), 20, Finish.TOOL_USE, "s")
    recorder.close()
    assert main(["record", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["unique_blocks"], found["model"]) == (30, 39, "Llama-3-70B")
    assert found["ideal_token_hit_ratio"] > 0.9
    assert main(["record", str(path)]) == 0
    assert "kvist advise" in capsys.readouterr().out
    assert main(["advise", str(path), "--quick", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["traffic"]["requests"] == 30


def test_record_without_a_file_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record"]) == 0
    assert "KVIST_RECORD_PATH" in capsys.readouterr().out
    assert main(["record", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recording"] is None


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--model", "llama-3.1-70"], "llama-3"),
        (["--model", "no-such-thing"], "unknown model"),
        (["--device", "h1000"], "h100"),
        (["--device", "abacus"], "known: a100"),
        (["--count", "0"], "at least 1"),
        (["--count", "1"], "does not fit"),
        (["--nodes", "0"], "--nodes"),
        (["--dram-price", "-1"], "--dram-price"),
        (["--ssd-bandwidth", "0"], "--ssd-bandwidth"),
        (["--kv-dtype", "int3"], "int3"),
        (["--ttft-slo", "0"], "ttft"),
        (["--synthetic", "chats"], "agent, chat, oneshot, rag"),
        (["--requests", "-3"], "--requests"),
        (["--rate", "0"], "--rate"),
        (["--html", "no/such/folder/report.html"], "--html"),
    ],
    ids=str,
)
def test_a_wrong_option_is_one_line_that_names_it(
    capsys: pytest.CaptureFixture[str], argv: list[str], named: str
) -> None:
    given = [] if "--synthetic" in argv else ["--synthetic", "rag"]
    assert named in _fails(capsys, "advise", *given, *argv)


def test_a_trace_or_a_kind_is_wanted_and_not_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--synthetic" in _fails(capsys, "advise")
    assert "--synthetic" in _fails(capsys, "advise", "t.jsonl", "--synthetic", "rag")


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([], "empty"),
        ([RECORD, {"timestamp": 1, "input_length": 5}], "line 2: Object missing required field"),
        ([RECORD | {"timestamp": -5}], "line 1: `$.timestamp`"),
        ([RECORD | {"timestamp": 99_000}, RECORD], "line 2: `$.timestamp` goes back"),
        ([RECORD | {"hash_ids": []}], "no request has a block"),
    ],
    ids=str,
)
@pytest.mark.parametrize("command", ["advise", "replay"])
def test_a_bad_trace_is_one_line_and_leaves_no_page(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    lines: list[object],
    named: str,
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = ["--html", str(tmp_path / "report.html")] if command == "advise" else []
    error = _fails(capsys, command, str(path), *page)
    assert str(path) in error
    assert named in error
    assert list(tmp_path.iterdir()) == [path]


def test_a_config_json_is_a_model_and_a_broken_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    assert str(path) in _fails(capsys, *RAG, "--model", str(path))
    path.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "num_hidden_layers": 4,
                "hidden_size": 256,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 512,
                "vocab_size": 1000,
            }
        )
    )
    argv = [*RAG, "--model", str(path), "--device", "l40s", "--count", "1", "--json"]
    assert main(argv) == 0
    assert json.loads(capsys.readouterr().out)["model"] == tmp_path.name


def test_an_interrupted_write_leaves_the_old_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
