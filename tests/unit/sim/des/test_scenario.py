"""Scenarios in YAML: what they may say, and one line for what they may not."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from kvist.core.errors import ConfigError
from kvist.cost.plan_load import Overlap
from kvist.sim.des.routing_spec import RouterKind
from kvist.sim.des.scenario import load_scenario
from kvist.sim.des.spec import FaultKind, LoadPolicy, Prefilling, Role, Scope

EXAMPLES = Path(__file__).resolve().parents[4] / "examples"
LEAST = """
model: llama-3-8b
hardware: {device: h100, count: 1}
trace: {synthetic: oneshot, requests: 5}
"""


def _write(folder: Path, text: str) -> Path:
    path = folder / "s.yaml"
    path.write_text(text)
    return path


def test_a_scenario_needs_a_model_hardware_and_traffic_only(tmp_path: Path) -> None:
    report = load_scenario(_write(tmp_path, LEAST)).run()
    assert report.requests == report.finished == 5


def test_every_section_reaches_the_cluster(tmp_path: Path) -> None:
    text = (
        LEAST
        + """
nodes: {prefill: 2, decode: 1}
engine: {prefilling: non-interruptible, time_scale: 1.2, decode: {d0_s: 0.04, d1_s: 1e-4, d2_s: 0}}
store: {scope: global, load: always, overlap: layerwise, dram: {capacity_bytes: 1_000_000_000}}
links: {nic_bytes_per_s: 3.0e+9}
router: cache-aware
slo: {tbt_s: 0.2}
arrivals: {rate_scale: 2, limit: 3}
faults: [{kind: lost-node, node: 1, start_s: 3}]
random_faults: {slow_disks: 1}
seed: 4
"""
    )
    scenario = load_scenario(_write(tmp_path, text.replace("1e-4", "1.0e-4")))
    spec = scenario.cluster()
    assert spec.roles == (Role.PREFILL, Role.PREFILL, Role.DECODE)
    assert spec.engine.prefilling is Prefilling.NON_INTERRUPTIBLE
    assert spec.decode().d0_s == pytest.approx(0.048)
    assert (spec.store.scope, spec.store.load) == (Scope.GLOBAL, LoadPolicy.ALWAYS)
    assert spec.store.overlap is Overlap.LAYERWISE
    assert spec.store.dram.capacity_bytes == 10**9
    assert spec.nic_bytes_per_s() == 3e9
    assert spec.router is RouterKind.CACHE_AWARE
    assert (spec.slo.ttft_s, spec.slo.tbt_s) == (30.0, 0.2)
    assert spec.arrivals.limit == 3
    assert spec.faults[0].kind is FaultKind.LOST_NODE
    assert math.isinf(spec.faults[0].end_s)
    assert spec.random_faults.slow_disks == 1
    assert scenario.run().requests == 3


def test_paths_start_at_the_scenarios_folder(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
              "vocab_size": 100, "intermediate_size": 128}  # fmt: skip
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    record = {"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}
    (tmp_path / "t.jsonl").write_text(json.dumps(record) + "\n")
    text = "model: m/config.json\nhardware: {device: cpu, count: 4}\ntrace: {path: t.jsonl}\n"
    scenario = load_scenario(_write(tmp_path, text))
    assert scenario.cluster().model.name == "m"
    assert scenario.run().finished == 1


def test_changes_set_keys_by_path(tmp_path: Path) -> None:
    path = _write(tmp_path, LEAST)
    changed = load_scenario(path, {"engine.step_tokens": 7, "nodes": 3, "trace.requests": 2})
    assert changed.engine.step_tokens == 7
    assert len(changed.cluster().roles) == 3
    assert changed.run().requests == 2


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("enigne: {}", r"\$\.enigne \(.*s\.yaml\): no such key; did you mean engine\?"),
        ("engine: {step_token: 1}", r"\$\.engine\.step_token \(.*\): .*mean step_tokens\?"),
        ("store: {dram: {size: 1}}", r"\$\.store\.dram\.size \(.*\): no such key; known: capacity"),
        ("faults: [{kind: lost-node, nod: 0, start_s: 1}]", r"\$\.faults\[0\]\.nod .*mean node\?"),
        ("engine: {step_tokens: many}", r"\$\.engine\.step_tokens \(.*\): expected `int`"),
        ("engine: {step_tokens: 0}", r"\$\.engine\.step_tokens \(.*\): must be 1 or more"),
        ("store: {dram: {capacity_bytes: -1}}", r"\$\.store\.dram\.capacity_bytes \(.*must be 0"),
        ("router: magic", r"\$\.router \(.*\): invalid enum value 'magic'"),
        ("slo: {ttft_s: 0}", r"\$\.slo\.ttft_s \(.*\): must be above 0"),
        ("faults: [{kind: lost-node, node: 0, start_s: 5, end_s: 4}]", r"s\[0\]\.end_s .*after"),
        ("nodes: {mixed: -1}", r"\$\.nodes\.mixed \(.*\): must be 0 or more"),
        ("trace: {requests: 5}", r"\$\.trace.* \(.*\): names no traffic, or two; give either"),
        ("trace: {synthetic: poems}", r"\$\.trace\.synthetic \(.*\): unknown kind 'poems'; take"),
        ("model: 7", r"\$\.model \(.*\): expected `str`"),
        ("hardware: {count: 3}", r"\$\.hardware \(.*\): object missing required field `device`"),
        ("store: {overlap: both_ends}", r"\$\.store\.overlap \(.*\): both_ends is not simulated"),
    ],
)
def test_a_key_that_cannot_be_used_is_named_with_file_and_remedy(
    tmp_path: Path, line: str, complaint: str
) -> None:
    name = line.split(":")[0]
    kept = [old for old in LEAST.splitlines() if not old.startswith(name + ":")]
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_scenario(_write(tmp_path, "\n".join([*kept, line])))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("model: lama-3-8b", r"unknown model .*did you mean llama-3-8b"),
        ("hardware: {device: h1000}", r"unknown device"),
        ("hardware: {device: h100, count: 0}", r"\$\.hardware\.count: must be at least 1"),
        ("model: llama-3.1-405b", r"\$\.hardware\.count: Llama-3\.1-405B does not fit"),
        ("nodes: {prefill: 2}", r"\$\.nodes: no node prefills, or none decodes"),
        ("faults: [{kind: slow-disk, node: 9, start_s: 0}]", r"\$\.faults\[0\]\.node: there is no"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused_before_anything_runs(
    tmp_path: Path, line: str, complaint: str
) -> None:
    name = line.split(":")[0]
    kept = [old for old in LEAST.splitlines() if not old.startswith(name + ":")]
    with pytest.raises(ConfigError, match=complaint):
        load_scenario(_write(tmp_path, "\n".join([*kept, line]))).cluster()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("- 1", "a mapping"), ("a: [", "not YAML"), ("", "a mapping"), ("\x00", "not YAML")],
)
def test_a_file_that_is_no_scenario_is_one_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_scenario(_write(tmp_path, text))
    assert "s.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda p: p.stem)
def test_the_examples_run_without_a_trace_file(path: Path) -> None:
    scenario = load_scenario(path, {"trace.requests": 60})
    report = scenario.run()
    assert report.requests == 60
    assert report.finished > 0
