"""`kvist serve`: each fault is one line before anything heavy; the server never outlives us.

Most tests put a stand-in before vLLM on the path: it listens, logs and has a child of its own, as
vLLM does, and starts in a moment.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvist.cli.serve_checks import free_port
from kvist.cli.vllm_child import ServerFailed, VllmServer
from kvist.node.place import engine_endpoints
from kvist.tiers.ssd.lock import DirectoryLock

TIMEOUT_S = 60

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
}

STAND_IN = (Path(__file__).parent / "stand_in_vllm.py").read_text()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model to everything but an engine."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Small tiers in a folder of the test, and the stand-in in place of vLLM."""
    path = tmp_path / "path"
    package = path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text("")
    (package / "api_server.py").write_text(textwrap.dedent(STAND_IN))
    info = path / "vllm-0.32.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("KVIST_")}
    own_path = kept.get("PYTHONPATH")
    return {
        **kept,
        "PYTHONPATH": f"{path}:{own_path}" if own_path else str(path),
        "STAND_IN": str(tmp_path),
        "KVIST_STORE__SSD__PATH": str(tmp_path / "ssd"),
        "KVIST_STORE__SSD__CAPACITY": "64MiB",
        "KVIST_STORE__DRAM__CAPACITY": "16MiB",
    }


def _command(*args: str) -> list[str]:
    return [sys.executable, "-m", "kvist.cli.main", "serve", *args]


def _refused(env: dict[str, str], cwd: Path, *args: str) -> str:
    """The one line on stderr of a `serve` that must fail with 2 and start nothing."""
    done = subprocess.run(
        _command(*args), capture_output=True, text=True, timeout=TIMEOUT_S, env=env, cwd=cwd
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert not (Path(env["STAND_IN"]) / "seen.json").exists()
    assert done.stderr.startswith("kvist: error: ")
    return done.stderr.removeprefix("kvist: error: ").strip()


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["--set", "store.dram.capacty=1GiB"], "$.store.dram.capacty (--set): no such knob"),
        (["--set", "store.dram.capacity=lots"], "$.store.dram.capacity (--set): 'lots' is not"),
        (["--set", "store.dram.capacity=1MiB"], "$.store.dram.capacity (--set): 1MiB is below"),
        (["--set", "store.ssd.path=/proc/no"], "$.store.ssd.path (--set): cannot use /proc/no"),
        (["--config", "absent.yaml"], "--config: cannot read absent.yaml: No such file"),
        (["--block-size", "48"], "$.block_tokens: block_tokens=128 is not a multiple"),
        (["--block-size", "big"], "--block-size: 'big' is not a number"),
        (["--port", "99999"], "--port: 99999 is no port"),
        (["--port", "abc"], "argument --port: invalid int value: 'abc'"),
        (["--host", "192.0.2.1"], "--port: cannot listen on 192.0.2.1:"),
        (["--kv-transfer-config", "{}"], "--kv-transfer-config: is set by kvist serve"),
        (["another"], "another: there is one MODEL"),
    ],
)
def test_each_fault_is_one_line_with_its_path(
    model: Path, env: dict[str, str], tmp_path: Path, args: list[str], wanted: str
) -> None:
    if "--port" not in args:
        args = [*args, "--port", str(free_port())] if args[0] != "another" else args
    line = _refused(env, tmp_path, str(model), *args)
    assert line.startswith(wanted), line
    assert "; " in line or "(see " in line  # what to do about it


def test_a_model_that_is_none_is_one_line(model: Path, env: dict[str, str], tmp_path: Path) -> None:
    port = ["--port", str(free_port())]
    assert "no such folder; give" in _refused(env, tmp_path, "./nowhere", *port)
    assert "has no config.json; give" in _refused(env, tmp_path, str(tmp_path), *port)
    (model / "model.safetensors").unlink()
    assert "no weights" in _refused(env, tmp_path, str(model), *port)
    (model / "config.json").write_text("{")
    assert "cannot be read" in _refused(env, tmp_path, str(model), *port)


def test_a_model_that_kvist_cannot_share_is_one_line(
    model: Path, env: dict[str, str], tmp_path: Path
) -> None:
    (model / "config.json").write_text(json.dumps({**LLAMA, "mamba_d_state": 16}))
    line = _refused(env, tmp_path, str(model), "--port", str(free_port()))
    assert line.startswith(f"{model}: ")


def test_an_unsupported_vllm_is_one_line(model: Path, env: dict[str, str], tmp_path: Path) -> None:
    info = tmp_path / "path" / "vllm-0.32.0.dist-info" / "METADATA"
    info.write_text(info.read_text().replace("0.32.0", "0.9.1"))
    line = _refused(env, tmp_path, str(model), "--port", str(free_port()))
    assert line == "vllm: version 0.9.1 is not supported; pip install 'vllm==0.32.*'"


def test_a_port_in_use_is_one_line(model: Path, env: dict[str, str], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = _refused(env, tmp_path, str(model), "--port", port)
    assert line.startswith(f"--port: cannot listen on 127.0.0.1:{port}: Address already in use;")


def test_a_node_that_does_not_run_is_one_line(
    model: Path, env: dict[str, str], tmp_path: Path
) -> None:
    sets = ["--set", "store.where=node", "--set", f"node.socket={tmp_path / 'n.sock'}"]
    line = _refused(env, tmp_path, str(model), "--port", str(free_port()), *sets)
    assert line.startswith("$.store.where (--set): no node listens on")
    assert "kvist node" in line


def test_an_ssd_folder_in_use_is_one_line_that_names_the_process(
    model: Path, env: dict[str, str], tmp_path: Path
) -> None:
    lock = DirectoryLock(tmp_path / "ssd")
    try:
        line = _refused(env, tmp_path, str(model), "--port", str(free_port()))
    finally:
        lock.release()
    assert line.startswith("$.store.ssd.path (KVIST_STORE__SSD__PATH): ")
    assert f"is in use by process {os.getpid()}; stop that process" in line


def test_the_checks_import_no_engine(model: Path, env: dict[str, str], tmp_path: Path) -> None:
    code = (
        "import sys\nfrom kvist.cli.main import main\n"
        f"assert main(['serve', {str(model)!r}, '--set', 'store.ssd.path=/proc/no',"
        f" '--port', '{free_port()}']) == 2\n"
        "heavy = {'torch', 'vllm', 'transformers'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=TIMEOUT_S, env=env, cwd=tmp_path
    )


# -- with the stand-in running ------------------------------------------------------------------


class Running:
    """A `kvist serve` under way; stdout and stderr are collected."""

    def __init__(self, env: dict[str, str], cwd: Path, *args: str) -> None:
        self.state = Path(env["STAND_IN"])
        self.process = subprocess.Popen(
            _command(*args),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            cwd=cwd,
        )

    def seen(self) -> dict[str, object]:
        """What the stand-in wrote down, once it has."""
        found: dict[str, object] = {}

        def read() -> bool:
            if (self.state / "seen.json").exists():
                found.update(json.loads((self.state / "seen.json").read_text()))
            return bool(found)

        _until(read)
        return found

    def read_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, out, err


@pytest.fixture
def start(model: Path, env: dict[str, str], tmp_path: Path) -> Iterator[object]:
    """Starts `kvist serve MODEL --port FREE …`; kills at the end what a failed test left."""
    started: list[Running] = []

    def _start(*args: str) -> Running:
        running = Running(env, tmp_path, str(model), "--port", str(free_port()), *args)
        started.append(running)
        return running

    yield _start
    for running in started:
        running.process.kill()
        running.process.communicate(timeout=TIMEOUT_S)
        if (running.state / "seen.json").exists():
            for pid in json.loads((running.state / "seen.json").read_text())["pids"]:
                if _alive(pid):
                    os.kill(pid, signal.SIGKILL)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _until(true: object) -> None:
    give_up = time.monotonic() + TIMEOUT_S
    while not true():  # type: ignore[operator]
        assert time.monotonic() < give_up, "it did not happen"
        threading.Event().wait(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_by_the_user_is_0_and_leaves_no_process(start, number: signal.Signals) -> None:
    running = start()
    assert running.read_line().startswith("kvist: ready on http://127.0.0.1:")
    pids = running.seen()["pids"]
    assert all(_alive(pid) for pid in pids)
    running.process.send_signal(number)
    code, _, err = running.end()
    assert (code, err.splitlines()[-1]) == (0, "kvist: stopped")
    assert not any(_alive(pid) for pid in pids)  # the helper ignores SIGINT, and is gone


def test_ctrl_c_before_it_is_ready_leaves_no_process(start) -> None:
    running = start("--never")
    pids = running.seen()["pids"]
    running.process.send_signal(signal.SIGINT)
    code, out, _ = running.end()
    assert (code, out) == (0, "")
    assert not any(_alive(pid) for pid in pids)


def test_the_server_dies_with_a_kvist_that_was_killed(start) -> None:
    running = start()
    running.read_line()
    leader = running.seen()["pids"][0]
    running.process.kill()
    _until(lambda: not _alive(leader))


def test_the_ready_line_says_what_serves_and_where(start, model: Path, tmp_path: Path) -> None:
    running = start()
    line = running.read_line()
    url = line.split()[3]
    assert f"(model {model}, DRAM 16.0 MiB, SSD {tmp_path}/ssd 64.0 MiB)" in line
    assert urllib.request.urlopen(f"{url}/health", timeout=10).status == 200
    assert running.read_line() == f"  curl {url}/v1/models\n"
    running.process.send_signal(signal.SIGTERM)
    _, _, err = running.end()
    assert "chatter" not in err


def test_verbose_relays_what_the_server_says(start) -> None:
    running = start("--verbose")
    running.read_line()
    running.process.send_signal(signal.SIGTERM)
    assert "Loading safetensors checkpoint shards" in running.end()[2]


def test_a_server_that_fails_gives_its_last_lines_its_reason_and_its_status(start) -> None:
    code, out, err = start("--fail").end()
    assert (code, out) == (7, "")
    lines = err.splitlines()
    reason = "vLLM ended with status 7: the model hums; serve it without Kvist"
    assert lines[-1] == f"kvist: error: {reason}"
    assert "line 29" in lines
    assert "line 5" not in lines


def test_options_of_vllm_pass_unchanged_and_kvists_reach_the_connector(start) -> None:
    running = start(
        *("--dtype", "float32", "-O3", "--set", "block_tokens=256", "--hf-overrides={}"),
        *("--verbose", "--block-size", "64"),
    )
    seen = running.seen()
    running.read_line()
    running.process.send_signal(signal.SIGTERM)
    assert running.end()[0] == 0
    args = seen["args"]
    rest = ["--dtype", "float32", "-O3", "--hf-overrides={}", "--block-size", "64"]
    assert args[-len(rest) :] == rest
    transfer = json.loads(args[args.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector"] == "KvistConnector"
    assert transfer["kv_connector_extra_config"]["block_tokens"] == 256
    assert transfer["kv_connector_extra_config"]["store"]["ssd"]["capacity"] == 64 << 20
    assert [k for k in seen["env"] if k.startswith("KVIST_STORE")] == []
    events = json.loads(args[args.index("--kv-events-config") + 1])
    assert events["enable_kv_cache_events"] is True
    assert (events["endpoint"], events["replay_endpoint"]) == engine_endpoints(
        int(args[args.index("--port") + 1])
    )


def test_help_after_the_model_is_ours(model: Path, env: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        _command(str(model), "--help"),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=env,
        cwd=tmp_path,
    )
    assert done.returncode == 0
    assert "Example:\n  kvist serve" in done.stdout


def test_a_kept_server_outlives_its_context_and_logs_to_its_file(
    env: dict[str, str], tmp_path: Path
) -> None:
    port, log, lines = free_port(), tmp_path / "log", []
    with VllmServer(
        ["--port", str(port)],
        env=env,
        host="127.0.0.1",
        port=port,
        on_line=lines.append,
        log=log,
        tied=False,
    ) as server:
        server.wait_ready(TIMEOUT_S)
        server.keep()
    try:
        assert server.wait(0.5) is None
        _until(lambda: "Loading safetensors checkpoint shards" in lines)
        assert "Loading safetensors" in log.read_text()
    finally:
        server.stop()
    assert server.wait(0.0) is not None
    assert not any(_alive(pid) for pid in json.loads((tmp_path / "seen.json").read_text())["pids"])


def test_a_server_that_never_answers_is_given_up_and_stopped(
    env: dict[str, str], tmp_path: Path
) -> None:
    with (
        pytest.raises(ServerFailed, match="did not answer within 1 s"),
        VllmServer(["--never"], env=env, host="127.0.0.1", port=free_port()) as server,
    ):
        server.wait_ready(1.0)
    assert server.wait(0.0) is not None
