"""The command on small traces: every study is run, written and drawn; bad input is one line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean

import msgspec
import pytest

from kvist.router.conductor import HOLD_S
from kvist.sim.des.routing_spec import RouterKind
from kvist.sim.routing.__main__ import main, studies
from kvist.sim.routing.overload import RULE_SEEDS, RULES, RuleRow
from kvist.sim.routing.page import MARK, RULES_END, RULES_MARK, with_rules, with_section
from kvist.sim.routing.policies import CLOSE, OTHERS, POLICY_SEEDS, SHOWN, PolicyRow
from kvist.sim.routing.setting import ALL_TRAFFIC, CHAT, CODING, Run, cluster


def test_every_study_is_run_and_written(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.json"
    options = ["--nodes", "4", "--requests", "30", "--seed", "1", "--seed", "2"]
    code = main(["--traces", str(traces), "--json", str(file), *options])
    assert code in (0, 1)  # small traces need not bear out every claim
    record = json.loads(file.read_text())
    assert [study["name"] for study in record["studies"]] == [s.name for s in studies()]
    out = capsys.readouterr()
    assert "conversation, 4 nodes, kvist: mean TTFT" in out.out
    assert "The first 30 requests" in out.out
    assert out.err.count("conversation: dynamo, 4 nodes") == 1
    claims = [c["text"] for study in record["studies"] for c in study["claims"]]
    assert sum("least mean TTFT" in text for text in claims) == 3


def test_kvist_is_simulated_with_the_gateway_s_queue_and_nobody_else() -> None:
    holds = {r: cluster(Run(CHAT, r)).routing.hold_s for r in RouterKind}
    assert holds.pop(RouterKind.KVIST) == HOLD_S
    assert set(holds.values()) == {math.inf}


def test_another_seed_is_another_comparison(traces: Path, tmp_path: Path) -> None:
    options = ["--only", "policies", "--nodes", "2", "--requests", "12", "--traces", str(traces)]
    file = tmp_path / "r.json"
    main([*options, "--seed", "7", "--seed", "8", "--json", str(file)])
    rows = msgspec.convert(json.loads(file.read_text())["policies"], list[PolicyRow])
    seeds: dict[str, list[int]] = {}
    for row in rows:
        if row.traffic == CHAT.name:
            seeds.setdefault(row.policy, []).append(row.seed)
    assert seeds == {r.value: [7, 8] if r in CLOSE else [7] for r in SHOWN}
    first, second = (r for r in rows if (r.traffic, r.policy) == (CODING.name, "kvist"))
    assert first.goodput_rps != second.goodput_rps  # its times are exact, but for the seed


def test_rules_of_admission_are_judged_by_several_seeds(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, file = tmp_path / "page.md", tmp_path / "r.json"
    page.write_text(f"Before.\n\n{RULES_MARK}\n\nold\n\n{RULES_END}\nBetween.\n\n{MARK}\n\nkept")
    options = ["--only", "admission", "--traces", str(traces), "--json", str(file)]
    assert main([*options, "--page", str(page)]) in (0, 1)
    record = json.loads(file.read_text())
    rows = msgspec.convert(record["admission"], list[RuleRow])
    assert [(r.seed, r.rule) for r in rows] == [(s, r.value) for s in RULE_SEEDS for r in RULES]
    (study,) = record["studies"]
    rejected = [f for f in study["figures"] if f["what"] == "early: rejected"]
    counts = [row.rejected for row in rows if row.rule == "early"]
    assert [(f["ours"], f["by_seed"]) for f in rejected] == [(fmean(counts), counts)]
    assert f"Means of {len(RULE_SEEDS)} seeds" in capsys.readouterr().out
    text = page.read_text()
    assert text.startswith(f"Before.\n\n{RULES_MARK}\n\n| rule | rejected, paper | rejected |")
    assert text.endswith(f"\n\n{RULES_END}\nBetween.\n\n{MARK}\n\nkept")
    assert text.count("| `predictive` | 15.2% |") == 1
    assert with_rules(text, rows) == text


def test_runs_that_studies_share_are_done_once(traces: Path) -> None:
    wanted = [run for study in studies((4,)) for run in study.runs]
    assert len(set(wanted)) < len(wanted)


def test_kvist_is_held_against_every_other_policy() -> None:
    assert {*OTHERS, RouterKind.KVIST} == set(RouterKind) == set(SHOWN)


def test_the_tables_go_into_the_page(traces: Path, tmp_path: Path) -> None:
    page, file = tmp_path / "page.md", tmp_path / "r.json"
    rules = f"{RULES_MARK}\n\nrules\n\n{RULES_END}"
    page.write_text(f"# Text\n\n{rules}\n\n{MARK}\n\nold figures\n")
    options = ["--only", "policies", "--nodes", "2", "--requests", "12"]
    main(["--traces", str(traces), *options, "--json", str(file), "--page", str(page)])
    text = page.read_text()
    assert text.startswith(
        f"# Text\n\n{rules}\n\n{MARK}\n\n**conversation, 2 replicas**, 12 requests\n"
    )
    assert "old figures" not in text
    assert text.count("| `kvist` |") == len(ALL_TRAFFIC)
    kept = msgspec.convert(json.loads(file.read_text())["policies"], list[PolicyRow])
    runs = len(SHOWN) + len(CLOSE) * (len(POLICY_SEEDS) - 1)
    assert len(kept) == len(ALL_TRAFFIC) * runs
    assert with_section(text, kept) == text


def test_the_swing_is_drawn(traces: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "swing.svg"
    assert main(
        ["--traces", str(traces), "--only", "admission", "--seed", "3", "--plot", str(picture)]
    ) in (0, 1)  # fmt: skip
    assert "predictive: opposite swing of" in picture.read_text()


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--only", "magic"], "there is no study 'magic'; take admission"),
        (["--nodes", "0"], "--nodes: must be at least 1"),
        (["--seed", "3", "--seed", "3"], "--seed: each seed once"),
        (["--requests", "0"], "--requests: must be at least 1"),
        (["--traces", "nowhere"], "is not there"),
        (["--plot", "x.pdf"], "neither .png nor .svg"),
        (["--plot", "x.png", "--only", "overload"], "run it, too"),
        (["--page", "x.md", "--only", "overload"], "run one of them, too"),
        (["--page", "/dev/null"], "does not say where the tables belong"),
    ],
)
def test_bad_input_is_one_line(
    traces: Path, options: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert main(["--traces", str(traces), *options]) == 2
    err = capsys.readouterr().err
    assert fault in err
    assert err.count("\n") == 1
