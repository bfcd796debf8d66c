"""`kvist sim` as users meet it: a table, runs side by side, JSON, errors of one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvist.cli.main import main

TEXT = """
model: llama-3-8b
hardware: {device: h100, count: 1}
nodes: 2
store: {dram: {capacity_bytes: 10_000_000_000}}
trace: {synthetic: chat, requests: 40}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    """A scenario of forty requests."""
    path = tmp_path / "s.yaml"
    path.write_text(TEXT)
    return str(path)


def test_sim_prints_a_table_for_people(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", scenario]) == 0
    out = capsys.readouterr().out
    words = "TTFT p50 / p90 / p99", "goodput", "tokens not computed", "from hbm", "40 / 0 / 0"
    for word in words:
        assert word in out


def test_sim_prints_json_for_programs_and_the_same_again(
    scenario: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = []
    for _ in range(2):
        assert main(["sim", scenario, "--seed", "5", "--json"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    found = json.loads(outputs[0])
    assert found["seed"] == 5
    assert found["requests"] == 40
    assert found["ttft_s"]["p50"] > 0


def test_sim_compares_values_of_a_key_side_by_side(
    scenario: str, capsys: pytest.CaptureFixture[str]
) -> None:
    compare = ["--compare", "router=random,least-loaded,cache-aware"]
    assert main(["sim", scenario, *compare]) == 0
    assert "router=least-loaded" in capsys.readouterr().out
    numbers = ["--compare", "nodes=1,4", "--set", "store.dram.policy=lru"]
    assert main(["sim", scenario, *numbers, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["run"] for one in found] == ["nodes=1", "nodes=4"]
    assert found[0]["ttft_s"]["mean"] >= found[1]["ttft_s"]["mean"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--compare", "router"], "--compare: 'router' has no value"),
        (["--compare", "router=random,magic"], "$.router"),
        (["--set", "engin.step_tokens=3"], "$.engin"),
        (["--set", "model=gpt-9"], "unknown model"),
        (["--set", "trace.path=none.jsonl", "--set", "trace.synthetic=null"], "none.jsonl"),
    ],
)
def test_sim_refuses_what_it_cannot_run_in_one_line(
    scenario: str, capsys: pytest.CaptureFixture[str], options: list[str], complaint: str
) -> None:
    assert main(["sim", scenario, *options]) == 2
    streams = capsys.readouterr()
    assert complaint in streams.err
    assert streams.err.count("\n") == 1
    assert streams.out == ""


def test_sim_names_a_scenario_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "nowhere.yaml"]) == 2
    assert "nowhere.yaml: No such file" in capsys.readouterr().err
