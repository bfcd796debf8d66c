"""Shows a run: a table for the terminal and a page for the documentation."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from kvist.bench.report import Ratio, Verdict, caveats, costs, reuse_rows, verdicts
from kvist.bench.samples import Machine, Result
from kvist.bench.store.report import method
from kvist.bench.store.report import tables as store_tables
from kvist.bench.store.samples import StoreResult
from kvist.sim.markdown import table

_NOTE = "<!-- Written by `python -m kvist.bench --page` from the file that is named below. -->\n"

_METHOD = """
One machine, one run, real vLLM engines side by side as separate processes; only one computes at any
time, and whatever is compared was measured in the same round. Times are those of one request for
one token. The prompts are random tokens, so no two share anything. "After an engine restart" means
that the processes which computed the prompts have ended and new ones were started. {restarts} As in
life, the kernel may still have files in its page cache. The rows "from the disk" are of one more
restart, at which nothing was brought ahead and the kernel was made to drop the files' pages (the
times of recomputing and of a prefix hit are then of minutes before). The ratio is of the medians;
in brackets are the least and the greatest ratio of a single round. Absolute times are those of a
small model on this machine and are given only for context: what Kvist saves grows with the model.
"""
_RESTARTS = {
    True: "Every round did so, and while its engine started, Kvist brought its newest\n"
    "blocks back to DRAM. Two processes of one engine differ in speed: "
    '"one start of it ÷ all" says how much.',
    False: "It was done once for all rounds, and Kvist brought nothing to DRAM ahead.",
}


def _span(ratio: Ratio | None, unit: str = "×") -> str:
    if ratio is None:
        return "–"
    return (
        f"{_short(ratio.value)}{unit} ({_short(ratio.low)}–{_short(ratio.high)}, "
        f"{ratio.rounds} rounds)"
    )


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 20 else f"{value:.1f}" if value >= 3 else f"{value:.2f}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f} s" if value < 1 else f"{value:.2f} s"


def _word(verdict: Verdict) -> str:
    if verdict.met is None:
        return "too few rounds" if verdict.measured else "not measured"
    return "met" if verdict.met else "NOT met"


def tables(result: Result) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, column heads and rows of every table."""
    out = []
    for tokens in sorted(result.settings.lengths_tokens):
        rows = [
            [
                row.title,
                _seconds(row.median_s) if row.median_s is not None else f"not run: {row.why}",
                _span(row.faster),
                _span(row.to_prefix_hit),
            ]
            for row in reuse_rows(result, tokens)
        ]
        heads = ["prompt served by", "median", "faster than recompute", "to vLLM's own prefix hit"]
        out.append((f"Time to first token, {tokens} tokens", heads, rows))
    rows = [[c.title, _seconds(c.median_s), _span(c.ratio)] for c in costs(result)]
    out.append(("What it costs", ["where nothing is reused", "median", "with ÷ without"], rows))
    rows = [[v.target, _span(v.measured, ""), _word(v)] for v in verdicts(result)]
    out.append(("Targets", ["target", "measured", ""], rows))
    return [(title, heads, rows) for title, heads, rows in out if rows]


def print_result(result: Result, console: Console) -> None:
    """Prints the tables and caveats."""
    print_tables(tables(result), console)
    for text in caveats(result):
        console.print(f"Note: {text}")


def print_tables(shown: Sequence[tuple[str, list[str], list[list[str]]]], console: Console) -> None:
    """Prints tables: title, column heads, rows."""
    for title, heads, rows in shown:
        grid = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for i, head in enumerate(heads):
            grid.add_column(head, justify="left" if i in (0, len(heads) - 1) else "right")
        for row in rows:
            grid.add_row(*row)
        console.print(grid)
        console.print()


def page(engines: tuple[Result, str] | None, store: tuple[StoreResult, str] | None) -> str:
    """`docs/benchmarks.md`: both parts, or the one there is.

    Args:
        engines: a run, and the file that holds it, as the page names it.
        store: the same of the store benchmark.
    """
    parts = [_NOTE, "# Benchmarks\n"]
    if engines is not None:
        parts += _engines_part(*engines)
    if store is not None:
        parts += _store_part(*store)
    parts.append(
        "\n`make bench` repeats the run; `make bench-peers` with LMCache, Redis and Mooncake too."
    )
    return "\n".join(parts) + "\n"


def _engines_part(result: Result, source: str) -> list[str]:
    method = _METHOD.format(restarts=_RESTARTS[result.settings.restart_each_round])
    parts = [method.strip() + "\n", _where(result, source)]
    parts += [f"* {text}" for text in caveats(result)]
    return parts + _markdown(tables(result))


def _store_part(result: StoreResult, source: str) -> list[str]:
    intro = "\n# The block store\n\n" + method(result) + "\n\n"
    where = _machine(result.machine, result.started, result.took_s, source)
    return [intro + where, *_markdown(store_tables(result))]


def _markdown(shown: Sequence[tuple[str, list[str], list[list[str]]]]) -> list[str]:
    parts = []
    for title, heads, rows in shown:
        parts.append(f"\n## {title}\n")
        parts += table(heads, ([_cell(c) for c in row] for row in rows))
    return parts


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _where(result: Result, source: str) -> str:
    s = result.settings
    return (
        f"{_machine(result.machine, result.started, result.took_s, source)} Model {s.model} in "
        f"{s.dtype}; the engines' own threads on core(s) {s.engine_cores}.\n"
    )


def _machine(m: Machine, started: str, took_s: float, source: str) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in sorted(m.versions.items()))
    return (
        f"Run on {started}, {took_s / 60:.0f} minutes, commit `{m.commit}`; every "
        f"sample is in `{source}`. {m.cores} cores of {m.cpu}, {m.memory_bytes / 2**30:.0f} GiB, "
        f"Linux {m.kernel}, Python {m.python}, {versions}. Load average {m.load_before} before, "
        f"{m.load_after} after."
    )
