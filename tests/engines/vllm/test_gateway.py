"""Two real vLLM servers behind a gateway: OpenAI's client, vLLM's own benchmark, and a kill -9."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from kvist.cli.serve_checks import free_port
from kvist.cli.serve_events import events_args
from kvist.cli.vllm_child import VllmServer
from kvist.config import EventsConfig
from kvist.gateway.template import ModelTokenizer

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1200)]

START_S = 600.0
WAIT_S = 60.0
TOKENS = 48
BLOCK = 32
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
# The command `vllm bench serve`, which vLLM's package for CPUs does not install.
BENCH = (
    "from vllm.benchmarks.serve import add_cli_args, main;"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser;"
    "parser = Parser(); add_cli_args(parser); main(parser.parse_args())"
)
HITS = "vllm:prefix_cache_hits_total"
MESSAGES: Any = [{"role": "user", "content": "Name the seas around Sweden, and say why."}]


@pytest.fixture(scope="module")
def servers(smollm2_folder: Path) -> Iterator[list[VllmServer]]:
    """Two servers of the demo model in float32."""
    with ExitStack() as stack:
        started = []
        for _ in range(2):
            port = free_port()
            command = [
                *("--model", str(smollm2_folder), "--served-model-name", "smollm2"),
                *("--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"),
                *("--host", "127.0.0.1", "--port", str(port), "--block-size", str(BLOCK)),
                *events_args(EventsConfig(), port, ()),
            ]
            env = {**os.environ, **ENVIRONMENT}
            started.append(
                stack.enter_context(VllmServer(command, env=env, host="127.0.0.1", port=port))
            )
            started[-1].wait_ready(START_S)  # one after the other: a start takes every core
        yield started


@contextmanager
def gateway_of(servers: list[VllmServer], folder: Path, log: Path, *more: str) -> Iterator[str]:
    """A gateway's URL; what it says on stderr goes to `log`."""
    command = [sys.executable, "-m", "kvist.cli.main", "gateway", *(s.url for s in servers)]
    command += ["--listen=127.0.0.1:0", f"--set=gateway.tokenizer={folder}", *more]
    command += ["--set=gateway.timeouts.health_s=10", f"--set=block_tokens={BLOCK}"]
    with log.open("w") as said:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True)
        assert child.stdout is not None
        yield child.stdout.readline().split()[-1]
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0
        child.stdout.close()


@pytest.fixture(scope="module")
def gateway(
    servers: list[VllmServer], smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Its URL."""
    log = tmp_path_factory.mktemp("gateway") / "log"
    with gateway_of(servers, smollm2_folder, log) as url:
        yield url


def stream(url: str, **fields: Any) -> tuple[str, Any, Any]:
    """Text, finish reason and usage of a streamed greedy chat."""
    text, finish, usage = "", None, None
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        chunks = client.chat.completions.create(
            model="smollm2",
            messages=MESSAGES,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            **{"max_tokens": TOKENS, **fields},
        )
        for chunk in chunks:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
    return text, finish, usage


def test_official_client_gets_what_one_server_says(gateway: str, servers: list[VllmServer]) -> None:
    for fields in ({}, {"stop": ["Baltic"]}, {"frequency_penalty": 0.5}, {"logprobs": True}):
        assert stream(gateway, **fields) == stream(servers[0].url, **fields)


def test_prompt_has_the_tokens_that_the_server_reads(
    servers: list[VllmServer], smollm2_folder: Path
) -> None:
    with OpenAI(base_url=f"{servers[0].url}/v1", api_key="none") as client:
        answer: Any = client.chat.completions.create(
            model="smollm2",
            messages=MESSAGES,
            max_tokens=1,
            extra_body={"return_token_ids": True},
        )
    found = ModelTokenizer(smollm2_folder).chat({"messages": MESSAGES})
    assert found == answer.prompt_token_ids


def test_benchmark_of_vllm_runs_unchanged(gateway: str, smollm2_folder: Path) -> None:
    command = [sys.executable, "-c", BENCH]
    command += ["--base-url", gateway, "--model", "smollm2", "--tokenizer", str(smollm2_folder)]
    command += ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
    command += ["--dataset-name", "random", "--random-input-len", "32"]
    command += ["--random-output-len", "8", "--num-prompts", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"Failed requests:\s+0\b", done.stdout)


def test_prompt_that_one_server_has_goes_there_by_events_alone(
    servers: list[VllmServer], smollm2_folder: Path, tmp_path: Path
) -> None:
    """Each server is sent a prompt of its own past the gateway, which has to hear of it.

    By the policy that asks for nothing but prefixes: what so short a prompt spares on so small a
    model is less than what two servers on a busy machine differ by.
    """
    log, prompts = tmp_path / "log", [f"{word} " * 150 for word in ("winter", "summer")]
    with gateway_of(servers, smollm2_folder, log, "--set=router.policy=prefix") as gateway:
        _send_past(gateway, servers, prompts)
        for place in (1, 0, 0, 1):
            hits = [samples(server.url)[HITS] for server in servers]
            complete(gateway, prompts[place])
            more = [samples(s.url)[HITS] - h for s, h in zip(servers, hits, strict=True)]
            assert more[place] >= 4 * BLOCK
            assert more[1 - place] == 0
    told = [line[line.index("{") :] for line in log.read_text().splitlines() if '"request"' in line]
    lines = [json.loads(line) for line in told]
    assert [line["replicas"] for line in lines] == [[servers[n].url] for n in (1, 0, 0, 1)]
    assert all(set(line["hit_tiers"]) == {"hbm"} for line in lines)


def _send_past(gateway: str, servers: list[VllmServer], prompts: list[str]) -> None:
    """Each server computes its prompt; returns when the gateway has heard of all."""
    heard = "kvist_router_index_blocks"
    for server, prompt in zip(servers, prompts, strict=True):
        before = samples(gateway)[heard]
        complete(server.url, prompt)
        give_up = time.monotonic() + WAIT_S
        while samples(gateway)[heard] < before + 4:
            assert time.monotonic() < give_up, "the gateway heard nothing of it"
            time.sleep(0.05)


def complete(url: str, prompt: str) -> None:
    """A short greedy completion."""
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        client.completions.create(model="smollm2", prompt=prompt, max_tokens=2, temperature=0)


def samples(url: str) -> dict[str, float]:
    """Values of `/metrics`; the labels of vLLM's name the model and the engine only."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=WAIT_S) as page:
        lines = [line for line in page.read().decode().splitlines() if line[:1].isalpha()]
    pairs = (line.rpartition(" ") for line in lines)
    return {name.partition("{")[0]: float(value) for name, _, value in pairs}


def test_killed_server_costs_no_token(gateway: str, servers: list[VllmServer]) -> None:
    """The last test: one of the servers is gone behind it."""
    fields = {"max_tokens": 200, "extra_body": {"ignore_eos": True}}
    expected = stream(servers[0].url, **fields)
    with OpenAI(base_url=f"{gateway}/v1", api_key="none", max_retries=0) as client:
        chunks = client.chat.completions.create(
            model="smollm2", messages=MESSAGES, temperature=0, stream=True, **fields
        )
        text = ""
        for number, chunk in enumerate(chunks):
            text += chunk.choices[0].delta.content or ""
            if number == 20:
                os.killpg(busy(servers), signal.SIGKILL)
    assert text == expected[0]


def busy(servers: list[VllmServer]) -> int:
    """The process group of the server that computes now."""
    before = [_cpu_ticks(server.pid) for server in servers]
    time.sleep(0.5)
    used = [_cpu_ticks(s.pid) - b for s, b in zip(servers, before, strict=True)]
    return servers[used.index(max(used))].pid


def _cpu_ticks(group: int) -> int:
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            total += int(fields[11]) + int(fields[12])
    return total
