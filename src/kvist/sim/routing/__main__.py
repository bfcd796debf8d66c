"""`python -m kvist.sim.routing`: policies and rules of admission on public traces."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvist import __version__
from kvist.core.errors import ConfigError, KvistError
from kvist.sim.des.report import Report
from kvist.sim.plots import check_plot
from kvist.sim.reproduce.outcome import Outcome
from kvist.sim.reproduce.page import write_section
from kvist.sim.routing.gateways import study as gateways_study
from kvist.sim.routing.overload import (
    ADMISSION,
    RULE_SEEDS,
    RuleRow,
    rates_study,
    rule_rows,
    rules_study,
)
from kvist.sim.routing.page import MARK, RULES_END, RULES_MARK, with_rules, with_section
from kvist.sim.routing.plot import draw
from kvist.sim.routing.policies import POLICIES, POLICY_SEEDS, SIZES, PolicyRow, rows
from kvist.sim.routing.policies import study as policies_study
from kvist.sim.routing.setting import Run
from kvist.sim.routing.study import Study, run_all

_TRACES = Path("../shared/traces")
_FAILED, _BAD_INPUT = 1, 2


def studies(
    sizes: Sequence[int] = SIZES,
    requests: int | None = None,
    seeds: Sequence[int] | None = None,
) -> list[Study]:
    """All, in the order in which they run.

    Args:
        sizes: of the clusters that compare policies.
        requests: of each trace that policies are compared on; None for all.
        seeds: of that comparison and of the rules of admission; None for each one's own.
    """
    return [
        rules_study(seeds or RULE_SEEDS),
        rates_study(),
        gateways_study(),
        policies_study(sizes, requests, seeds or POLICY_SEEDS),
    ]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m kvist.sim.routing",
        description="Policies of routing and rules of admission, judged on public traces by the "
        "production router in the simulator.",
        epilog="Example:\n  python -m kvist.sim.routing --only admission --plot swing.png",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--traces",
        type=Path,
        default=_TRACES,
        metavar="DIR",
        help=f"folder of the traces (default: {_TRACES})",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help=f"run only this; may be repeated: {', '.join(s.name for s in studies())}",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        action="append",
        metavar="N",
        help=f"size of a cluster that compares policies; may be repeated (default: {SIZES})",
    )
    parser.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help="compare policies on the first N requests of each trace (default: all)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        action="append",
        metavar="N",
        help="compare rules of admission, and policies, with that seed; may be repeated (default: "
        f"{RULE_SEEDS} and {POLICY_SEEDS}; of the policies only those close to each other get more "
        "than the first)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument(
        "--page",
        type=Path,
        metavar="FILE",
        help="write the tables of admission and of policies into that page, if they are run",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the swing (.png, .svg)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the studies; 0 if all hold, 1 if one does not, 2 for bad input."""
    args = build_parser().parse_args(arguments)
    try:
        wanted = _wanted(args)
        _check(args, wanted)
        return _run(args, wanted)
    except (KvistError, OSError) as error:
        print(f"kvist: {error}", file=sys.stderr)
        return _BAD_INPUT


def _wanted(args: argparse.Namespace) -> list[Study]:
    asked = studies(tuple(args.nodes or SIZES), args.requests, args.seed)
    known = {study.name: study for study in asked}
    for name in args.only or ():
        if name not in known:
            raise ConfigError(
                f"there is no study {name!r}", path="--only", remedy=f"take {', '.join(known)}"
            )
    return [known[name] for name in known if not args.only or name in args.only]


def _check(args: argparse.Namespace, wanted: Sequence[Study]) -> None:
    if len(set(args.seed or ())) < len(args.seed or ()):
        raise ConfigError("each seed once", path="--seed")
    names = {study.name for study in wanted}
    if any(nodes < 1 for nodes in args.nodes or ()):
        raise ConfigError("must be at least 1", path="--nodes")
    if args.requests is not None and args.requests < 1:
        raise ConfigError("must be at least 1", path="--requests")
    if args.plot is not None:
        check_plot(args.plot)
        if ADMISSION not in names:
            raise ConfigError(f"draws the study {ADMISSION!r}", path="--plot", remedy="run it, too")
    if args.page is not None:
        if not {ADMISSION, POLICIES} & names:
            studies_shown = f"shows the studies {ADMISSION!r} and {POLICIES!r}"
            raise ConfigError(studies_shown, path="--page", remedy="run one of them, too")
        page = args.page.read_text()
        if any(mark not in page for mark in (RULES_MARK, RULES_END, MARK)):
            raise ConfigError(f"{args.page} does not say where the tables belong", path="--page")
    for file in sorted({run.traffic.file for study in wanted for run in study.runs}):
        if not (args.traces / file).is_file():
            raise ConfigError(f"{args.traces / file} is not there", path="--traces")


def _run(args: argparse.Namespace, wanted: Sequence[Study]) -> int:
    outcomes: list[Outcome] = []
    rules: list[RuleRow] = []
    compared: list[PolicyRow] = []
    runs_of = {study.name: study.runs for study in wanted}
    for outcome, results in run_all(wanted, args.traces, _progress):
        outcomes.append(outcome)
        if outcome.name == POLICIES:
            compared = rows(runs_of[POLICIES], results)
        if outcome.name == ADMISSION:
            rules = rule_rows(runs_of[ADMISSION], results)
        print(write_section(outcome), flush=True)
        if args.plot is not None and outcome.name == ADMISSION:
            draw(results, args.plot, runs_of[ADMISSION][0].seed)
        if args.json is not None:
            args.json.write_text(json.dumps(_record(outcomes, rules, compared), indent=1) + "\n")
    if args.page is not None:
        page = args.page.read_text()
        page = with_rules(page, rules) if rules else page
        args.page.write_text(with_section(page, compared) if compared else page)
    return 0 if all(outcome.holds for outcome in outcomes) else _FAILED


def _progress(run: Run, report: Report, seconds: float) -> None:
    found = f"mean TTFT {report.ttft_s.mean:.3f} s, goodput {report.goodput_rps:.3f} /s"
    print(f"{run.label}: {found} ({seconds:.1f} s)", file=sys.stderr, flush=True)


def _record(
    outcomes: Sequence[Outcome], rules: Sequence[RuleRow], compared: Sequence[PolicyRow]
) -> dict[str, Any]:
    return {
        "kvist": __version__,
        "studies": [
            {
                "name": outcome.name,
                "holds": outcome.holds,
                "figures": [
                    {
                        "what": f.what,
                        "unit": f.unit.value,
                        "paper": f.paper,
                        "ours": f.ours,
                        "by_seed": f.by_seed,
                    }
                    for f in outcome.figures
                ],
                "claims": [{"text": c.text, "holds": c.holds} for c in outcome.claims],
            }
            for outcome in outcomes
        ],
        "admission": msgspec.to_builtins(rules),
        "policies": msgspec.to_builtins(compared),
    }


if __name__ == "__main__":
    sys.exit(main())
