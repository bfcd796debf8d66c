"""A run as a table, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvist.bench.index.run import (
    ALL_CORES,
    DYNAMO,
    ENGINES,
    KVIST,
    ONE_CORE,
    SEVERAL,
    Figure,
    Outcome,
)
from kvist.sim.markdown import table, written_behind

MARK = (
    "<!-- Below: written by `python -m kvist.bench.index --page` from bench/results/index.json. -->"
)
HEADS = ("", "cores", "Dynamo 1.6.1", "Kvist", "Dynamo ÷ Kvist")


def _rate(entry_s: float) -> str:
    return f"{1e-6 / entry_s:.2f} M/s"


def _milliseconds(took_s: float) -> str:
    return f"{took_s * 1e3:.3f} ms"


def _bytes(size_bytes: float) -> str:
    return f"{size_bytes:.0f} bytes"


# Title, whose figure beside Dynamo's, its name, and how it is shown.
_ROWS: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
    ("blocks applied, hashed before, 16 an event", KVIST, "entry_s", _rate),
    ("the same by CPU time", KVIST, "entry_cpu_s", _rate),
    ("blocks applied, Kvist's messages carrying 16 such events", SEVERAL, "entry_s", _rate),
    ("the same by CPU time", SEVERAL, "entry_cpu_s", _rate),
    ("blocks applied, Kvist hashing their tokens too", ENGINES, "entry_s", _rate),
    ("the same by CPU time", ENGINES, "entry_cpu_s", _rate),
    ("match of a prompt, one worker holds all", KVIST, "match_one_s", _milliseconds),
    ("match, nobody holds any", KVIST, "match_none_s", _milliseconds),
    ("match, every worker holds all", KVIST, "match_all_s", _milliseconds),
    ("memory of a block of a worker, hashed before", KVIST, "entry_bytes", _bytes),
    ("memory, the engines' own hashes remembered", ENGINES, "entry_bytes", _bytes),
    ("hashes of a prompt's blocks (Kvist: BLAKE3)", KVIST, "hash_s", _milliseconds),
)


def rows(outcome: Outcome) -> Iterator[tuple[str, ...]]:
    """Of each figure: median and 99th percentile of both, and their ratios."""
    for title, contender, name, shown in _ROWS:
        for way in (ONE_CORE, ALL_CORES):
            if name == "entry_bytes" and way == ONE_CORE:
                continue  # the same on any
            ours = _values(outcome.figure(way, contender, name))
            theirs = _values(outcome.figure(way, DYNAMO, name))
            ratios = [other / mine for mine, other in zip(ours, theirs, strict=False)]
            yield (
                title,
                way,
                " / ".join(map(shown, theirs)) or "not measured",
                " / ".join(map(shown, ours)) or "not measured",
                " / ".join(f"{ratio:.2f}" for ratio in ratios) or "–",
            )


def _values(figure: Figure | None) -> list[float]:
    """Median and 99th percentile, as far as they are known."""
    if figure is None:
        return []
    return [figure.median] if figure.p99 is None else [figure.median, figure.p99]


def section(outcome: Outcome) -> str:
    """What stands behind `MARK` in the page."""
    machine, settings = outcome.machine, outcome.settings
    parts = [
        f"Median / 99th percentile of {settings.rounds} rounds, in which both were measured by "
        f"turns, each in a process of its own: {settings.workers} workers that hold about "
        f"{settings.entries:,} blocks together, in prompts of {settings.prompt_blocks:,} blocks of "
        "16 tokens. Above 1 in the last column Kvist is ahead. "
        f"{machine.cpu}, {machine.cores} cores, Python {machine.python}, commit {machine.commit}, "
        f"load {machine.load_before} before and {machine.load_after} after.",
        "",
        *table(HEADS, rows(outcome)),
    ]
    for way in (ONE_CORE, ALL_CORES):
        many = outcome.figure(way, KVIST, "match_many_s")
        if many is not None:
            took = _milliseconds(many.median)
            parts += ["", f"On {way}, a prefix that is one of a batch takes {took}."]
    parts += [f"\n{name} was not measured: {why}" for name, why in outcome.missing.items()]
    return "\n".join(parts) + "\n"


def with_section(page: str, outcome: Outcome) -> str:
    """A page with what stands behind `MARK` written anew.

    Raises:
        ValueError: it has no such mark.
    """
    return written_behind(page, MARK, section(outcome))
