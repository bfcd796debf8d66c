"""What to buy: capacity of each tier by its price, whether it is fast enough, wear, and money."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvist.cost.break_even import break_even_bytes_per_s, break_even_tokens, keep_s
from kvist.sim.advise.advice import MarginalPoint, Savings, TierAdvice, Traffic, Wear
from kvist.sim.advise.curve import Curve, Reach, knee_bytes, marginal
from kvist.sim.advise.question import Medium, Question
from kvist.sim.advise.replicas import Fleet
from kvist.sim.advise.traffic import Ideal, saved_s

_DAY_S = 86400
_MONTH_HOURS = 730
_LIFE_DAYS = 5 * 365  # for which makers promise their drive writes a day
ENOUGH_RATIO = 0.9  # of the ideal hit ratio: no need to look further than DRAM
_USUAL_PREFIX_TOKENS = 4096  # of break-even bandwidths where nothing is ever reused


@dataclass(frozen=True, slots=True)
class Worth:
    """Both tiers, and the marginal value from which their sizes follow."""

    tiers: tuple[TierAdvice, ...]
    marginal: tuple[MarginalPoint, ...]
    savings: Savings
    wear: Wear

    @property
    def bought_bytes(self) -> int:
        return sum(tier.worth_bytes for tier in self.tiers)


def worth(
    engine: Curve, kvist: Curve, known: Ideal, facts: Traffic, question: Question, own: Fleet
) -> Worth:
    """Sizes DRAM, then SSD; a tier that loses to computing gets nothing.

    Tiers are written through: each holds copies of what is above it. DRAM that the hosts have
    anyway is taken for nothing if it helps; more of it, and all SSD, has its price. SSD is for
    what DRAM leaves: none is bought where DRAM comes near the ideal, nor where it earns less than
    its price and its wear.

    Args:
        engine: curve of the engine's eviction order.
        kvist: of Kvist's.
        own: what the engine has without Kvist.
    """
    dram, ssd = (_tier(medium, known, facts, question) for medium in Medium)
    base = engine.reach(own.cache_bytes)
    hosts = min(own.nodes * question.host_dram_bytes, facts.unique_bytes)
    there = kvist.reach(hosts)
    if hosts <= base.size_bytes or there.saved_device_s <= base.saved_device_s:
        there = base
    slopes = marginal(kvist, facts, question, there, max(hosts, base.size_bytes))
    top = there
    if dram.pays:
        if size := knee_bytes(slopes, dram.price_gb_hour):
            top = kvist.reach(size)
        dram = _sized(dram, top, base, paid_bytes=max(0, top.size_bytes - hosts))
    near = top.hit_ratio >= ENOUGH_RATIO * facts.ideal_hit_ratio
    if ssd.pays and not (near and dram.worth_bytes):
        more = marginal(kvist, facts, question, top, 0.0)
        ssd = _ssd(ssd, top, kvist, knee_bytes(more, ssd.price_gb_hour), facts, question)
    dram = replace(dram, hit_ratio=top.hit_ratio)
    if ssd.worth_bytes:
        top = kvist.reach(ssd.worth_bytes)
    ssd = replace(ssd, hit_ratio=top.hit_ratio)
    earned = _dollars_per_hour(facts, question, top.saved_device_s - base.saved_device_s)
    wear = _wear(kvist, facts, question, ssd.worth_bytes)
    return Worth((dram, ssd), slopes, _savings(earned, question, (dram, ssd), wear), wear)


def _ssd(
    tier: TierAdvice, top: Reach, kvist: Curve, size_bytes: int, facts: Traffic, question: Question
) -> TierAdvice:
    """The SSD tier of that size, if it earns its price and wear."""
    below = kvist.reach(size_bytes)
    more = _dollars_per_hour(facts, question, below.saved_device_s - top.saved_device_s)
    wear = _wear(kvist, facts, question, size_bytes)
    paid = size_bytes / 1e9 * tier.price_gb_hour + wear.dollars_per_month / _MONTH_HOURS
    return _sized(tier, below, top, paid_bytes=size_bytes) if more > paid else tier


def _tier(medium: Medium, known: Ideal, facts: Traffic, question: Question) -> TierAdvice:
    prefill, path = question.prefill, question.path(medium)
    prefix = int(facts.reused_prefix_tokens_p50) or _USUAL_PREFIX_TOKENS
    least = break_even_bytes_per_s(question.model, prefix, saved_s(prefill, prefix, prefix**2))
    length = break_even_tokens(
        question.model.token_bytes, path.bytes_per_s, path.latency_s, prefill
    )
    mean = max(1, facts.input_tokens // facts.requests)
    token_s = prefill.prefill_s(mean, 0) / mean
    prices = question.market.prices(medium)
    keep = keep_s(question.model.token_bytes, token_s, question.hardware.count, prices)
    return TierAdvice(
        medium=medium,
        bytes_per_s=path.bytes_per_s,
        break_even_bytes_per_s=least,
        break_even_tokens=length if math.isfinite(length) else None,
        pays=length < prefix,
        keep_s=keep,
        reuse_within_ratio=known.reused_within(keep),
        worth_bytes=0,
        hit_ratio=0.0,
        price_gb_hour=prices.gb_per_hour,
        cost_per_hour=0.0,
    )


def _sized(tier: TierAdvice, reach: Reach, above: Reach, *, paid_bytes: int) -> TierAdvice:
    if reach.size_bytes <= above.size_bytes:
        return tier
    cost = paid_bytes / 1e9 * tier.price_gb_hour
    return replace(tier, worth_bytes=reach.size_bytes, cost_per_hour=cost)


def _dollars_per_hour(facts: Traffic, question: Question, saved_device_s: float) -> float:
    """What device time is worth that is saved over the trace."""
    return max(0.0, saved_device_s) / facts.span_s * 3600 * question.dollars_per_device_s


def _savings(
    earned_per_hour: float, question: Question, tiers: tuple[TierAdvice, ...], wear: Wear
) -> Savings:
    earned = earned_per_hour * _MONTH_HOURS
    memory = sum(tier.cost_per_hour for tier in tiers) * _MONTH_HOURS
    return Savings(
        device_hours_per_day=earned_per_hour / question.market.device_per_hour * 24,
        device_dollars_per_month=earned,
        memory_dollars_per_month=memory,
        wear_dollars_per_month=wear.dollars_per_month,
        net_dollars_per_month=earned - memory - wear.dollars_per_month,
    )


def _wear(curve: Curve, facts: Traffic, question: Question, ssd_bytes: int) -> Wear:
    disks = question.disks
    if not ssd_bytes:
        return Wear(0.0, 0.0, disks.endurance_dwpd, None, 0.0)
    a_day = curve.written_bytes(ssd_bytes) / facts.span_s * _DAY_S
    life_writes = disks.endurance_dwpd * _LIFE_DAYS
    writes = a_day / ssd_bytes
    dollars_per_day = a_day / 1e12 / life_writes * disks.dollars_per_tb
    return Wear(
        tb_per_day=a_day / 1e12,
        drive_writes_per_day=writes,
        endurance_dwpd=disks.endurance_dwpd,
        lifetime_days=life_writes / writes if writes else None,
        dollars_per_month=dollars_per_day * _MONTH_HOURS / 24,
    )
