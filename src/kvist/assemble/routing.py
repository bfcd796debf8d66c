"""A router and a queue from the configuration."""

from __future__ import annotations

import random

from kvist.config import DisaggregationConfig, RouterConfig
from kvist.cost.decode import DecodeCoefficients, DecodeTimes
from kvist.cost.prefill import PrefillCoefficients, PrefillTimes
from kvist.router.admission import Limits, Rule
from kvist.router.candidates import Prefixes
from kvist.router.conductor import KvistRouter, Setting
from kvist.router.exchange import EXPIRES_S
from kvist.router.fairness import FairQueue
from kvist.router.policies.kvist import Settings
from kvist.router.replicas import Speeds
from kvist.router.serving import Loading
from kvist.router.splitting import Rule as SplitRule
from kvist.router.splitting import Splitting

# What a seed says of the parts that nobody knows before they were measured: a pass of no tokens
# costs as much as so many tokens, and a sequence and a token of context this share of a step.
_PASS_TOKENS = 100
_SEQUENCE_RATIO, _CONTEXT_TOKEN_RATIO = 5e-3, 5e-6


def router_of(
    config: RouterConfig,
    block_tokens: int,
    prefixes: Prefixes,
    stream: random.Random,
    *,
    splitting: Splitting | None = None,
    loading: Loading | None = None,
    expire_s: float = EXPIRES_S,
) -> KvistRouter:
    """The router of a gateway; it learns speeds from the believed ones on.

    Args:
        block_tokens: of the keys that requests will carry.
        prefixes: who holds what.
        splitting: when prompts go to prefill replicas.
        loading: how KV comes from below HBM; None: only what is in HBM counts.
        expire_s: of silence after which another gateway is forgotten.

    Raises:
        ConfigError: an unknown policy, or a scorer that cannot be loaded.
    """
    token_s, step_s = 1 / config.prefill_tokens_per_s, config.decode_step_s
    prefill = PrefillCoefficients(_PASS_TOKENS * token_s, token_s, 0.0)
    decode = DecodeCoefficients(step_s, _SEQUENCE_RATIO * step_s, _CONTEXT_TOKEN_RATIO * step_s)
    setting = Setting(
        policy=config.policy,
        kvist=Settings(config.temperature, session_s=config.session_s, lora_s=config.lora_s),
        admission=Rule(config.admission),
        limits=Limits(config.ttft_s, config.tbt_s),
        hold_s=config.hold_s,
        splitting=splitting,
        expire_s=expire_s,
    )
    speeds = Speeds(
        PrefillTimes(prefill),
        DecodeTimes(decode),
        block_tokens,
        loading,
        step_tokens=config.step_tokens or None,
        kv_tokens=config.kv_tokens or None,
        guessed=True,
        tbt_s=config.tbt_s,
    )
    return KvistRouter(setting, speeds, prefixes, stream)


def splitting_of(config: DisaggregationConfig) -> Splitting | None:
    """When prompts are computed by prefill replicas; None where there are none."""
    if not config.prefill:
        return None
    return Splitting(
        rule=SplitRule(config.rule),
        length_tokens=config.length_tokens,
        queued=config.queued,
        tokens_per_s=config.handover_tokens_per_s,
    )


def queue_of(config: RouterConfig) -> FairQueue:
    """Where a gateway's requests wait."""
    weights = config.tenant_weight if isinstance(config.tenant_weight, dict) else {}
    return FairQueue(
        capacity=config.waiting,
        tenant_capacity=config.tenant_waiting,
        overtaken_s=config.overtaken_s,
        weights=weights,
    )
