"""`kvist serve` with several engines: a real node, a real gateway, and stub engines as vLLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvist.cli.serve_checks import free_port

TIMEOUT_S = 90.0
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}
STUB = """
import os, runpy, sys
if "--broken" in sys.argv:
    sys.exit("RuntimeError: no such option")
sys.argv = ["stub", "--port=" + sys.argv[sys.argv.index("--port") + 1]]
runpy.run_module("kvist.testing.stub_engine", run_name="__main__")
"""
ASKED = {"model": "stub", "prompt": "one of many", "max_tokens": 8, "temperature": 0}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model to everything but an engine."""
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Small tiers, a runtime folder of the test, and stub engines in place of vLLM."""
    package = tmp_path / "path" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text("")
    (package / "api_server.py").write_text(STUB)
    info = tmp_path / "path" / "vllm-0.32.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    runtime = tmp_path / "r"
    runtime.mkdir(mode=0o700)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("KVIST_") or "NATIVE" in k}
    paths = [str(tmp_path / "path"), kept.get("PYTHONPATH", "")]
    return {
        **kept,
        "PYTHONPATH": ":".join(path for path in paths if path),
        "XDG_RUNTIME_DIR": str(runtime),
        "KVIST_STORE__SSD__PATH": str(tmp_path / "ssd"),
        "KVIST_STORE__SSD__CAPACITY": "64MiB",
        "KVIST_STORE__DRAM__CAPACITY": "16MiB",
    }


def command(model: Path, *args: str) -> list[str]:
    port = ["--port", str(free_port())]
    return [sys.executable, "-m", "kvist.cli.main", "serve", str(model), *port, *args]


class Fleet:
    """A `kvist serve` under way."""

    def __init__(self, model: Path, env: dict[str, str], *args: str) -> None:
        self.env = env
        self.process = subprocess.Popen(
            command(model, "--json", *args),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            cwd=model.parent,
            start_new_session=True,
        )

    def ready(self) -> dict[str, Any]:
        """What the ready line says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=TIMEOUT_S)[1]
        told: dict[str, Any] = json.loads(line)
        return told

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, out, err

    def processes(self, *words: str) -> list[int]:
        """Ids of the processes below it whose command has all these words."""
        return [pid for pid, line in _commands(self.env) if all(word in line for word in words)]


def _commands(env: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Processes that have the runtime folder of this test in their environment."""
    mark = f"XDG_RUNTIME_DIR={env['XDG_RUNTIME_DIR']}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                yield (
                    int(entry.name),
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(),
                )
        except OSError:
            continue


@pytest.fixture
def fleet(model: Path, env: dict[str, str]) -> Iterator[Callable[..., Fleet]]:
    """Starts `kvist serve`; kills at the end what a failed test left."""
    started: list[Fleet] = []

    def start(*args: str) -> Fleet:
        started.append(Fleet(model, env, *args))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate(timeout=TIMEOUT_S)
    for pid, _ in list(_commands(env)):
        os.kill(pid, signal.SIGKILL)


def eventually(holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < give_up, "it did not come about"
        time.sleep(0.05)


def ask(url: str, path: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:
        return json.load(answer)


def figure(url: str, name: str) -> float:
    """A value of `/metrics`."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT_S) as page:
        lines = page.read().decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))


def test_engines_node_and_gateway_start_together_and_end_together(
    fleet: Callable[..., Fleet], env: dict[str, str]
) -> None:
    running = fleet(
        "--replicas", "2", "--set", f"gateway.peers.listen=tcp://127.0.0.1:{free_port()}"
    )
    told = running.ready()
    assert (told["state"], told["prefill"], len(told["replicas"])) == ("ready", [], 2)
    assert ask(told["url"], "/v1/completions", ASKED)["usage"]["completion_tokens"] == 8

    def shown() -> dict[str, tuple[str, bool]]:
        replicas = ask(told["url"], "/replicas")["replicas"]
        return {r["url"]: (r["role"], r["healthy"]) for r in replicas}

    eventually(lambda: shown() == dict.fromkeys(told["replicas"], ("both", True)))
    assert Path(told["socket"]).is_socket()
    # the node tells the gateway what it holds
    eventually(lambda: figure(told["url"], "kvist_event_batches_total") > 0)
    running.process.send_signal(signal.SIGINT)
    code, out, err = running.end()
    assert (code, err.splitlines()[-1]) == (0, "kvist: stopped")
    assert json.loads(out) == {"state": "stopped"}
    eventually(lambda: not list(_commands(env)))
    assert not Path(told["socket"]).exists()  # the node drained; a killed one leaves it


def test_pools_are_what_the_gateway_takes_them_for_and_what_dies_comes_back(
    fleet: Callable[..., Fleet],
) -> None:
    running = fleet("--prefill", "1", "--decode", "1", "--set", "gateway.timeouts.health_s=0.5")
    told = running.ready()
    roles = {told["prefill"][0]: "prefill", told["replicas"][0]: "decode"}

    def up() -> dict[str, str]:
        shown = ask(told["url"], "/replicas")["replicas"]
        return {r["url"]: r["role"] for r in shown if r["healthy"]}

    eventually(lambda: up() == roles)
    port = told["replicas"][0].rpartition(":")[2]
    (server,) = running.processes("api_server", f"--port {port}")
    os.kill(server, signal.SIGKILL)
    eventually(lambda: running.processes("api_server", f"--port {port}") not in ([], [server]))
    eventually(lambda: up() == roles)
    (gateway,) = running.processes("main gateway")
    os.kill(gateway, signal.SIGKILL)
    eventually(lambda: running.processes("main gateway") not in ([], [gateway]))

    def serves() -> bool:
        try:
            return up() == roles
        except OSError:
            return False

    eventually(serves)
    assert ask(told["url"], "/v1/completions", ASKED)["usage"]["completion_tokens"] == 8


def test_a_fleet_dies_with_a_kvist_that_was_killed(
    fleet: Callable[..., Fleet], env: dict[str, str]
) -> None:
    running = fleet("--replicas", "1")
    running.ready()
    running.process.kill()
    eventually(lambda: not list(_commands(env)))


def test_engines_that_never_start_end_it_with_their_reason(fleet: Callable[..., Fleet]) -> None:
    code, out, err = fleet("--replicas", "1", "--broken").end()
    assert (code, out) == (1, "")
    assert "does not start: " in err.splitlines()[-1]
    assert "no such option" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        pytest.param("--prefill 1", "--prefill: is one pool of two; give --prefill P", id="one"),
        pytest.param("--decode 1", "--decode: is one pool of two", id="other"),
        pytest.param("--replicas 2 --prefill 1 --decode 1", "--replicas: is not", id="both"),
        pytest.param("--replicas 0", "--replicas: 0 engines cannot be", id="none"),
        pytest.param("--replicas two", "argument --replicas: invalid int value", id="word"),
        pytest.param("--replicas 2 --host 0.0.0.0", "$.gateway.listen: 0.0.0.0 is not", id="open"),
        pytest.param("--replicas 2 -tp none", "--tensor-parallel-size: 'none' is no", id="size"),
        pytest.param("--replicas 2 --set store.ssd.path=/proc/no", "$.store.ssd.path", id="ssd"),
    ],
)
def test_each_fault_is_one_line(model: Path, env: dict[str, str], args: str, wanted: str) -> None:
    done = subprocess.run(
        command(model, *args.split()),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=env,
        cwd=model.parent,
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"kvist: error: {wanted}"), done.stderr
