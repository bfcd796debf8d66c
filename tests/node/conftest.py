"""Lets the tests of this folder import `node_process`; a node that a test starts does not stay."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if (folder := str(Path(__file__).parent)) not in sys.path:
    sys.path.insert(0, folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for a socket: short enough for an address, closed to others."""
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def node(folder: Path) -> Iterator[object]:
    """A real node in a process of its own, with eight slots and nothing below."""
    from node_process import NodeProcess

    with NodeProcess(folder / "n.sock") as process:
        yield process
        process.assert_sound()
