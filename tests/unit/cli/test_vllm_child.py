"""What a server's log lines say, and why it ended."""

from __future__ import annotations

import pytest

from kvist.cli.vllm_child import base_url, phase_of, reason_of


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("INFO [core.py:93] Initializing a V1 LLM engine (v0.32.0) with config", "starting engine"),
        ("INFO [cpu_model_runner.py:80] Starting to load model /m...", "loading weights"),
        ("Loading safetensors checkpoint shards: 100% Completed", "loading weights"),
        ("INFO [kv_cache_utils.py:1] CPU KV cache size: 23,296 tokens", "making the KV cache"),
        ("INFO [cpu_model_runner.py] Warming up model for the compilation...", "warming up"),
        ("INFO [api_server.py:1] Starting vLLM server on http://127.0.0.1", "opening the port"),
        ("INFO nothing of interest", None),
    ],
)
def test_a_log_line_tells_the_phase(line: str, phase: str | None) -> None:
    assert phase_of(line) == phase


def test_the_reason_is_kvists_own_word_where_there_is_one() -> None:
    lines = [
        "ValueError: something vague",
        "(EngineCore) kvist.core.errors.UnsupportedError: --x: cannot; leave it out",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    assert reason_of(lines) == "--x: cannot; leave it out"


def test_the_reason_is_the_cause_rather_than_its_effect() -> None:
    lines = [
        "(EngineCore) torch.OutOfMemoryError: no memory",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    assert reason_of(lines) == "torch.OutOfMemoryError: no memory"
    assert reason_of(lines[1:]).startswith("RuntimeError: Engine core")


def test_the_reason_of_a_usage_error_is_what_argparse_says() -> None:
    line = "api_server.py: error: unrecognized arguments: --nope"
    assert reason_of(["usage: …", line]) == "unrecognized arguments: --nope"
    assert reason_of([]) == "it gave no reason"


def test_the_address_is_one_that_can_be_reached_from_here() -> None:
    assert base_url("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert base_url("::", 80) == "http://[::1]:80"
    assert base_url("127.0.0.1", 81) == "http://127.0.0.1:81"
