"""An engine without a model and a gateway before it, each a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from kvist.core.errors import KvistError

_END_S = 10.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_KIB = 1024


class BenchError(KvistError):
    """A process that is measured did not start, or ended."""


@dataclass(frozen=True, slots=True)
class Process:
    """One that listens on `port` of loopback."""

    port: int
    pid: int

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def rss_bytes(self) -> int:
        """Memory that is resident now."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * _KIB
        raise BenchError(f"process {self.pid} has ended")

    def cpu_s(self) -> float:
        """Seconds of a core that it has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


@contextmanager
def engine(*options: str, core: int | None = None) -> Iterator[Process]:
    """A stub engine, on one core if that is said."""
    with _started(["-m", "kvist.testing.stub_engine", *options], core, None) as process:
        yield process


@contextmanager
def storm(blocks_per_s: float, core: int) -> Iterator[Process]:
    """Somebody who publishes KV events as fast as many engines together."""
    options = [f"--blocks-per-s={blocks_per_s}"]
    with _started(["-m", "kvist.bench.gateway.storm", *options], core, None) as process:
        yield process


@contextmanager
def gateway(
    urls: Sequence[str], *options: str, core: int | None = None, log: Path | None = None
) -> Iterator[Process]:
    """A gateway in front of engines; `log` gets its lines of requests, else there are none."""
    command = ["-m", "kvist.cli.main", "gateway", *urls, "--listen=127.0.0.1:0", *options]
    with _started([*command, *(() if log else ("--quiet",))], core, log) as process:
        yield process


def cores() -> tuple[int, int]:
    """One core for the gateway, another for engine and clients; the same if there is one only."""
    able = sorted(os.sched_getaffinity(0))
    return able[0], able[-1]


@contextmanager
def _started(arguments: Sequence[str], core: int | None, log: Path | None) -> Iterator[Process]:
    """A Python process, which prints its port at the end of its first line."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVIST_")}
    with log.open("ab") if log else nullcontext() as stderr:
        child = subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=stderr, text=True, env=env
        )
    try:
        if core is not None:
            os.sched_setaffinity(child.pid, {core})
        assert child.stdout is not None
        line = child.stdout.readline().strip()
        if not line:
            raise BenchError(f"did not start: {' '.join(arguments)}")
        yield Process(int(line.replace(":", " ").split()[-1]), child.pid)
    finally:
        child.kill()
        child.wait(_END_S)
        if child.stdout is not None:
            child.stdout.close()
