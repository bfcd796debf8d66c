"""A child process: started again at growing intervals, killed where it hangs, ended in order.

The processes are real; the clock that pauses are measured by is the test's own.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvist.core.errors import ConfigError
from kvist.launch.child import Child, Phase, last_line, stop_all

DEADLINE_S = 30.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """Makes children of small Python programs and sees that none is left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = Clock()
        self.made: list[Child] = []

    def child(
        self,
        program: str,
        *,
        serves: Callable[[], bool] = lambda: True,
        stops: Sequence[tuple[signal.Signals, float]] = ((signal.SIGTERM, DEADLINE_S),),
    ) -> Child:
        made = Child(
            "child",
            command=lambda: [sys.executable, "-c", textwrap.dedent(program)],
            env=os.environ,
            log=self.folder / f"{len(self.made)}.log",
            serves=serves,
            stops=stops,
            clock=self.clock,
        )
        self.made.append(made)
        return made


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    stop_all(bench.made)


def _until(child: Child, holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < give_up, (child.phase, child.detail)
        child.tick()
        time.sleep(0.01)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_what_ends_is_started_again_at_growing_intervals(bench: Bench) -> None:
    child = bench.child("import sys; sys.exit('no luck')", serves=lambda: False)
    pauses = []
    for life in range(1, 8):
        _until(child, lambda life=life: child.restarts == life)  # type: ignore[misc]
        assert child.phase is Phase.PENDING
        assert child.detail == "ended with exit code 1: no luck"
        began = bench.clock.now
        while child.pid == 0:
            bench.clock.now += 0.5
            child.tick()
        pauses.append(bench.clock.now - began)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_a_good_life_ends_the_growth(bench: Bench) -> None:
    child = bench.child("import time; time.sleep(600)")
    for _ in range(3):
        _until(child, lambda: child.phase is Phase.READY)
        os.kill(child.pid, signal.SIGKILL)
        _until(child, lambda: child.phase is Phase.PENDING)
        bench.clock.now += 60.0
    _until(child, lambda: child.phase is Phase.READY)
    bench.clock.now += 61.0
    os.kill(child.pid, signal.SIGKILL)
    _until(child, lambda: child.phase is Phase.PENDING)
    assert child.detail.startswith("ended with signal SIGKILL")
    bench.clock.now += 1.0
    child.tick()
    assert child.phase is Phase.STARTING


def test_what_hangs_is_killed_and_started_again(bench: Bench) -> None:
    answers = [True]
    child = bench.child("import time; time.sleep(600)", serves=lambda: answers[0])
    _until(child, lambda: child.phase is Phase.READY)
    first, answers[0] = child.pid, False
    for _ in range(9):  # silent for 54 s: it may be busy
        bench.clock.now += 6.0
        child.tick()
        assert child.pid == first
    bench.clock.now += 12.0
    _until(child, lambda: child.restarts == 1)
    assert not _alive(first)


def test_a_slow_start_is_waited_for(bench: Bench) -> None:
    child = bench.child("import time; time.sleep(600)", serves=lambda: False)
    child.tick()
    for _ in range(100):
        bench.clock.now += 10.0
        child.tick()
    assert child.phase is Phase.STARTING
    assert child.restarts == 0


def test_a_child_waits_for_what_it_depends_on(bench: Bench) -> None:
    child = bench.child("import time; time.sleep(600)")
    child.tick(may_start=False)
    assert child.phase is Phase.PENDING
    child.tick()
    assert child.pid


def test_the_end_escalates_and_takes_the_whole_group(bench: Bench) -> None:
    stubborn = """
        import os, signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(child.pid, flush=True)
        time.sleep(600)
    """
    child = bench.child(stubborn, stops=((signal.SIGTERM, 0.2), (signal.SIGKILL, DEADLINE_S)))
    _until(child, lambda: last_line(child.log).isdigit())
    pids = [child.pid, int(last_line(child.log))]
    stop_all([child])
    assert child.phase is Phase.STOPPED
    _until(child, lambda: not any(map(_alive, pids)))
    assert child.phase is Phase.STOPPED  # and a tick starts nothing again


def test_children_of_a_parent_that_was_killed_get_sigterm(bench: Bench, tmp_path: Path) -> None:
    marker = tmp_path / "told"
    program = f"""
        import subprocess, sys, time
        from kvist.launch.child import tied
        inner = (
            "import signal, sys, time\\n"
            "def told(*_):\\n"
            "    open({str(marker)!r}, 'w').close()\\n"
            "    sys.exit()\\n"
            "signal.signal(signal.SIGTERM, told)\\n"
            "print('up', flush=True)\\n"
            "time.sleep(600)\\n"
        )
        subprocess.Popen(tied([sys.executable, "-c", inner]))
        time.sleep(600)
    """
    child = bench.child(program)
    _until(child, lambda: last_line(child.log) == "up")
    os.kill(child.pid, signal.SIGKILL)  # not its group: only the tie is left
    give_up = time.monotonic() + DEADLINE_S
    while not marker.exists():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_a_command_that_cannot_be_had_is_asked_for_again(tmp_path: Path) -> None:
    clock, asked = Clock(), []

    def command() -> list[str]:
        asked.append(clock.now)
        raise ConfigError("no free port", remedy="end what listens there")

    child = Child(
        "child",
        command=command,
        env=os.environ,
        log=tmp_path / "log",
        serves=lambda: True,
        stops=(),
        clock=clock,
    )
    for _ in range(20):
        child.tick()
        clock.now += 0.5
    assert [later - earlier for earlier, later in itertools.pairwise(asked)] == [1.0, 2.0, 4.0]
    assert child.detail == "no free port; end what listens there"


def test_the_last_life_s_log_is_kept(bench: Bench) -> None:
    child = bench.child("import os; print(os.getpid())", serves=lambda: False)
    _until(child, lambda: child.restarts == 1)
    first = last_line(child.log)
    bench.clock.now += 1.0
    _until(child, lambda: child.restarts == 2)
    assert last_line(child.log.with_suffix(".last.log")) == first != last_line(child.log)
