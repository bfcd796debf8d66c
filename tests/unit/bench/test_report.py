"""Ratios, rows and verdicts of a benchmark run, and how they are kept and shown."""

from __future__ import annotations

import io
import signal
from pathlib import Path

import pytest
from bench_doubles import LENGTH, add, result
from rich.console import Console

from kvist.bench import samples
from kvist.bench.__main__ import FULL_FILE, STORE_FILE, _signals_interrupt, main
from kvist.bench.pages import page, print_result
from kvist.bench.participants import KVIST, LMCACHE, VLLM
from kvist.bench.report import caveats, costs, ratio, reuse_rows, verdicts
from kvist.bench.samples import Kind, Phase, Result
from kvist.bench.store import samples as store_samples
from kvist.core.errors import ConfigError


@pytest.fixture
def run() -> Result:
    """Kvist 40 times faster than recomputing and 1.25 times slower than a prefix hit."""
    made = result()
    add(made, Phase.REUSE, Kind.COLD, VLLM, [8, 8, 8, 8, 80], 0)
    add(made, Phase.REUSE, Kind.REPEAT, VLLM, [0.16] * 5, 1024)
    add(made, Phase.REUSE, Kind.RESTART, KVIST, [0.2] * 5, 1024)
    add(made, Phase.FILL, Kind.COLD, VLLM, [8.0] * 5, 0)
    add(made, Phase.FILL, Kind.COLD, KVIST, [8.2] * 5, 0)
    add(made, Phase.FLOW, Kind.FLOW, VLLM, [10.0] * 5, 0)
    add(made, Phase.FLOW, Kind.FLOW, KVIST, [10.5] * 5, 0)
    add(made, Phase.FLOW, Kind.FIRST, VLLM, [2.0] * 5, 0)
    add(made, Phase.FLOW, Kind.FIRST, KVIST, [2.02] * 5, 0)
    return made


def test_a_ratio_is_of_medians_over_the_rounds_that_both_have() -> None:
    found = ratio({0: 8.0, 1: 9.0, 2: 100.0, 3: 1.0}, {0: 2.0, 1: 3.0, 2: 4.0})
    assert found is not None
    assert found.value == 3.0
    assert (found.low, found.high, found.rounds) == (3.0, 25.0, 3)
    assert ratio({0: 1.0}, {1: 1.0}) is None


def test_rows_compare_with_recompute_and_with_the_engines_own_prefix_hit(run: Result) -> None:
    row = next(r for r in reuse_rows(run, LENGTH) if "Kvist after" in r.title)
    assert row.median_s == 0.2
    assert row.faster is not None
    assert row.to_prefix_hit is not None
    assert row.faster.value == pytest.approx(40)
    assert row.to_prefix_hit.value == pytest.approx(1.25)


def test_a_participant_that_did_not_run_is_a_row_with_the_reason(run: Result) -> None:
    run.absent[LMCACHE] = "lmcache ended: no memory"
    row = next(r for r in reuse_rows(run, LENGTH) if "LMCache" in r.title)
    assert row.median_s is None
    assert row.why == "lmcache ended: no memory"
    assert "not run: lmcache ended" in page((run, "x.json"), None)


def test_a_restart_that_was_not_served_from_the_cache_counts_for_nothing(run: Result) -> None:
    run.samples = [
        samples.Sample(s.phase, s.kind, s.participant, s.prompt_tokens, s.round, s.took_s, 128)
        if s.kind is Kind.RESTART
        else s
        for s in run.samples
    ]
    row = next(r for r in reuse_rows(run, LENGTH) if "Kvist after" in r.title)
    assert row.median_s is None
    assert row.why == f"served only 128 of {LENGTH} tokens from the cache"
    assert any("5 samples were not what they should be" in text for text in caveats(run))
    assert verdicts(run)[0].met is None


def test_a_cold_request_that_found_something_counts_for_nothing(run: Result) -> None:
    add(run, Phase.FILL, Kind.COLD, "other", [1.0], 128)
    assert run.times_s(Phase.FILL, Kind.COLD, "other", LENGTH) == {}


def test_verdicts_say_met_missed_or_not_measured(run: Result) -> None:
    assert [v.met for v in verdicts(run)] == [True, True, True, False, True, None, None]
    assert [v.met for v in verdicts(result())] == [None] * 7


def test_a_target_is_neither_met_nor_missed_after_too_few_rounds() -> None:
    made = result(rounds=4)
    add(made, Phase.FILL, Kind.COLD, VLLM, [8.0] * 4, 0)
    add(made, Phase.FILL, Kind.COLD, KVIST, [8.0] * 4, 0)
    assert verdicts(made)[2].met is None
    assert "too few rounds" in page((made, "x.json"), None)


def test_costs_are_times_with_a_cache_over_times_without(run: Result) -> None:
    saving, flow, first = costs(run)
    assert saving.ratio.value == pytest.approx(1.025)
    assert flow.ratio.value == pytest.approx(1.05)
    assert first.ratio.value == pytest.approx(1.01)


def test_the_engine_alone_is_compared_with_itself_where_it_was_started_more_than_once() -> None:
    made = result(rounds=2, flow_starts=2)
    add(made, Phase.FLOW, Kind.FLOW, VLLM, [8.0, 8.0, 12.0, 12.0], 0)
    add(made, Phase.FLOW, Kind.FLOW, KVIST, [10.0] * 4, 0)
    with_kvist, alone = costs(made)
    assert with_kvist.ratio.value == pytest.approx(1.0)
    assert (alone.ratio.low, alone.ratio.high) == pytest.approx((0.8, 1.2))


def test_too_few_rounds_a_busy_machine_and_an_interruption_are_said() -> None:
    made = result(rounds=3)
    made.complete = False
    made.machine = samples.after(made.machine, 9.0)
    made.machine = type(made.machine)("cpu", 2, 1, "6", "3", {}, "abc", load_before=4.0)
    text = " ".join(caveats(made))
    assert "interrupted" in text
    assert "Only 3 rounds" in text
    assert "busy" in text


def test_a_result_is_read_back_as_it_was_written(run: Result, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "result.json"
    samples.write(run, path)
    assert samples.read(path) == run
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]


@pytest.mark.parametrize("text", ["", "{}", '{"samples": 3}'])
def test_a_file_that_is_no_result_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.json"):
        samples.read(path)


def test_a_result_of_another_schema_is_refused(run: Result, tmp_path: Path) -> None:
    run.schema = 99
    samples.write(run, tmp_path / "new.json")
    with pytest.raises(ConfigError, match="schema 99"):
        samples.read(tmp_path / "new.json")


def test_the_terminal_and_the_page_show_the_same_ratios(run: Result) -> None:
    out = io.StringIO()
    print_result(run, Console(file=out, width=200))
    for text in (out.getvalue(), page((run, "bench/results/x.json"), None)):
        assert "40× (40–400, 5 rounds)" in text
        assert "1.25× (1.25–1.25, 5 rounds)" in text
        assert "NOT met" in text
    assert "`bench/results/x.json`" in page((run, "bench/results/x.json"), None)


def test_a_kept_result_is_shown_without_running_anything(
    run: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples.write(run, tmp_path / "r.json")
    shown = tmp_path / "page.md"
    assert main(["--show", str(tmp_path / "r.json"), "--page", str(shown)]) == 0
    assert "Kvist after an engine restart" in capsys.readouterr().out
    assert shown.read_text().count("\n## ") == 3


def test_the_page_in_the_docs_shows_the_kept_result() -> None:
    root = Path(__file__).resolve().parents[3]
    if not (root / FULL_FILE).exists():
        pytest.skip("no result is kept")
    shown = (root / "docs" / "benchmarks.md").read_text()
    store = FULL_FILE.with_name(STORE_FILE)
    kept = (store_samples.read(root / store), str(store)) if (root / store).exists() else None
    assert shown == page((samples.read(root / FULL_FILE), str(FULL_FILE)), kept), (
        f"run `python -m kvist.bench --show {FULL_FILE} --page docs/benchmarks.md`"
    )


def test_a_second_signal_does_not_disturb_the_cleaning_up() -> None:
    cleaned = []
    with _signals_interrupt():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        cleaned.append("all")
    assert cleaned == ["all"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("args", [["--lengths", "x"], ["--lengths", "100"], ["--rounds", "0"]])
def test_settings_that_cannot_be_measured_are_refused(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    assert "bench: " in capsys.readouterr().err
