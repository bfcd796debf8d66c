"""Lets the tests of this folder import their doubles; without torch there is nothing to repair."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if (folder := str(Path(__file__).parent)) not in sys.path:
    sys.path.insert(0, folder)

_NEEDS_TORCH = ["test_attention.py", "test_relocate.py", "test_repair.py"]
collect_ignore = [] if importlib.util.find_spec("torch") else _NEEDS_TORCH
