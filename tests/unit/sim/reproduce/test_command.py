"""The command on small traces: what it writes, what it keeps, and how it refuses bad input."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvist.sim.reproduce import runner
from kvist.sim.reproduce.__main__ import main
from kvist.sim.reproduce.catalogue import experiments
from kvist.sim.reproduce.cluster import ClusterRun

NAMES = [experiment.name for experiment in experiments()]


def _run(folder: Path, traces: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    json_file, page_file = folder / "r.json", folder / "r.md"
    code = main(
        ["--traces", str(traces), "--json", str(json_file), "--page", str(page_file), *options]
    )
    return code, json.loads(json_file.read_text()), page_file.read_text()


def test_every_experiment_is_run_and_written(
    tmp_path: Path, traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, record, page = _run(tmp_path, traces, "--processes", "1")
    assert code in (0, 1)
    assert record["complete"]
    assert [e["name"] for e in record["experiments"]] == NAMES
    assert "One constant: the efficiency s" in page
    assert "No gain over it is claimed" in page
    assert page.count("\n## ") == len(NAMES) + 1
    said = capsys.readouterr()
    runs = list(dict.fromkeys(run for experiment in experiments() for run in experiment.runs))
    assert f"[{len(runs)}/{len(runs)}] " in said.err
    assert said.out.count("## ") == len(NAMES)


def test_two_processes_give_what_one_gives(tmp_path: Path, traces: Path) -> None:
    options = ("--only", "capacity", "--only", "bandwidth")
    one = _run(tmp_path, traces, *options, "--processes", "1")[1]
    two = _run(tmp_path, traces, *options, "--processes", "2")[1]
    assert one == two


def test_what_was_done_is_kept_when_broken_off(
    tmp_path: Path,
    traces: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken_off(run: ClusterRun, trace: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "measure", broken_off)
    code, record, page = _run(tmp_path, traces, "--processes", "1")
    assert code == 130
    assert not record["complete"]
    assert [e["name"] for e in record["experiments"]] == ["capacity"]
    assert "broken off" in page
    assert "broken off after 1 experiments; kept in" in capsys.readouterr().err


def test_a_part_of_the_experiments_overwrites_nothing(
    tmp_path: Path, traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    main(["--traces", str(traces), "--only", "capacity", "--processes", "1"])
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--only", "fig9"], "--only: there is no experiment 'fig9'; take capacity,"),
        (["--processes", "0"], "--processes: must be at least 1"),
        (["--traces", "nowhere"], "nowhere/mooncake/conversation_trace.jsonl is not there; give"),
    ],
)
def test_bad_options_are_one_line(
    options: list[str],
    said: str,
    traces: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--traces", str(traces), "--only", "requests", *options]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_bad_record_names_file_line_and_field(
    processes: str, traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = traces / "mooncake" / "conversation_trace.jsonl"
    lines = file.read_text().splitlines()
    lines[2] = lines[2].replace('"input_length"', '"length"')
    file.write_text("\n".join(lines))
    assert main(["--traces", str(traces), "--only", "scheduling", "--processes", processes]) == 2
    error = capsys.readouterr().err
    assert "conversation_trace.jsonl, line 3" in error
    assert "input_length" in error


def test_the_help_ends_in_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    last = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert last.strip() == "python -m kvist.sim.reproduce --only capacity"
