"""One process that is started again when it ends, at growing intervals, and told apart by phase."""

from __future__ import annotations

import contextlib
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

from kvist.core.errors import ConfigError
from kvist.launch.pauses import Pauses

# exec keeps PR_SET_PDEATHSIG (1); SIGTERM is 15. The kernel ties to the thread that forks, so
# children are made on a main thread.
_TIED = "import ctypes,os,sys;ctypes.CDLL(None).prctl(1,15);os.execv(sys.executable,sys.argv[1:])"

_LOOK_S = 5.0
_SILENT_S = 60.0
_TAIL_BYTES = 4096
_ANSWER_S = 2.0


def tied(command: Sequence[str]) -> list[str]:
    """A command of this Python, `[sys.executable, …]`, that gets SIGTERM when its parent ends."""
    return [sys.executable, "-c", _TIED, *command]


class Phase(StrEnum):
    """How far a child is."""

    PENDING = "pending"
    """Not started: it waits for what it depends on, or for its pause to end."""
    STARTING = "starting"
    READY = "ready"
    STOPPED = "stopped"


class Child:
    """A process and its next one. Not thread-safe: made, ticked and stopped on the main thread."""

    def __init__(
        self,
        what: str,
        *,
        command: Callable[[], Sequence[str]],
        env: Mapping[str, str],
        log: Path,
        serves: Callable[[], bool],
        stops: Sequence[tuple[signal.Signals, float]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts nothing yet.

        Args:
            what: its name in reports.
            command: gives the command of each start, `[sys.executable, …]`, or raises
                `ConfigError`: it is then asked again later.
            env: the whole environment.
            log: file for its output.
            serves: whether it answers; must return within seconds.
            stops: signals that end it, and how many seconds each is given.
            clock: seconds.
        """
        self.what = what
        self.log = log
        self.phase = Phase.PENDING
        self.restarts = 0
        self._command = command
        self._env = dict(env)
        self._serves = serves
        self._stops = tuple(stops)
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._pauses = Pauses()
        self._start_at = clock()
        self._started_at = self._looked_at = self._answered_at = 0.0
        self._why = ""

    @property
    def pid(self) -> int:
        """The process's id; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    @property
    def detail(self) -> str:
        """Why it ended, or the last line that it said."""
        return self._why if self.phase is Phase.PENDING else last_line(self.log)

    def tick(self, *, may_start: bool = True) -> None:
        """Looks after the process: starts it, sees that it serves, sees that it ended."""
        now = self._clock()
        if self._process is None:
            if may_start and self.phase is Phase.PENDING and now >= self._start_at:
                self._start(now)
            return
        if (code := self._process.poll()) is not None:
            self._ended(now, code)
        elif self.phase is Phase.STARTING or now - self._looked_at >= _LOOK_S:
            self._look()

    def hurry(self) -> None:
        """Sends the first of the stop signals again; to a process that is there."""
        if self._process is not None and self._stops:
            self._signal(self._stops[0][0])

    def _start(self, now: float) -> None:
        try:
            command = tied(self._command())
        except ConfigError as error:
            self._again_later(now, 0.0, str(error))
            return
        with contextlib.suppress(FileNotFoundError):
            self.log.replace(self.log.with_suffix(".last.log"))
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.phase = Phase.STARTING
        self._started_at = now

    def _look(self) -> None:
        serves = self._serves()
        now = self._looked_at = self._clock()
        if serves:
            self.phase, self._answered_at = Phase.READY, now
        elif self.phase is Phase.READY and now - self._answered_at > _SILENT_S:
            self._signal(signal.SIGKILL)  # it hangs; the next tick sees its end

    def _ended(self, now: float, code: int) -> None:
        status = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._signal(signal.SIGKILL)  # what it may have left behind in its group
        said = last_line(self.log) or "it said nothing"
        self._again_later(now, now - self._started_at, f"ended with {status}: {said}")

    def _again_later(self, now: float, lived_s: float, why: str) -> None:
        self._why = why
        self._process, self.phase = None, Phase.PENDING
        self._start_at = now + self._pauses.after(lived_s)
        self.restarts += 1

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            if number is signal.SIGKILL:
                os.killpg(self._process.pid, number)
            elif self._process.poll() is None:
                os.kill(self._process.pid, number)


def stop_all(children: Sequence[Child]) -> None:
    """Ends several children at once, each by its own steps; returns when all are gone."""
    steps = max((len(child._stops) for child in children), default=0)
    for step in range(steps):
        alive = [c for c in children if c._process is not None and c._process.poll() is None]
        for child in alive:
            if step < len(child._stops):
                child._signal(child._stops[step][0])
        for child in alive:
            if step < len(child._stops):
                assert child._process is not None
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child._process.wait(child._stops[step][1])
    for child in children:
        if child._process is not None:
            child._signal(signal.SIGKILL)  # what is left of its group
        child._process, child.phase = None, Phase.STOPPED


def is_healthy(url: str) -> bool:
    """Whether a child says at `url` that it is well; it may name the address that it listens on."""
    url = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    try:
        with urllib.request.urlopen(url, timeout=_ANSWER_S, context=_any_certificate()) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError, urllib.error.URLError):
        return False


def _any_certificate() -> ssl.SSLContext:
    """It is our own child that is asked, by an address that its certificate need not have."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def last_line(log: Path) -> str:
    """The last line of a log that says something; empty without one."""
    try:
        with log.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - _TAIL_BYTES))
            lines = stream.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip() if lines else ""
