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


@pytest.fixture
def rag_trace(tmp_path: Path) -> Path:
    """Thirty prompts of a system prompt, three of six passages in any order, and a question."""
    parts = {
        "1_sys_prompt": ("sys_prompt_id", {1: 100}),
        "2_passages": ("passage_id", {10 + n: 120 + 20 * n for n in range(6)}),
        "3_history": ("history_id", {30: 11}),
        "4_user_input": ("user_input_id", {100 + n: 5 + n for n in range(30)}),
        "5_web_search": ("web_search_id", {40: 9}),
    }
    for file, (field, lengths) in parts.items():
        lines = [json.dumps({field: n, "token_length": t}) for n, t in lengths.items()]
        (tmp_path / f"{file}.jsonl").write_text("\n".join(lines))
    path = tmp_path / "0_trace.jsonl"
    records = [
        {
            "timestamp": str(n),
            "input_length": 1,
            "hash_ids": {
                "sys_prompt": [1],
                "passages_ids": [10 + (n * k) % 7 % 6 for k in (1, 2, 3)],
                "user_input": [100 + n],
            },
        }
        for n in range(30)
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def test_replay_finds_spans_that_prefixes_miss(
    rag_trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["replay", str(rag_trace), "--reuse", "span"]
    assert main([*args, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert set(found) == {
        "policy",
        "capacity_blocks",
        "prefix_token_ratio",
        "span_token_ratio",
        "ideal_token_ratio",
        "spans",
        "span_tokens_mean",
        "blocks_written",
        "index_blocks",
        "index_bytes",
    }
    assert found["prefix_token_ratio"] < found["span_token_ratio"] <= found["ideal_token_ratio"]
    assert found["span_token_ratio"] > 0.9 * found["ideal_token_ratio"]
    assert main([*args, "--policy", "lru,belady", "--capacity", "10,100%"]) == 0
    out = capsys.readouterr().out
    assert "with spans" in out
    assert out.count("belady") == 2


def test_replay_of_spans_needs_a_trace_that_says_its_parts(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(trace), "--reuse", "span"]) == 2
    err = capsys.readouterr().err
    assert "do not say of which parts they are made" in err
    assert err.count("\n") == 1
