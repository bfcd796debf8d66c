"""More than the cluster can serve: what each rule of admission rejects, and how loads swing."""

from __future__ import annotations

import dataclasses

from kvist.sim.des.routing_spec import AdmissionKind
from kvist.sim.reproduce.outcome import Claim, Figure, Outcome, Unit
from kvist.sim.routing.setting import CHAT, Run
from kvist.sim.routing.study import Results, Study
from kvist.sim.routing.swing import swing

RULES = (AdmissionKind.BASELINE, AdmissionKind.EARLY, AdmissionKind.PREDICTIVE)
# Mooncake (arXiv 2407.00079), Table 3: of 23,608 requests at twice their speed on 8P + 8D.
PUBLISHED_REJECTED = {
    AdmissionKind.BASELINE: 4183,
    AdmissionKind.EARLY: 3771,
    AdmissionKind.PREDICTIVE: 3589,
}
_PUBLISHED_REQUESTS = 23_608
# Their trace brings 49.8 k prompt tokens a second at its own speed (23,608 requests of 7,590 tokens
# in an hour), the conversation trace 40.9 k: at this speed it is as heavy as theirs at twice.
OVERLOAD = 2.43
# The conversation trace is lighter on decode than theirs: with this limit decode is as near to its
# own as prefill is.
TRAFFIC = dataclasses.replace(CHAT, rate=1.0, ttft_s=30.0, tbt_s=0.0685)
RATES = (0.8, 1.6, OVERLOAD, 3.2, 4.8, 7.2)
_KEPT_RATIO = 0.9
_FULL_RATIO = 0.01


def overload_run(rule: AdmissionKind, rate: float = OVERLOAD) -> Run:
    """Eight prefill and eight decode nodes."""
    return Run(TRAFFIC, apart=True, admission=rule, rate=rate)


def rules_study() -> Study:
    """The three rules at the same overload."""
    return Study("admission", [overload_run(rule) for rule in RULES], _conclude_rules)


def rates_study() -> Study:
    """Prediction at more and more load."""
    runs = [overload_run(AdmissionKind.PREDICTIVE, rate) for rate in RATES]
    return Study("overload", runs, _conclude_rates)


def _conclude_rules(results: Results) -> Outcome:
    figures: list[Figure] = []
    reports = {rule: results[overload_run(rule)] for rule in RULES}
    swings = {rule: swing(report.served) for rule, report in reports.items()}
    for rule, report in reports.items():
        paper = PUBLISHED_REJECTED[rule]
        late = report.refusals.get("tbt_late", 0)
        figures += [
            Figure(f"{rule.value}: rejected", Unit.COUNT, paper, report.rejected),
            Figure(f"{rule.value}: rejected, of all requests", Unit.SHARE,
                   paper / _PUBLISHED_REQUESTS, report.rejected / report.requests),
            Figure(f"{rule.value}: of these, prompts computed for nothing", Unit.COUNT, None, late),
            Figure(f"{rule.value}: goodput", Unit.RATE, None, report.goodput_rps),
            Figure(f"{rule.value}: swing of prefill against decode, requests", Unit.NUMBER, None,
                   swings[rule].amplitude),
            Figure(f"{rule.value}: correlation of prefill and decode", Unit.NUMBER, None,
                   swings[rule].correlation),
        ]  # fmt: skip
    rejected = [reports[rule].rejected for rule in RULES]
    early, predictive = (swings[rule] for rule in RULES[1:])
    return Outcome(
        name="admission",
        title="Rules of admission under overload",
        source="Mooncake, arXiv 2407.00079, Table 3 and Fig. 9",
        setting=f"Conversation trace at {OVERLOAD:g} times its speed, which brings as many prompt "
        "tokens a second as the paper's trace at twice its own; 8 prefill and 8 decode nodes, TTFT "
        f"within {TRAFFIC.ttft_s:g} s and steps within {TRAFFIC.tbt_s * 1e3:g} ms.",
        figures=tuple(figures),
        claims=(
            Claim("rejected: baseline > early > predictive",
                  rejected == sorted(rejected, reverse=True) and len(set(rejected)) == len(RULES)),
            Claim("early: prefill and decode swing in opposite phase", early.correlation < 0),
            Claim("predictive: they swing less against each other than with early",
                  predictive.amplitude < early.amplitude),
        ),
        disagreements=(
            "The trace of the paper's table is not among the public ones, and its limit of 100 ms "
            "leaves decode idle on this one; ours was chosen so that both parts are near their "
            "limits. Far from there the order changes: where decode alone is short, computing for "
            "nothing costs nothing, and baseline rejects least.",
        ),
    )  # fmt: skip


def _conclude_rates(results: Results) -> Outcome:
    reports = {rate: results[overload_run(AdmissionKind.PREDICTIVE, rate)] for rate in RATES}
    goodputs = {rate: report.goodput_rps for rate, report in reports.items()}
    figures = []
    for rate, report in reports.items():
        figures += [
            Figure(f"rate x {rate:g}: goodput", Unit.RATE, None, report.goodput_rps),
            Figure(f"rate x {rate:g}: rejected", Unit.SHARE, None,
                   report.rejected / report.requests),
        ]  # fmt: skip
    full = _capacity_rate(results)
    tripled = min(RATES, key=lambda rate: abs(rate - 3 * full))
    kept = goodputs[tripled] / (max(goodputs.values()) or 1.0)
    return Outcome(
        name="overload",
        title="Goodput beyond capacity",
        source="Mooncake, arXiv 2407.00079, section 7",
        setting="As above, with prediction, at more and more times the trace's rate. Capacity is "
        f"the last rate at which at most {_FULL_RATIO:.0%} are rejected: x {full:g}.",
        figures=(
            *figures,
            Figure(f"goodput at x {tripled:g}, three times the capacity, over its peak",
                   Unit.RATIO, None, kept, (_KEPT_RATIO, 1.0)),
        ),
        disagreements=(
            "Goodput still grows beyond capacity, since of more requests more are short: those are "
            "predicted to be in time more often.",
        ),
    )  # fmt: skip


def _capacity_rate(results: Results) -> float:
    """The greatest rate at which hardly any request is rejected."""
    reports = {rate: results[overload_run(AdmissionKind.PREDICTIVE, rate)] for rate in RATES}
    served = [
        r for r, report in reports.items() if report.rejected <= _FULL_RATIO * report.requests
    ]
    return max(served, default=min(RATES))
