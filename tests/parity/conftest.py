"""Both implementations of the hot paths, as one parametrised fixture."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest

# A missing `_core` fails; only KVIST_NATIVE=off may leave it out.
NAMES = ["twin"] if os.environ.get("KVIST_NATIVE") == "off" else ["twin", "_core"]


@pytest.fixture(scope="session", params=NAMES)
def native(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(f"kvist.native.{request.param}")
