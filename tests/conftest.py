"""Settings for every test: Hypothesis profiles, and GPU tests only where there is a GPU."""

from __future__ import annotations

import importlib.util
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

# No test depends on speed; a failing example is printed so that it can be pasted.
_SLOW_IS_FINE = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("kvist", **_SLOW_IS_FINE)
settings.register_profile("soak", max_examples=5000, **_SLOW_IS_FINE)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "kvist"))


def pytest_configure() -> None:
    """What a shell starts in the background ignores Ctrl-C, and so would all that tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` where there is none; refuses a name that no second process has.

    The workers of one run compare the names they collected. A parameter that pytest can only name
    by its address (a dict with a function in it) has another name in each of them.
    """
    nameless = next((item.nodeid for item in items if " at 0x" in item.nodeid), None)
    if nameless is not None:
        raise pytest.UsageError(f"{nameless}: named by an address; give the parameter an id")
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or _has_gpu():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="no GPU here"))


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
