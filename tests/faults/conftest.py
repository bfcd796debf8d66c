"""Lets the tests of this folder import `disk_store`; no thread of a store outlives its test."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

if (folder := str(Path(__file__).parent)) not in sys.path:
    sys.path.insert(0, folder)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [
        t for t in threading.enumerate() if t not in before and not t.name.startswith("kvist-io")
    ]
    for thread in left:
        thread.join(20)
    assert [t.name for t in left if t.is_alive()] == []
