"""The verdict: one set of rules over the figures, each with its threshold, its value and a reason.

In this order; the first that holds decides:

1. `non-prefix`: prefixes reach less than half of the tokens even without end, and at least 20
   points more of the tokens repeat at other places.
2. `off`: what is worth buying brings less than 2 points of hit ratio over the engine's own cache,
   or nothing is worth its price.
3. `dram`: HBM with the DRAM worth buying reaches 90 % of the ideal hit ratio, or no SSD earns its
   price and wear.
4. `dram+ssd`: the rest.
"""

from __future__ import annotations

from kvist.sim.advise.advice import Rule, Traffic, Verdict
from kvist.sim.advise.question import Medium
from kvist.sim.advise.worth import ENOUGH_RATIO, Worth

PREFIX_CAP_RATIO = 0.5
ELSEWHERE_RATIO = 0.2
LEAST_GAIN_RATIO = 0.02
_MIND_DAYS = 5 * 365


def judge(
    facts: Traffic, bought: Worth, hbm_hit_ratio: float
) -> tuple[Verdict, str, tuple[Rule, ...]]:
    """(verdict, the sentence for it, every rule that was looked at)."""
    dram, ssd = (next(t for t in bought.tiers if t.medium is m) for m in Medium)
    ideal = facts.ideal_hit_ratio
    capped, elsewhere = _prefix_rules(facts)
    gain = ssd.hit_ratio - hbm_hit_ratio
    more = Rule(
        "gain over the engine's own cache",
        gain,
        LEAST_GAIN_RATIO,
        bought.bought_bytes > 0 and gain >= LEAST_GAIN_RATIO,
        f"hit ratio {hbm_hit_ratio:.1%} in HBM alone, {ssd.hit_ratio:.1%} with all that is worth "
        "its price",
    )
    reached = dram.hit_ratio / ideal if ideal else 1.0
    enough = Rule(
        "DRAM reaches enough of the ideal",
        reached,
        ENOUGH_RATIO,
        reached >= ENOUGH_RATIO and dram.worth_bytes > 0,
        f"HBM and {_terabytes(dram.worth_bytes)} of DRAM hit {dram.hit_ratio:.1%} of tokens; "
        f"without end {ideal:.1%}",
    )
    disks = Rule(
        "SSD beats computing, its price and its wear",
        ssd.bytes_per_s / 1e9,
        ssd.break_even_bytes_per_s / 1e9,
        ssd.worth_bytes > 0,
        f"{ssd.bytes_per_s / 1e9:.1f} GB/s a node, break-even "
        f"{ssd.break_even_bytes_per_s / 1e9:.1f} GB/s; {_terabytes(ssd.worth_bytes)} pay for more "
        "than DRAM does",
    )
    rules = (capped, elsewhere, more, enough, disks)
    if capped.holds and elsewhere.holds:
        return Verdict.NON_PREFIX, _non_prefix(facts), rules
    if not more.holds:
        return Verdict.OFF, _off(facts, hbm_hit_ratio), rules
    if enough.holds or not disks.holds:
        sentence = (
            f"Yes, and DRAM suffices: {_terabytes(dram.worth_bytes)} lift the hit ratio from "
            f"{hbm_hit_ratio:.1%} to {dram.hit_ratio:.1%} of tokens, {reached:.0%} of what any "
            "cache could reach."
        )
        return Verdict.DRAM, sentence, rules
    return Verdict.DRAM_SSD, _with_ssd(bought, hbm_hit_ratio), rules


def _prefix_rules(facts: Traffic) -> tuple[Rule, Rule]:
    ideal, repeated = facts.ideal_hit_ratio, facts.repeated_tokens_ratio
    capped = Rule(
        "prefix reuse is capped",
        ideal,
        PREFIX_CAP_RATIO,
        ideal < PREFIX_CAP_RATIO,
        f"a cache without end hits {ideal:.1%} of tokens",
    )
    if repeated is None:
        reason = "the trace does not say what its prompts are made of"
        return capped, Rule(
            "tokens repeat at other places", None, ELSEWHERE_RATIO, holds=False, reason=reason
        )
    elsewhere = Rule(
        "tokens repeat at other places",
        repeated - ideal,
        ELSEWHERE_RATIO,
        repeated - ideal >= ELSEWHERE_RATIO,
        f"{repeated:.1%} of tokens came before, at whatever place of a prompt",
    )
    return capped, elsewhere


def _non_prefix(facts: Traffic) -> str:
    return (
        f"Use non-prefix reuse: prefix reuse is capped at {facts.ideal_hit_ratio:.1%} of tokens "
        f"whatever you buy, while {facts.repeated_tokens_ratio:.1%} of tokens repeat at other "
        "places of the prompt."
    )


def _off(facts: Traffic, hbm_hit_ratio: float) -> str:
    if facts.ideal_hit_ratio < LEAST_GAIN_RATIO:
        return f"Turn it off: {facts.ideal_hit_ratio:.1%} of tokens ever repeat as a prefix."
    if facts.ideal_hit_ratio - hbm_hit_ratio < LEAST_GAIN_RATIO:
        return (
            f"Turn it off: the engine's own cache already hits {hbm_hit_ratio:.1%} of tokens, of "
            f"{facts.ideal_hit_ratio:.1%} that any cache could."
        )
    return (
        f"Turn it off: {facts.ideal_hit_ratio:.1%} of tokens repeat, but no tier earns its price "
        "at this traffic."
    )


def _with_ssd(bought: Worth, hbm_hit_ratio: float) -> str:
    dram, ssd = bought.tiers
    wear = bought.wear
    behind = f" behind {_terabytes(dram.worth_bytes)} of DRAM" if dram.worth_bytes else ""
    alone = (
        f"would stop at {dram.hit_ratio:.1%}" if dram.worth_bytes else "would not earn its price"
    )
    text = (
        f"Yes, with SSD: {_terabytes(ssd.worth_bytes)} of SSD{behind} lift the hit ratio from "
        f"{hbm_hit_ratio:.1%} to {ssd.hit_ratio:.1%} of tokens; DRAM alone {alone}."
    )
    if wear.lifetime_days is not None and wear.lifetime_days < _MIND_DAYS:
        text += (
            f" Mind the wear: {wear.tb_per_day:,.0f} TB written a day use drives up in "
            f"{wear.lifetime_days:,.0f} days, ${wear.dollars_per_month:,.0f} a month."
        )
    return text


def _terabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e12:,.1f} TB" if size_bytes >= 1e12 else f"{size_bytes / 1e9:,.0f} GB"
