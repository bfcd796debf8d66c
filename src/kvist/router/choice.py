"""From candidates to a choice, and the policies by name.

A scorer of your own is a class named as `package.module:Class` in place of a policy's name: made
without arguments, with a method `score(ask, candidate)` whose least value is best.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvist.core.errors import ConfigError
from kvist.router.candidates import Candidate, Prefix
from kvist.router.policies.cache_aware import CacheAware
from kvist.router.policies.dynamo import Dynamo
from kvist.router.policies.kvist import DEFAULTS, Kvist, Settings
from kvist.router.policies.least_loaded import LeastLoaded
from kvist.router.policies.longest_prefix import LongestPrefix
from kvist.router.policies.power_of_two import PowerOfTwo
from kvist.router.policies.protocol import Policy, Ranked
from kvist.router.policies.random_choice import RandomChoice
from kvist.router.policies.round_robin import RoundRobin
from kvist.router.protocol import Ask


@dataclass(frozen=True, slots=True)
class Selected:
    """What a policy picked and what is predicted there.

    Attributes:
        prefill: computes the prompt.
        decode: goes on; the same candidate where that does both.
        reuse: prefix that is counted on.
        queue_s: until the prompt begins.
        serve_s: load and prefill.
        handover_s: from there to the first token, where another goes on.
        lacking_tokens: whose KV is handed over.
        split: where the prompt is computed and why, if that was a question (`splitting.py`).
    """

    prefill: Candidate
    decode: Candidate
    reuse: Prefix
    queue_s: float
    serve_s: float
    handover_s: float = 0.0
    lacking_tokens: int = 0
    split: str = ""

    @property
    def ttft_s(self) -> float:
        """Predicted seconds to the first token."""
        return self.queue_s + self.serve_s + self.handover_s


def select(policy: Policy, ask: Ask, candidates: Sequence[Candidate]) -> Selected | None:
    """The replicas for a request; None where none prefills, or none decodes."""
    prefills = [c for c in candidates if c.role != "decode"]
    decodes = [c for c in candidates if c.role != "prefill"]
    if not prefills or not decodes:
        return None
    chosen = policy.pick(ask, prefills)
    reuse = policy.reuse(chosen)
    serve_s = chosen.serve_s(reuse)
    decode = chosen if chosen.role == "both" else policy.pick_decode(ask, decodes)
    return Selected(chosen, decode, reuse, chosen.queue_s(), serve_s)


class Scorer(Protocol):
    """Somebody's own idea of what is best."""

    def score(self, ask: Ask, candidate: Candidate) -> float:
        """Least is best."""
        ...


class Scored(Ranked):
    """A policy from a scorer."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def rank(self, ask: Ask, candidate: Candidate) -> tuple[float, ...]:
        """The score."""
        return (self._scorer.score(ask, candidate),)


_Make = Callable[[random.Random, int, Settings], Policy]
_POLICIES: dict[str, _Make] = {
    "random": lambda stream, _size, _settings: RandomChoice(stream),
    "round-robin": lambda _stream, _size, _settings: RoundRobin(),
    "least-loaded": lambda _stream, _size, _settings: LeastLoaded(),
    "power-of-two": lambda stream, _size, _settings: PowerOfTwo(stream),
    "prefix": lambda _stream, _size, _settings: LongestPrefix(),
    "cache-aware-local": lambda _stream, _size, _settings: CacheAware(peers=False),
    "cache-aware": lambda _stream, _size, _settings: CacheAware(peers=True),
    "dynamo": lambda stream, size, _settings: Dynamo(stream, size),
    "kvist": lambda stream, _size, settings: Kvist(stream, settings),
}
POLICIES = tuple(_POLICIES)


def make_policy(
    name: str, stream: random.Random, block_tokens: int, settings: Settings = DEFAULTS
) -> Policy:
    """The policy of that name, or of the scorer `package.module:Class`.

    Args:
        name: of `POLICIES`, or a scorer's.
        stream: for those that draw.
        block_tokens: tokens of a block, for those that count in blocks.
        settings: of `kvist`.

    Raises:
        ConfigError: there is no such policy, or the class is no scorer.
    """
    if name in _POLICIES:
        return _POLICIES[name](stream, block_tokens, settings)
    module, colon, cls = name.partition(":")
    if not colon:
        remedy = f"take {', '.join(POLICIES)}, or package.module:Class of a scorer"
        raise ConfigError(f"unknown policy {name!r}", path="$.router.policy", remedy=remedy)
    try:
        found = getattr(importlib.import_module(module), cls)
    except (ImportError, AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise ConfigError(
            f"cannot load {name!r}: {error}",
            path="$.router.policy",
            remedy="name it package.module:Class, of a package that is installed or in PYTHONPATH",
        ) from error
    if not callable(getattr(found, "score", None)):
        raise ConfigError(
            f"{name!r} has no method `score`",
            path="$.router.policy",
            remedy="give it score(ask, candidate) -> float, least is best",
        )
    try:
        return Scored(found())
    except TypeError as error:
        raise ConfigError(
            f"{name!r} cannot be made: {error}",
            path="$.router.policy",
            remedy="give it an __init__ without arguments",
        ) from error
