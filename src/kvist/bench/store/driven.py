"""Peers that need an environment of their own: a driver there obeys lines, one at a time.

The driver is told `write N`, `read N` or `quit` on its standard input and answers each of the first
two, and its start, with one line of JSON: `{"took_s": 1.5}`, `{"took_s": null}` for what the peer
has not, or `{"error": "why"}`.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvist.bench.environments import SETUP_SCRIPT, peer_python
from kvist.bench.store.contender import Blocks, ContenderError
from kvist.bench.store.samples import LMCACHE, MOONCAKE

_DRIVERS = Path(__file__).with_name("drivers")
_START_S = 120.0
_ANSWER_S = 120.0
_STOP_S = 15.0
_MAX_LINE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a peer's driver runs."""

    name: str
    python: Path
    script: Path


def find_peer(name: str) -> Peer:
    """A peer whose environment is there.

    Raises:
        ContenderError: it is not.
    """
    python = peer_python(name)
    if python is None:
        raise ContenderError(f"no environment; {SETUP_SCRIPT} makes it")
    return Peer(name, python, _DRIVERS / f"{name}_driver.py")


class Driven:
    """A peer behind its driver."""

    def __init__(self, peer: Peer, blocks: Blocks, folder: Path, *, medium: str) -> None:
        """Starts the driver. `medium` is `dram` or `disk`.

        Raises:
            ContenderError: the peer cannot be had.
        """
        self._peer, self._blocks = peer, blocks
        self._folder = folder / f"{peer.name}-{medium}"
        self._folder.mkdir()
        settings = {
            "blocks": str(blocks.path),
            "count": blocks.count,
            "block_bytes": blocks.block_bytes,
            "folder": str(self._folder),
            "medium": medium,
        }
        self._log = (self._folder / "log").open("wb")
        self._process = subprocess.Popen(
            [str(peer.python), str(peer.script), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=self._folder,
            env=_environment(),
            start_new_session=True,
        )
        self._unread = b""
        try:
            self._answer(_START_S)
        except ContenderError:
            self.close()
            raise

    def write(self, round_number: int) -> float:
        """See `Contender`."""
        took_s = self._ask(f"write {round_number}")
        if took_s is None:
            raise ContenderError(f"{self._peer.name} writes nothing there")
        return took_s

    def read(self, round_number: int) -> float | None:
        """See `Contender`; the driver compares what came back."""
        return self._ask(f"read {round_number}")

    def _ask(self, line: str) -> float | None:
        self._say(line)
        return self._answer(_ANSWER_S)

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None, "it was opened as a pipe"
        try:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        except OSError as error:
            raise ContenderError(f"{self._peer.name} has ended: {self._last_words()}") from error

    def _answer(self, timeout_s: float) -> float | None:
        assert self._process.stdout is not None, "it was opened as a pipe"
        give_up = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            left_s = give_up - time.monotonic()
            readable, _, _ = select.select([self._process.stdout], [], [], max(0.0, left_s))
            if not readable:
                raise ContenderError(f"{self._peer.name} did not answer in {timeout_s:.0f} s")
            more = os.read(self._process.stdout.fileno(), _MAX_LINE_BYTES)
            if not more:
                raise ContenderError(f"{self._peer.name} has ended: {self._last_words()}")
            self._unread += more
        line, self._unread = self._unread.split(b"\n", 1)
        answer = json.loads(line)
        if "error" in answer:
            raise ContenderError(str(answer["error"]))
        return None if answer["took_s"] is None else float(answer["took_s"])

    def _last_words(self) -> str:
        lines = (self._folder / "log").read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "without a word"

    def close(self) -> None:
        """Ends the driver and all that it started."""
        if self._process.poll() is None:
            try:
                self._say("quit")
                self._process.wait(_STOP_S)
            except (ContenderError, subprocess.TimeoutExpired):
                pass
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(_STOP_S)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _environment() -> Mapping[str, str]:
    """No peer may call home or look for a hub."""
    quiet = {
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
        "LMCACHE_LOG_LEVEL": "ERROR",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "MC_TCP_BIND_ADDRESS": "127.0.0.1",
        "GLOG_minloglevel": "2",
        "MC_LOG_LEVEL": "ERROR",
    }
    return dict(os.environ) | quiet


NAMES = (LMCACHE, MOONCAKE)
