"""Lets the tests of this folder import their doubles (pytest runs with `importmode=importlib`)."""

from __future__ import annotations

import sys
from pathlib import Path

if (folder := str(Path(__file__).parent)) not in sys.path:
    sys.path.insert(0, folder)
