"""A real vLLM that computes prompts and one that answers, on one node, and each of them killed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from node_process import PAGE_BYTES, NodeProcess, eventually
from vllm_engine import kvist

from kvist.cli.serve_checks import free_port
from kvist.cli.vllm_child import VllmServer

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1200)]

START_S, REPLY_S, BACK_S = 600.0, 300.0, 60.0
BLOCK = 32
DRAM_BYTES = 768 << 20  # of 1.5 MB a block
TOKENS = 24
LONG = 1600  # tokens of a prompt that takes seconds
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # threads that wait for each other's core are slower than one
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
}


@dataclass(frozen=True, slots=True)
class Pools:
    """Both engines, their node and the gateway before them; `log` is the gateway's."""

    node: NodeProcess
    prefill: VllmServer
    decode: VllmServer
    url: str
    log: Path

    def settled(self) -> None:
        """Nothing is booked, nothing is leased, and nothing leaked."""
        eventually(lambda: sample(self.url, "kvist_gateway_bookings") == 0, BACK_S)
        eventually(lambda: self.node.store_stats()["leases"] == 0, BACK_S)
        eventually(lambda: self.node.status()["lingering"] == 0, BACK_S)
        self.node.assert_sound()

    def line(self, request: str) -> dict[str, Any]:
        """What the gateway logged of a request when it was over."""
        found: list[str] = []

        def is_logged() -> bool:
            texts = self.log.read_text(errors="replace").splitlines()
            found[:] = [text for text in texts if f'"request":"{request}"' in text]
            return bool(found)

        eventually(is_logged, BACK_S)
        told: dict[str, Any] = json.loads(found[-1][found[-1].find("{") :])
        return told


def prompt_of(number: int, tokens: int) -> list[int]:
    """A prompt of its own."""
    dice = random.Random(number)
    return [dice.randrange(1000, 20_000) for _ in range(tokens)]


def ask(url: str, path: str, body: object = None, *, name: str = "") -> bytes:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"X-Request-Id": name} if name else {})
    asked = urllib.request.Request(url + path, data, headers)
    with urllib.request.urlopen(asked, timeout=REPLY_S) as answer:
        found: bytes = answer.read()
    return found


def sample(url: str, name: str) -> float:
    """The sum of a metric's values over its labels; 0 before there is one."""
    page = ask(url, "/metrics").decode()
    values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
    return sum(map(float, values))


def loaded(engine: VllmServer) -> float:
    """Tokens that an engine has loaded from the node."""
    return sample(engine.url, "kvist_tokens_loaded_total")


def body_of(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {
        "model": "smollm2",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        **more,
    }


def said(url: str, prompt: list[int], **more: Any) -> str:
    """The greedy text behind a prompt."""
    answer = json.loads(ask(url, "/v1/completions", body_of(prompt, **more)))
    text: str = answer["choices"][0]["text"]
    return text


def alone(pools: Pools, prompt: list[int], **more: Any) -> str:
    """What one engine computes all by itself: under a salt of its own nothing is found."""
    before = loaded(pools.decode)
    text = said(pools.decode.url, prompt, cache_salt=f"alone {len(prompt)} {prompt[0]}", **more)
    assert loaded(pools.decode) == before
    return text


def stream(
    url: str, prompt: list[int], *, name: str = "", **more: Any
) -> tuple[str, dict[str, Any] | None]:
    """Text and error of a streamed greedy answer; `name` is the request's id."""
    text, error = "", None
    body = body_of(prompt, stream=True, **more)
    try:
        events = ask(url, "/v1/completions", body, name=name).splitlines()
    except urllib.error.HTTPError as failed:  # nothing was sent before
        return "", json.load(failed)["error"]
    for line in events:
        data = line.removeprefix(b"data: ")
        if data and data != b"[DONE]":
            event = json.loads(data)
            error = event.get("error") or error
            text += "".join(choice["text"] for choice in event.get("choices", ()))
    return text, error


@pytest.fixture(scope="module")
def pools(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    folder = tmp_path_factory.mktemp("n")
    folder.chmod(0o700)
    with ExitStack() as stack:
        node = stack.enter_context(NodeProcess(folder / "n.sock", slots=DRAM_BYTES // PAGE_BYTES))
        prefill, decode = (stack.enter_context(_server(smollm2_folder, node)) for _ in range(2))
        for server in (prefill, decode):
            server.wait_ready(START_S)
        log = folder / "gateway.log"
        url = stack.enter_context(_gateway(prefill, decode, log))
        yield Pools(node, prefill, decode, url, log)


def _server(model: Path, node: NodeProcess) -> VllmServer:
    config = kvist(None)
    config["kv_connector_extra_config"]["store"]["where"] = "node"
    config["kv_connector_extra_config"]["node"] = {"socket": str(node.path), "answer_s": 30}
    port = free_port()
    command = [
        *("--model", str(model), "--served-model-name", "smollm2", "--dtype", "float32"),
        *("--max-model-len", "4096", "--max-num-batched-tokens", "256", "--enforce-eager"),
        *("--block-size", str(BLOCK), "--kv-transfer-config", json.dumps(config)),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]
    env = {**os.environ, **ENVIRONMENT}
    return VllmServer(command, env=env, host="127.0.0.1", port=port)


class _gateway:
    """`kvist gateway` before both; a context that gives its URL."""

    def __init__(self, prefill: VllmServer, decode: VllmServer, log: Path) -> None:
        command = [sys.executable, "-m", "kvist.cli.main", "gateway", decode.url]
        command += [f"--prefill={prefill.url}", "--listen=127.0.0.1:0"]
        command += ["--set=gateway.disaggregation.rule=always", "--set=router.policy=round-robin"]
        command += ["--set=gateway.timeouts.health_s=10"]
        with log.open("wb") as out:
            self._child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=out, text=True)

    def __enter__(self) -> str:
        assert self._child.stdout is not None
        return self._child.stdout.readline().split()[-1]

    def __exit__(self, *_: object) -> None:
        self._child.send_signal(signal.SIGTERM)
        assert self._child.wait(BACK_S) == 0
        assert self._child.stdout is not None
        self._child.stdout.close()


def test_answer_is_that_of_one_engine_and_its_prompt_came_from_the_other(pools: Pools) -> None:
    for number, tokens in enumerate((1, BLOCK, 5 * BLOCK, 700)):
        prompt = prompt_of(number, tokens)
        expected = alone(pools, prompt)
        pools.settled()
        before = loaded(pools.decode)
        name = f"split-{number}"
        assert stream(pools.url, prompt, name=name) == (expected, None)
        assert pools.line(name)["prefilled"] == ["ok"]
        # Of a prompt of whole blocks vLLM computes the last token itself.
        found = loaded(pools.decode) - before
        assert tokens // BLOCK * BLOCK - found in ((0, 1) if tokens % BLOCK == 0 else (0,))
    pools.settled()


def in_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """Begins a call; what is returned waits for its result."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()

    def result() -> Any:
        thread.join(REPLY_S)
        assert found, "the call did not end well"
        return found[0]

    return result


def test_prefill_engine_killed_midway_costs_no_token(pools: Pools) -> None:
    """It stays away: the test behind this one has the other engine alone."""
    prompt = prompt_of(10, LONG)
    expected = alone(pools, prompt)
    pools.settled()
    before = pools.node.store_stats()["dram_blocks"]
    answer = in_thread(lambda: stream(pools.url, prompt, name="killed"))
    eventually(lambda: pools.node.store_stats()["dram_blocks"] > before, BACK_S)
    os.killpg(pools.prefill.pid, signal.SIGKILL)
    assert pools.node.store_stats()["dram_blocks"] < before + LONG // BLOCK
    assert answer() == (expected, None)
    line = pools.line("killed")
    assert (line["prefilled"], line["broke"]) == (["lost"], [])
    assert line["splits"] == ["remote: always", "local: no-prefill"]
    pools.settled()
    prompt = prompt_of(11, 300)
    assert stream(pools.url, prompt) == (alone(pools, prompt), None)
    pools.settled()


def test_engine_that_answers_killed_while_it_loads_is_a_clean_error(pools: Pools) -> None:
    """The last test: there is no engine behind it."""
    prompt = prompt_of(20, LONG)
    more = {"max_tokens": 150}
    expected = stream(pools.url, prompt, **more)[0]
    pools.settled()
    ask(pools.decode.url, "/reset_prefix_cache", {})
    answer = in_thread(lambda: stream(pools.url, prompt, **more))
    until = time.monotonic() + 2.0  # a load that was too quick to be seen: it decodes by then
    while not pools.node.store_stats()["leases"] and time.monotonic() < until:
        pass
    os.killpg(pools.decode.pid, signal.SIGKILL)
    text, error = answer()
    assert error is not None
    assert error["code"] == "unavailable"
    assert expected.startswith(text)
    pools.settled()
