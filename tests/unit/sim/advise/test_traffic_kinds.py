"""Four kinds of traffic get four different verdicts, from generated traces and from real ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from deployments import question

from kvist.sim.advise.advice import Advice, Verdict
from kvist.sim.advise.question import Effort, Medium
from kvist.sim.advise.run import advise
from kvist.sim.formats import read_trace
from kvist.sim.synthetic import USUAL, synthetic

TRACES = Path(__file__).resolve().parents[5] / "shared" / "traces"
# The verdict stands on the hit curve; a few simulated requests show that both clusters run.
EFFORT = Effort(replay_accesses=100_000, capacities=6, simulated_requests=100)

KINDS = {
    "agent": (Verdict.DRAM, "unified/weka_agentic_200s_b512.jsonl.gz"),
    "chat": (Verdict.DRAM_SSD, "mooncake/conversation_trace.jsonl"),
    "rag": (Verdict.NON_PREFIX, "ragpulse/0_trace.jsonl"),
    "oneshot": (Verdict.OFF, "azure-llm-2023/AzureLLMInferenceTrace_code.csv"),
}


def _check(kind: str, advice: Advice) -> None:
    assert advice.verdict is KINDS[kind][0]
    assert [run.name for run in advice.served] == ["engine alone", "with Kvist"]
    if kind == "rag":
        assert advice.traffic.ideal_hit_ratio == pytest.approx(0.31, abs=0.01)
        assert advice.traffic.repeated_tokens_ratio == pytest.approx(0.72, abs=0.01)
        assert "capped at 31." in advice.sentence
    if kind == "agent":
        assert advice.traffic.ideal_hit_ratio > 0.95
        assert advice.tier(Medium.DRAM).worth_bytes > 0
    if kind == "chat":
        assert advice.tier(Medium.SSD).worth_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_generated_kind_gets_its_verdict(kind: str) -> None:
    _check(kind, advise(synthetic(kind, *USUAL[kind], 0), question(effort=EFFORT)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_real_trace_gets_its_verdict(kind: str) -> None:
    path = TRACES / KINDS[kind][1]
    if not path.exists():
        pytest.skip(f"../shared/traces/{KINDS[kind][1]} is not there")
    _check(kind, advise(read_trace(path), question(effort=EFFORT)))


def test_the_same_question_gets_the_same_answer() -> None:
    trace = synthetic("rag", 300, 1.0, 0)
    small = replace(EFFORT, simulated_requests=20)
    first, again = (advise(trace, question(effort=small)) for _ in range(2))
    assert first == again
