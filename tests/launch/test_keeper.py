"""What keeps a host's process running on a Ray node, without Ray: a real child and its pipes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
import pytest

from kvist.launch import pauses
from kvist.launch.spec import HostOrders, HostReport

ray = pytest.importorskip("ray", reason="ray is not installed")

DEADLINE_S = 60.0
_CHILD = """#!/bin/sh
echo start >> {starts}
if [ $(wc -l < {starts}) -lt 4 ]; then exec 0<&-; exit 1; fi
echo '{{"node": "n", "machine": "m", "socket": "s"}}'
exec cat > /dev/null
"""


def test_a_host_process_that_takes_no_orders_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It died before it read its orders; the broken pipe ended the thread that starts the next."""
    from kvist.launch.ray_actors import Keeper

    starts, child = tmp_path / "starts", tmp_path / "child"
    child.write_text(_CHILD.format(starts=starts))
    child.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(child))
    monkeypatch.setattr(ray, "get_gpu_ids", list)
    monkeypatch.setattr(pauses, "_FIRST_S", 0.01)
    more_than_a_pipe_holds = {"text": "x" * (1 << 20)}
    orders = HostOrders("t", "n", "", more_than_a_pipe_holds, ())
    keeper = Keeper(msgspec.json.encode(orders))
    give_up = time.monotonic() + DEADLINE_S
    while msgspec.json.decode(keeper.report(), type=HostReport).machine != "m":
        assert time.monotonic() < give_up
        time.sleep(0.02)
    keeper.stop()
    assert starts.read_text().count("start") == 4
