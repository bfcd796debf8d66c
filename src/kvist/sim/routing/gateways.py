"""Several gateways at once: what each costs that does not know what the others just booked."""

from __future__ import annotations

import math

from kvist.sim.reproduce.outcome import Claim, Figure, Outcome, Unit
from kvist.sim.routing.setting import CHAT, Run
from kvist.sim.routing.study import Results, Study

GATEWAYS = 4
EXCHANGES_S = (0.1, 1.0, math.inf)
_MOST_RATIO = 1.1  # of one gateway's mean TTFT, at the first of `EXCHANGES_S`

_ONE = Run(CHAT)


def _run(exchange_s: float) -> Run:
    return Run(CHAT, gateways=GATEWAYS, exchange_s=exchange_s)


def study() -> Study:
    """Four gateways that tell each other often, seldom and never, beside a single one."""
    return Study("gateways", [_ONE, *(_run(s) for s in EXCHANGES_S)], _conclude)


def _conclude(results: Results) -> Outcome:
    alone_s = results[_ONE].ttft_s.mean
    found = {s: results[_run(s)].ttft_s.mean for s in EXCHANGES_S}
    ratios = {s: ttft_s / alone_s if alone_s else 1.0 for s, ttft_s in found.items()}
    figures = [Figure("one gateway: mean TTFT", Unit.SECONDS, None, alone_s)]
    for exchange_s, ttft_s in found.items():
        told = "never told" if math.isinf(exchange_s) else f"told every {exchange_s:g} s"
        what = f"{GATEWAYS} gateways, {told}: mean TTFT"
        figures.append(Figure(what, Unit.SECONDS, None, ttft_s))
        figures.append(Figure(f"{what}, over one's", Unit.RATIO, None, ratios[exchange_s]))
    often, never = EXCHANGES_S[0], EXCHANGES_S[-1]
    return Outcome(
        name="gateways",
        title="Several gateways",
        source="public traces, this simulator",
        setting=f"Conversation trace, {_ONE.nodes} nodes; each request comes to a gateway by "
        "chance.",
        figures=tuple(figures),
        claims=(
            Claim(f"told every {often:g} s they cost less than a tenth of TTFT",
                  ratios[often] <= _MOST_RATIO),
            Claim("told they do better than never told", found[often] < found[never]),
        ),
    )  # fmt: skip
