"""KVIST_NATIVE chooses the implementation once, at import."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = "import kvist.native as n; print(n.IMPLEMENTATION, n.digest.__module__)"
BROKEN = "import sys; sys.modules['kvist.native._core'] = None; " + PROGRAM


def run(program: str, wish: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "KVIST_NATIVE": wish},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_off_takes_the_twin() -> None:
    assert run(PROGRAM, "off").stdout.split() == ["python", "kvist.native.twin"]


@pytest.mark.skipif(os.environ.get("KVIST_NATIVE") == "off", reason="built without _core")
@pytest.mark.parametrize("wish", ["auto", "on"])
def test_auto_and_on_take_what_is_built(wish: str) -> None:
    assert run(PROGRAM, wish).stdout.split() == ["native", "kvist.native._core"]


def test_auto_without_core_takes_the_twin_and_on_fails() -> None:
    assert run(BROKEN, "auto").stdout.split() == ["python", "kvist.native.twin"]
    assert "ImportError" in run(BROKEN, "on").stderr or "ModuleNotFound" in run(BROKEN, "on").stderr


def test_an_unknown_wish_is_refused() -> None:
    assert "KVIST_NATIVE is 'yes'" in run(PROGRAM, "yes").stderr
