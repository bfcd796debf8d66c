"""A small router and what tests ask of it: 64-token blocks, round speeds."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvist.core.keys import Key
from kvist.cost.decode import DecodeCoefficients, DecodeTimes
from kvist.cost.prefill import PrefillCoefficients, PrefillTimes
from kvist.cost.transfer import PathSpeed, TransferTimes
from kvist.router.candidates import Known, Load, Prefix
from kvist.router.conductor import KvistRouter, Setting
from kvist.router.protocol import Ask, Choice, Refused
from kvist.router.replicas import Speeds
from kvist.router.serving import Loading

BLOCK_TOKENS = 64
PREFILL = PrefillCoefficients(0.01, 1e-4, 0.0)
DECODE = DecodeCoefficients(0.02, 1e-4, 1e-7)


class Held:
    """Prefixes that a test sets: `kvist.router.candidates.Prefixes`."""

    def __init__(self) -> None:
        self.found: dict[str, Prefix] = {}

    def match(self, keys: Sequence[Key]) -> Mapping[str, Prefix]:
        """What was set, of prompts that have blocks."""
        return self.found if keys else {}


def own(tokens: int, reachable: int = 0) -> Prefix:
    """So many tokens in HBM, and more at peers."""
    return Prefix(tokens, tokens, 0, max(tokens, reachable))


def speeds(
    *,
    loads: bool = False,
    step_tokens: int | None = None,
    kv_tokens: int | None = None,
    guessed: bool = False,
) -> Speeds:
    """Round speeds; loads run at 1 GB/s with 1,000 bytes a token."""
    paths = {tier: PathSpeed(0.0, 1e9) for tier in ("dram", "ssd", "remote")}
    loading = Loading(TransferTimes(paths), 1000, BLOCK_TOKENS, 0.001, 0.0)
    return Speeds(
        PrefillTimes(PREFILL),
        DecodeTimes(DECODE),
        BLOCK_TOKENS,
        loading if loads else None,
        step_tokens,
        kv_tokens,
        guessed,
    )


def router(
    *replicas: str,
    held: Held | None = None,
    setting: Setting | None = None,
    seed: int = 0,
    **how: Any,
) -> KvistRouter:
    """Replicas that do both, or `name:role`."""
    made = KvistRouter(setting or Setting(), speeds(**how), held or Held(), random.Random(seed))
    for replica in replicas:
        name, _, role = replica.partition(":")
        made.add(name, role=role or "both")
    return made


def ask(name: str, tokens: int = 1000, text: str = "", **more: Any) -> Ask:
    """A prompt whose blocks are those of `text`, of its own where there is none."""
    keys = tuple(f"{text or name}/{i}".encode() for i in range(tokens // BLOCK_TOKENS))
    return Ask(name, keys, tokens, **more)


def chosen(found: Choice | Refused) -> Choice:
    """A choice that must be one."""
    assert isinstance(found, Choice), found
    return found


_AT_HOME, _IDLE, _NOTHING = Known(session=True), Load(0, 0, 0, 0, 0), Prefix(0, 0, 0, 0)


@dataclass(frozen=True)
class Stub:
    """A candidate with given values."""

    name: str
    queue: float = 0.0
    serve: float = 1.0
    step: float = 0.05
    stall: float = 0.0
    spared: float = 0.0
    held: Prefix = _NOTHING
    known: Known = _AT_HOME
    busy: Load = _IDLE
    role: str = "both"
    asked: list[Prefix] = field(default_factory=list)

    def queue_s(self) -> float:
        """As given."""
        return self.queue

    def step_s(self) -> float:
        """As given."""
        return self.step

    def prefix(self) -> Prefix:
        """As given."""
        return self.held

    def serve_s(self, prefix: Prefix) -> float:
        """As given, and `spared` more without peers; notes what was counted on."""
        self.asked.append(prefix)
        fetches = prefix.reachable_tokens > prefix.own_tokens
        return self.serve if fetches else self.serve + self.spared

    def stalls_s(self, prefix: Prefix) -> float:
        """As given."""
        return self.stall

    def load(self) -> Load:
        """As given."""
        return self.busy
