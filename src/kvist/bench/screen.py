"""Where benchmarks print their tables."""

from __future__ import annotations

import sys

from rich.console import Console

_PIPE_COLUMNS = 200  # a file or a pipe has no width of its own, and tables cut to 80 lose words


def screen() -> Console:
    """Standard output; as wide as the terminal, or as any table where it is none."""
    width = None if sys.stdout.isatty() else _PIPE_COLUMNS
    return Console(highlight=False, markup=False, width=width)
