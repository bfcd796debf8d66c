"""`kvist replay` as users meet it: table, JSON, plot, errors of one line."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from kvist.cli.main import main

CLI_POLICIES = "value,lru,belady"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Forty requests of eight sessions."""
    path = tmp_path / "t.jsonl"
    records = [
        {
            "timestamp": 1000 * n,
            "input_length": 512 * (2 + n // 8),
            "output_length": 20,
            "hash_ids": [0, *(100 * (n % 8) + turn for turn in range(1 + n // 8))],
        }
        for n in range(40)
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def test_replay_prints_json_for_programs(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["replay", str(trace), "--policy", CLI_POLICIES, "--capacity", "10%,20", "--json"]
    assert main(args) == 0
    results = json.loads(capsys.readouterr().out)
    assert [r["policy"] for r in results] == ["value", "value", "lru", "lru", "belady", "belady"]
    assert {r["capacity_blocks"] for r in results} == {4, 20}
    assert set(results[0]) == {
        "policy",
        "capacity_blocks",
        "block_hit_ratio",
        "token_hit_ratio",
        "flops_saved_ratio",
        "blocks_written",
    }
    assert results[5]["block_hit_ratio"] >= results[3]["block_hit_ratio"]


def test_replay_prints_a_table_for_people(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(trace), "--policy", "all", "--capacity", "9"]) == 0
    out = capsys.readouterr().out
    assert "40 requests" in out
    assert "w-tinylfu" in out


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="the extra `plot` is not installed"
)
@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_replay_draws_what_it_found(trace: Path, tmp_path: Path, suffix: str) -> None:
    plot = tmp_path / f"p.{suffix}"
    assert main(["replay", str(trace), "--policy", "lru", "--plot", str(plot)]) == 0
    assert plot.stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--policy", "magic"], "there is no policy 'magic'"),
        (["--capacity", "0"], "'0' is no capacity"),
        (["--capacity", "3%,x"], "'x' is no capacity"),
        (["--plot", "p.pdf"], "neither .png nor .svg"),
    ],
)
def test_replay_refuses_bad_options_in_one_line(
    trace: Path, capsys: pytest.CaptureFixture[str], options: list[str], complaint: str
) -> None:
    assert main(["replay", str(trace), *options]) == 2
    err = capsys.readouterr().err
    assert complaint in err
    assert err.count("\n") == 1


def test_replay_names_file_line_and_field_of_a_bad_trace(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with trace.open("a") as file:
        file.write('\n{"timestamp": 1, "input_length": 4}\n')
    assert main(["replay", str(trace)]) == 2
    err = capsys.readouterr().err
    assert f"{trace}, line 41: " in err
    assert "hash_ids" in err
    assert err.count("\n") == 1
    assert main(["replay", str(trace.parent / "none.jsonl")]) == 2
