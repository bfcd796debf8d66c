"""The parent's end of an engine process: start it, ask it, end it with everything it started."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

_SCRIPT = Path(__file__).with_name("engine_process.py")
_START_S = 400.0
_ANSWER_S = 300.0
_STOP_S = 40.0
_TERM_S = 5.0
_KILLED_S = 5.0
_POLL_S = 0.05
_LOOK_S = 0.5


class EngineError(RuntimeError):
    """An engine process ended or did not answer; the message ends with what it said last."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one call of the engine gave: wall time, and for each prompt tokens cached and made."""

    took_s: float
    cached_tokens: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]


class Engine:
    """One engine process and its group. `start` returns at once; `wait_ready` waits."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self._process, self._log = process, log
        self._unread = b""

    @classmethod
    def start(
        cls,
        name: str,
        settings: Mapping[str, Any],
        *,
        folder: Path,
        env: Mapping[str, str],
        python: Path | None = None,
        script: Path = _SCRIPT,
    ) -> Self:
        """Starts the process; `folder` is its working directory and gets its log.

        Args:
            name: of the log.
            settings: arguments of vLLM's `LLM`.
            folder: exists.
            env: the whole environment.
            python: interpreter, ours by default.
            script: the program, which speaks as `engine_process` does.
        """
        log = folder / f"{name}.log"
        # -P: the folder of the script must not shadow modules. A session of its own: Ctrl-C in the
        # terminal reaches only us, and one signal ends the engine with its own children.
        command = [str(python or sys.executable), "-P", str(script), json.dumps(settings)]
        with log.open("ab") as stderr:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=folder,
                env=dict(env),
                start_new_session=True,
            )
        return cls(name, process, log)

    def wait_ready(self) -> float:
        """Waits for the engine; returns the seconds that it took to start.

        Raises:
            EngineError: it did not start.
        """
        return float(self._reply(_START_S)["start_s"])

    def ask(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> Answer:
        """Runs `prompts` as one batch, greedily, to exactly `max_tokens` tokens each.

        Raises:
            EngineError: no answer.
        """
        reply = self._call(op="ask", prompts=[list(p) for p in prompts], max_tokens=max_tokens)
        tokens = tuple(tuple(t) for t in reply["tokens"])
        return Answer(float(reply["took_s"]), tuple(reply["cached_tokens"]), tokens)

    def forget(self) -> None:
        """Empties the engine's own prefix cache, not what a connector keeps.

        Raises:
            EngineError: its pages stay in use.
        """
        if not self._call(op="forget")["done"]:
            raise EngineError(f"{self.name}: the prefix cache cannot be emptied")

    def rest(self, rest_s: float) -> None:
        """Waits while background work of the engine goes on.

        Raises:
            EngineError: the engine ended.
        """
        self._call(op="rest", rest_s=rest_s)

    def metric(self, name: str) -> float | None:
        """A series of the engine's metrics page, of those without labels of their own.

        Raises:
            EngineError: no answer.
        """
        value = self._call(op="metric", name=name)["value"]
        return None if value is None else float(value)

    def stop(self) -> None:
        """Asks the engine to shut down, waits, and ends whatever is left. Never raises for it."""
        try:
            with contextlib.suppress(EngineError):  # it has ended, or is ended now
                self._send({"op": "stop"})
                self._reply(_STOP_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends the process and all that it started, in a few seconds at most. Idempotent."""
        # On SIGTERM Python's resource tracker lives on until it has removed the group's shared
        # memory; SIGKILL alone would leave that behind.
        for number, wait_s in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _KILLED_S)):
            if not self._signal(number):
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)
            self._wait_for_group(wait_s)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._process.wait(_KILLED_S)

    def _signal(self, number: int) -> bool:
        """Sends a signal to the group; false if nobody is left in it."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def _wait_for_group(self, timeout_s: float) -> None:
        give_up = time.monotonic() + timeout_s
        while self._signal(0) and time.monotonic() < give_up:
            threading.Event().wait(_POLL_S)

    def _call(self, **request: Any) -> dict[str, Any]:
        self._send(request)
        return self._reply(_ANSWER_S)

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as e:
            raise self._error("has ended") from e

    def _reply(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        give_up = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            # Children of an engine that died may keep its pipe open: look at the process as well.
            ended = self._process.poll() is not None
            wait_s = 0.0 if ended else min(_LOOK_S, max(0.0, give_up - time.monotonic()))
            if not select.select([fd], [], [], wait_s)[0]:
                if ended:
                    raise self._error("has ended")
                if time.monotonic() >= give_up:
                    raise self._error(f"did not answer within {timeout_s:.0f} s")
                continue
            piece = os.read(fd, 1 << 16)
            if not piece:
                raise self._error("has ended")
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _error(self, what: str) -> EngineError:
        return EngineError(f"{self.name} {what}: {last_words(self._log)}")


def last_words(log: Path) -> str:
    """The last line of a log that says something, shortened."""
    try:
        lines = [t for t in log.read_text(errors="replace").splitlines() if t.strip()]
    except OSError:
        return "no log"
    errors = [t for t in lines if "Error" in t]
    return (errors or lines or ["it said nothing"])[-1].strip()[-300:]
