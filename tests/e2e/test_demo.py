"""`kvist demo` from end to end, on real engines and the real model."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvist.core.errors import ConfigError

pytestmark = pytest.mark.engines
# Only a bound on a test that hangs: a busy machine is ten times slower than a quiet one.
TIMEOUT_S = 1500


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The demo's own folder is the test's; the model is the one in the user's cache."""
    from kvist.bench.smollm2 import cache_folder, ensure_smollm2

    try:
        ensure_smollm2("float32")
    except ConfigError as e:
        pytest.skip(f"no demo model: {e}")
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "models").symlink_to(cache_folder())
    kept = {k: v for k, v in os.environ.items() if not k.startswith("KVIST_")}
    return {**kept, "KVIST_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}


def _command(*args: str) -> list[str]:
    return [sys.executable, "-m", "kvist.cli.main", "demo", *args]


def _demo(env: dict[str, str], cwd: Path, *args: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        _command("--json", *args),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=env,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    assert all(row["identical"] for row in rows)
    assert all(row["prompt_tokens"] > 4096 for row in rows)
    return rows


def _tiers(row: dict[str, Any]) -> set[str]:
    return {tier for tier, tokens in row["tokens_by_tier"].items() if tokens}


def _came_back(row: dict[str, Any]) -> bool:
    """Whether most of a prompt came from files, some of them restored to DRAM at the start."""
    tiers = _tiers(row)
    return "computed" in tiers and bool(tiers & {"dram", "ssd"}) and "hbm" not in tiers


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_transformers_alone_reuses_dram_and_then_ssd(env: dict[str, str], tmp_path: Path) -> None:
    cold, repeat, restart = _demo(env, tmp_path, "--engine", "transformers")
    assert [r["case"] for r in (cold, repeat, restart)] == ["cold", "repeat", "restart"]
    assert _tiers(cold) == {"computed"}
    assert _tiers(repeat) == {"dram", "computed"}
    assert _came_back(restart)
    assert restart["tokens_by_tier"]["computed"] < 128  # less than a block


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_vllm_is_served_after_a_restart_and_transformers_reads_its_blocks(
    env: dict[str, str], tmp_path: Path
) -> None:
    if not importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is not installed")
    rows = {r["case"]: r for r in _demo(env, tmp_path, "--engine", "vllm")}
    assert list(rows) == ["cold", "repeat", "restart", "transformers"]
    assert _tiers(rows["cold"]) == {"computed"}
    assert "hbm" in _tiers(rows["repeat"])
    for case in ("restart", "transformers"):
        assert _came_back(rows[case])
        assert rows[case]["tokens_by_tier"]["computed"] < 128


def test_ctrl_c_leaves_no_process(env: dict[str, str], tmp_path: Path) -> None:
    package = tmp_path / "path" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text("")
    (package / "api_server.py").write_text(
        "import os, pathlib, time\n"
        "path = pathlib.Path(os.environ['STAND_IN'])\n"
        "path.with_suffix('.tmp').write_text(str(os.getpid()))\n"
        "path.with_suffix('.tmp').rename(path)\n"
        "time.sleep(600)\n"
    )
    info = tmp_path / "path" / "vllm-0.32.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    own_path = os.environ.get("PYTHONPATH")
    path = str(tmp_path / "path")
    seen = tmp_path / "pid"
    env |= {"STAND_IN": str(seen), "PYTHONPATH": f"{path}:{own_path}" if own_path else path}
    process = subprocess.Popen(
        _command("--engine", "vllm"), stderr=subprocess.PIPE, text=True, env=env, cwd=tmp_path
    )
    try:
        give_up = time.monotonic() + 100
        while not seen.exists():
            assert time.monotonic() < give_up
            threading.Event().wait(0.05)
        pid = int(seen.read_text())
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "kvist: stopped"
    assert not Path(f"/proc/{pid}").exists()


def test_keep_without_a_server_is_one_line(env: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        _command("--engine", "transformers", "--keep"),
        capture_output=True,
        text=True,
        timeout=60,
        env=env,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvist: error: --keep: there is no server to keep;")
