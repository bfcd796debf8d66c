"""Whether a plot can be drawn, asked before hours of work end in it. Needs the extra `plot`."""

from __future__ import annotations

from pathlib import Path

from kvist.core.errors import ConfigError

SUFFIXES = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Whether a plot can be drawn into `path`, before anything is measured.

    Raises:
        ConfigError: it is of another kind, or matplotlib is not installed.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path} is neither .png nor .svg", path="--plot")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "matplotlib is not installed", path="--plot", remedy="pip install 'kvist[plot]'"
        ) from error
