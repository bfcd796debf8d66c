"""Both implementations of the hot paths, as one parametrised fixture."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for what the tests share

# A missing `_core` fails; only KVIST_NATIVE=off may leave it out.
NAMES = ["twin"] if os.environ.get("KVIST_NATIVE") == "off" else ["twin", "_core"]


@pytest.fixture(scope="session", params=NAMES)
def native(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(f"kvist.native.{request.param}")
