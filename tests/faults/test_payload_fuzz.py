"""Damaged payloads are refused or decoded within bounded memory: `make fuzz` tries for minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("payload_fuzz.py")
SECONDS = float(os.environ.get("KVIST_FUZZ_S", "4"))
SEED = int(os.environ.get("KVIST_FUZZ_SEED", "1"))


@pytest.mark.parametrize("native", ["auto", "off"])
def test_damaged_payloads_do_no_harm(native: str) -> None:
    pytest.importorskip("cryptography")
    done = subprocess.run(
        [sys.executable, PROGRAM, str(SECONDS), str(SEED)],
        env={**os.environ, "KVIST_NATIVE": native, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS + 120,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["refused"] > 20
    assert counts["decoded"] > 0
    assert counts["chains"] >= 20
