"""Draws how prefill and decode swing under each rule of admission. Needs the extra `plot`."""

from __future__ import annotations

from pathlib import Path

from kvist.sim.routing.overload import RULES, overload_run
from kvist.sim.routing.study import Results
from kvist.sim.routing.swing import swing

_SHOWN_S = slice(600, 1500)  # of the run, so that single swings are seen


def draw(results: Results, path: Path, seed: int) -> None:
    """Draws the runs of `overload.rules_study` with one of its seeds, one panel a rule.

    Raises:
        OSError: it cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3 * len(RULES)), layout="constrained")
    for axes, rule in zip(figure.subplots(len(RULES), 1, sharex=True), RULES, strict=True):
        found = swing(results[overload_run(rule, seed=seed)].served)
        start = _SHOWN_S.start
        for name, series in (("prefill", found.prefill), ("decode", found.decode)):
            shown = series[_SHOWN_S]
            axes.plot(range(start, start + len(shown)), shown, label=f"in {name}", linewidth=1)
        axes.set_title(f"{rule.value}: opposite swing of {found.amplitude:.1f} requests")
        axes.set_ylabel("requests")
        axes.legend(loc="upper right")
    figure.axes[-1].set_xlabel("seconds")
    figure.savefig(path)
