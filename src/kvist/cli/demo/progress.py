"""Shows what the demo is doing on stderr: a spinner on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvist.cli import screen


class Step:
    """One step under way; `detail` may be set from any thread."""

    def __init__(self, bar: Progress | None, text: str) -> None:
        self._bar = bar
        self._text = text
        self._task = bar.add_task(text, total=None) if bar else None
        self.result = ""

    def detail(self, text: str) -> None:
        """Says what the step is at."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=f"{self._text}: {text}")


@contextmanager
def step(text: str) -> Iterator[Step]:
    """Shows `text` while the body runs, and how long it took when it is done."""
    began = time.monotonic()
    if sys.stderr.isatty():
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=screen.progress_console(), transient=True) as bar:
            current = Step(bar, text)
            yield current
    else:
        say(f"… {text}")
        current = Step(None, text)
        yield current
    result = f": {current.result}" if current.result else ""
    say(f"✓ {text}{result} ({time.monotonic() - began:.1f} s)")


def say(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr, flush=True)
