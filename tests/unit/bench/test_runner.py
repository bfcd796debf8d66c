"""The benchmark's order of events, with engines that are made up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from bench_doubles import LENGTH, FakeEngine, result

from kvist.bench.participants import (
    KVIST,
    OFFLOADING,
    SLOW_ALWAYS,
    SLOW_PLANNED,
    VLLM,
    Participant,
    vllm_alone,
    vllm_with_kvist,
    vllm_with_offloading,
    vllm_with_slow_disk,
)
from kvist.bench.prompts import alternating, prompt
from kvist.bench.runner import (
    DISK,
    FLOW,
    HARM,
    HARM_TOKENS,
    PARTS,
    REUSE,
    SAVING,
    SINGLE_TOKENS,
    Runner,
    drop_from_page_cache,
)
from kvist.bench.samples import Kind, Phase, Result


class Steps:
    def __init__(self) -> None:
        self.count = 0
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def step(self, text: str) -> None:
        self.count += 1


class Bench:
    """A runner over fake engines, and what they did."""

    def __init__(
        self,
        tmp_path: Path,
        parts: Sequence[str] = PARTS,
        rounds: int = 2,
        flow_starts: int = 1,
    ) -> None:
        self.result: Result = result(rounds, flow_starts=flow_starts)
        self.screen = Steps()
        self.log: list[str] = []
        self.engines: list[FakeEngine] = []
        self.stores: dict[str, set[int]] = {}
        self.tires = ""
        self.fail_asks: tuple[str, int] = ("", 0)
        who = [vllm_alone(), vllm_with_kvist(tmp_path), vllm_with_offloading(tmp_path)]
        who += [vllm_with_slow_disk(tmp_path, name) for name in (SLOW_PLANNED, SLOW_ALWAYS)]
        self.runner = Runner(self.result, who, parts, self.start, self.screen)

    def start(self, participant: Participant) -> FakeEngine:
        store = self.stores.setdefault(participant.name, set())
        engine = FakeEngine(participant, store, self.log)
        name, asks = self.fail_asks
        if name == participant.name:
            engine.fails_at = lambda: len(engine.own) >= asks
        engine.tires_after_s = 1.9 if participant.name == self.tires else None
        self.engines.append(engine)
        return engine

    def count(self, phase: Phase, kind: Kind, name: str) -> int:
        return len(self.result.times_s(phase, kind, name, LENGTH))


def test_a_run_measures_every_kind_in_every_round_and_as_many_steps_as_announced(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    bench.runner.run()
    for name in (VLLM, KVIST, OFFLOADING):
        assert bench.count(Phase.FILL, Kind.COLD, name) == 2
    assert bench.count(Phase.REUSE, Kind.COLD, VLLM) == 2
    assert bench.count(Phase.REUSE, Kind.REPEAT, VLLM) == 2
    for kind in (Kind.RESTART, Kind.REPEAT, Kind.MEMORY):
        assert bench.count(Phase.REUSE, kind, KVIST) == 2
    for name in (KVIST, OFFLOADING):
        assert bench.count(Phase.DISK, Kind.DISK, name) == 2
    assert len(bench.result.times_s(Phase.FLOW, Kind.FLOW, KVIST, 512)) == 2
    for name in (VLLM, KVIST):
        singles = bench.result.times_s(Phase.FLOW, Kind.FIRST, name, SINGLE_TOKENS)
        assert sorted(singles) == list(range(4))
    assert bench.result.flaws() == []
    assert bench.screen.count == bench.runner.steps()


def test_every_round_of_reuse_restarts_every_engine(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [REUSE, DISK])
    bench.runner.run()
    everyone = [VLLM, KVIST, OFFLOADING]
    names = [e.participant.name for e in bench.engines]
    assert names == [*everyone, *everyone, *everyone, KVIST, OFFLOADING]  # fill, 2 rounds, disk
    ends = [e.ended for e in bench.engines]
    assert ends[:6] == ["stopped"] * 6
    assert set(ends[-2:]) == {"killed"}


def test_batches_are_served_by_several_processes_in_turn(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [FLOW], flow_starts=3)
    bench.runner.run()
    names = [e.participant.name for e in bench.engines]
    assert names == [VLLM, KVIST, KVIST, VLLM, VLLM, KVIST]
    assert sorted(bench.result.times_s(Phase.FLOW, Kind.FLOW, KVIST, 512)) == list(range(6))
    singles = bench.result.times_s(Phase.FLOW, Kind.FIRST, KVIST, SINGLE_TOKENS)
    assert sorted(singles) == list(range(12))
    assert bench.screen.count == bench.runner.steps()


def test_the_disk_is_read_by_engines_that_bring_nothing_to_dram_ahead(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [DISK])
    bench.runner.run()
    kvist = [e.participant for e in bench.engines if e.participant.name == KVIST]
    knobs = [dict(p.cache or {})["kv_connector_extra_config"] for p in kvist]
    assert [k.get("store.dram.restore") for k in knobs] == [None, 0.0]


def test_the_order_of_engines_turns_around_in_every_round(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [SAVING])
    bench.runner.run()
    asked = [t.split()[0] for t in bench.log if t.endswith(f"1x{LENGTH}")]
    assert asked == [VLLM, KVIST, OFFLOADING, OFFLOADING, KVIST, VLLM]
    assert alternating("ab", 1) == ["b", "a"]


def test_only_the_parts_asked_for_are_measured(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [FLOW])
    bench.runner.run()
    assert {s.phase for s in bench.result.samples} == {Phase.FLOW}
    bench = Bench(tmp_path, [REUSE])
    bench.runner.run()
    assert bench.count(Phase.FILL, Kind.COLD, VLLM) == 0
    assert bench.count(Phase.REUSE, Kind.RESTART, KVIST) == 2
    assert bench.screen.count == bench.runner.steps()


def test_an_engine_that_fails_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.fail_asks = (OFFLOADING, 2)
    bench.runner.run()
    assert "on purpose" in bench.result.absent[OFFLOADING]
    assert bench.count(Phase.FILL, Kind.COLD, OFFLOADING) == 1
    assert bench.count(Phase.REUSE, Kind.RESTART, OFFLOADING) == 0
    assert bench.count(Phase.REUSE, Kind.RESTART, KVIST) == 2
    assert all(e.ended for e in bench.engines)


def test_an_engine_that_fails_before_the_restart_is_not_started_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [SAVING, REUSE])
    bench.tires = KVIST
    bench.runner.run()
    assert "asleep" in bench.result.absent[KVIST]
    assert [e.participant.name for e in bench.engines].count(KVIST) == 1
    assert bench.count(Phase.REUSE, Kind.RESTART, OFFLOADING) == 2


def test_an_interrupt_ends_every_engine_and_keeps_what_was_measured(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [SAVING, REUSE])

    def interrupt(text: str) -> None:
        bench.screen.count += 1
        if bench.screen.count == 5:
            raise KeyboardInterrupt

    bench.screen.step = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        bench.runner.run()
    assert len(bench.result.samples) == 4
    assert all(e.ended == "killed" for e in bench.engines)


def test_prompts_of_the_same_label_are_equal_and_of_others_share_no_block() -> None:
    assert prompt(200, 1, "a") == prompt(200, 1, "a")
    assert prompt(200, 1, "a")[:128] != prompt(200, 2, "a")[:128]


def test_dropping_pages_leaves_the_files_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_bytes(b"kv" * 5000)
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    drop_from_page_cache(tmp_path)
    assert (tmp_path / "deep" / "file").read_bytes() == b"kv" * 5000


def test_a_slow_disk_is_measured_with_both_policies_beside_the_engine_alone(tmp_path: Path) -> None:
    bench = Bench(tmp_path, parts=[HARM])
    bench.runner.run()
    times_s = bench.result.times_s
    assert len(times_s(Phase.HARM, Kind.COLD, VLLM, HARM_TOKENS)) == 2
    for name in (SLOW_PLANNED, SLOW_ALWAYS):
        assert len(times_s(Phase.HARM, Kind.SLOW, name, HARM_TOKENS)) == 2
    assert bench.result.prefill_error_ratio == 0.1
    assert bench.screen.count == bench.runner.steps()
    assert all(engine.ended == "killed" for engine in bench.engines)
