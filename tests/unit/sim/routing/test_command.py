"""The command on small traces: every study is run, written and drawn; bad input is one line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest

from kvist.router.conductor import HOLD_S
from kvist.sim.des.routing_spec import RouterKind
from kvist.sim.routing.__main__ import main, studies
from kvist.sim.routing.page import MARK, with_section
from kvist.sim.routing.policies import OTHERS, SHOWN, PolicyRow
from kvist.sim.routing.setting import ALL_TRAFFIC, CHAT, Run, cluster


def test_every_study_is_run_and_written(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.json"
    code = main(["--traces", str(traces), "--json", str(file), "--nodes", "4", "--requests", "30"])
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
    found = []
    for seed in ("1", "2"):
        main([*options, "--seed", seed, "--json", str(tmp_path / seed)])
        found.append(json.loads((tmp_path / seed).read_text()))
    assert [record["seed"] for record in found] == [1, 2]
    assert found[0]["policies"] != found[1]["policies"]


def test_runs_that_studies_share_are_done_once(traces: Path) -> None:
    wanted = [run for study in studies((4,)) for run in study.runs]
    assert len(set(wanted)) < len(wanted)


def test_kvist_is_held_against_every_other_policy() -> None:
    assert {*OTHERS, RouterKind.KVIST} == set(RouterKind) == set(SHOWN)


def test_the_tables_go_into_the_page(traces: Path, tmp_path: Path) -> None:
    page, file = tmp_path / "page.md", tmp_path / "r.json"
    page.write_text(f"# Text\n\n{MARK}\n\nold figures\n")
    options = ["--only", "policies", "--nodes", "2", "--requests", "12"]
    main(["--traces", str(traces), *options, "--json", str(file), "--page", str(page)])
    text = page.read_text()
    assert text.startswith(f"# Text\n\n{MARK}\n\n**conversation, 2 replicas**, 12 requests\n")
    assert "old figures" not in text
    assert text.count("| `kvist` |") == len(ALL_TRAFFIC)
    kept = msgspec.convert(json.loads(file.read_text())["policies"], list[PolicyRow])
    assert len(kept) == len(ALL_TRAFFIC) * len(SHOWN)
    assert with_section(text, kept) == text


def test_the_swing_is_drawn(traces: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "swing.svg"
    assert main(
        ["--traces", str(traces), "--only", "admission", "--plot", str(picture)]
    ) in (0, 1)  # fmt: skip
    assert "predictive: opposite swing of" in picture.read_text()


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--only", "magic"], "there is no study 'magic'; take admission"),
        (["--nodes", "0"], "--nodes: must be at least 1"),
        (["--requests", "0"], "--requests: must be at least 1"),
        (["--traces", "nowhere"], "is not there"),
        (["--plot", "x.pdf"], "neither .png nor .svg"),
        (["--plot", "x.png", "--only", "overload"], "run it, too"),
        (["--page", "x.md", "--only", "overload"], "run it, too"),
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
