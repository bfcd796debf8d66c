"""Fifty nodes under faults: after quiet every index is true, copies are restored, no read is wrong.

A seed that fails prints the command that repeats it. `KVIST_CLUSTER_SEEDS` plays more of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from kvist.sim.cluster import __main__ as command
from kvist.sim.cluster.__main__ import main
from kvist.sim.cluster.world import Verdict, run_seed

SEEDS = int(os.environ.get("KVIST_CLUSTER_SEEDS", "50"))
PART = 10  # seeds of one test


@cache
def played(seed: int) -> Verdict:
    return run_seed(seed)


@pytest.mark.parametrize("first", range(0, SEEDS, PART))
def test_every_seed_keeps_every_promise(first: int) -> None:
    verdicts = [played(seed) for seed in range(first, min(first + PART, SEEDS))]
    broken = [(v.command, v.violations) for v in verdicts if not v.holds]
    assert broken == []
    for verdict in verdicts:
        assert verdict.counts["reads.remote"] > 50
        assert verdict.counts["blocks"] > 100


@pytest.mark.parametrize(
    ("nodes", "seeds"),
    [(3, (0, 4, 14, 60, 77, 99)), (4, (8, 15, 21, 99)), (6, (43, 60, 77, 97)), (8, (36, 43, 60))],
)
def test_full_nodes_of_unlike_size_come_to_rest(nodes: int, seeds: tuple[int, ...]) -> None:
    """These pushed each other's blocks out for ever."""
    verdicts = [run_seed(seed, nodes=nodes) for seed in seeds]
    assert [(v.command, v.violations) for v in verdicts if not v.holds] == []
    assert all(v.counts["rests.late"] and v.counts["exchanges"] for v in verdicts)


def test_faults_of_every_kind_happen_in_these_seeds() -> None:
    counts: dict[str, int] = {}
    for seed in range(4):
        for what, count in played(seed).counts.items():
            counts[what] = counts.get(what, 0) + count
    happened = {what for what, count in counts.items() if count}
    assert happened >= {
        *(f"faults.{what}" for what in ("start", "crash", "cut", "heal", "slow", "deaf", "clear")),
        *("dumps", "reads.absent", "reads.late", "reads.local", "reads.missed"),
    }
    assert happened & {"faults.drain", "faults.depart"}


def test_same_seed_gives_the_same_trace_in_another_process() -> None:
    """Neither hashes of strings nor the order of sets decide anything."""
    code = "from kvist.sim.cluster.world import run_seed as r; print(r(3, nodes=12).trace)"
    traces = set()
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        traces.add(done.stdout)
    assert traces == {run_seed(3, nodes=12).trace + "\n"}
    assert run_seed(4, nodes=12).trace + "\n" not in traces


def test_command_repeats_a_seed_and_says_how_it_ended(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = run_seed(5, nodes=12)
    assert verdict.command == "python -m kvist.sim.cluster --seed 5 --nodes 12"
    assert main(verdict.command.split()[3:]) == 0
    assert f"seed 5: held, trace {verdict.trace}" in capsys.readouterr().out


def test_runs_that_are_broken_off_say_how_far_they_came(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(seed: int, nodes: int) -> Verdict:
        if seed == 2:
            raise KeyboardInterrupt
        return run_seed(seed, nodes=nodes)

    monkeypatch.setattr(command, "run_seed", interrupted)
    assert main(["--seeds", "0..9", "--nodes", "4"]) == 130
    assert capsys.readouterr().out == "stopped after 2 of 10 runs, 0 failed\n"


@pytest.mark.parametrize(
    "arguments", [["--seeds", "5..2"], ["--seeds", "x"], ["--nodes", "1"], ["--processes", "0"]]
)
def test_bad_arguments_are_refused_in_words(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("kvist: ")
