"""Which GPUs engines on this host may have."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvist.core.errors import ConfigError

_DRIVER = Path("/proc/driver/nvidia/gpus")
_PARALLEL = (
    ("--tensor-parallel-size", "-tp"),
    ("--pipeline-parallel-size", "-pp"),
    ("--data-parallel-size", "-dp"),
)


def gpu_ids(env: Mapping[str, str], driver: Path = _DRIVER) -> tuple[str, ...]:
    """Those that `CUDA_VISIBLE_DEVICES` names, else all that NVIDIA's driver shows."""
    named = env.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return tuple(name.strip() for name in named.split(",") if name.strip())
    return tuple(str(n) for n in range(len(os.listdir(driver)))) if driver.is_dir() else ()


def gpus_an_engine(vllm_args: Sequence[str]) -> int:
    """GPUs that one engine takes with these arguments of vLLM.

    Raises:
        ConfigError: a size is no number above 0.
    """
    product = 1
    for names in _PARALLEL:
        text = _last(vllm_args, names)
        if text is None:
            continue
        if not text.isdigit() or not int(text):
            raise ConfigError(
                f"{text!r} is no number of GPUs", path=names[0], remedy="give 1 or more"
            )
        product *= int(text)
    return product


def _last(args: Sequence[str], names: Sequence[str]) -> str | None:
    found = None
    for i, arg in enumerate(args):
        option, equals, value = arg.partition("=")
        option = option.replace("_", "-") if option.startswith("--") else option
        if option in names:
            found = value if equals else (args[i + 1] if i + 1 < len(args) else "")
    return found
