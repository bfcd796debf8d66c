"""What a gateway is told when it is made; `assemble` makes these from the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Migrate = Literal["exact", "sampled", "off"]
Transport = Literal["kvist", "nixl"]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds; see `config/gateway_schema.py` for the meaning of each."""

    connect_s: float = 2.0
    first_token_s: float = 300.0
    token_s: float = 30.0
    answer_s: float = 900.0
    health_s: float = 2.0
    head_s: float = 20.0
    body_s: float = 60.0
    stall_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """What all clients together may ask at once."""

    body_bytes: int = 32 << 20
    bodies_bytes: int = 1 << 30
    answers_bytes: int = 1 << 30
    connections: int = 20_000
    requests: int = 16_384


@dataclass(frozen=True, slots=True)
class Prefilling:
    """How prompts are computed for other replicas; see `config/disaggregation_schema.py`."""

    transport: Transport = "kvist"
    patience: float = 4.0
    least_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What else it does.

    Attributes:
        engine_key: what engines want as their API key; empty: none.
        passes_keys: the client's own key goes to the engine.
        tenants_share: prefixes that one tenant had computed spare others computing them.
    """

    migrate: Migrate = "exact"
    attempts: int = 3
    leave_s: float = 0.0
    drain_s: float = 300.0
    engine_key: str = ""
    passes_keys: bool = True
    tenants_share: bool = False
    prefilling: Prefilling = field(default_factory=Prefilling)
    timeouts: Timeouts = field(default_factory=Timeouts)
    bounds: Bounds = field(default_factory=Bounds)
