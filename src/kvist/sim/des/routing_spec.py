"""How requests find their nodes: the policy, what it knows, and whether it refuses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from kvist.core.errors import ConfigError
from kvist.router.fairness import OVERTAKEN_S

_MAX_GATEWAYS = 64


class RouterKind(Enum):
    """The shipped policies (`kvist.router.choice`)."""

    RANDOM = "random"
    ROUND_ROBIN = "round-robin"
    LEAST_LOADED = "least-loaded"
    POWER_OF_TWO = "power-of-two"
    PREFIX = "prefix"
    CACHE_AWARE_LOCAL = "cache-aware-local"
    CACHE_AWARE = "cache-aware"
    DYNAMO = "dynamo"
    KVIST = "kvist"


class AdmissionKind(Enum):
    """When a request is refused that is predicted to miss the SLO (`kvist.router.admission`)."""

    NONE = "none"
    BASELINE = "baseline"
    EARLY = "early"
    PREDICTIVE = "predictive"


class Knows(Enum):
    """What a router knows of load.

    `engines`: the true state of every engine, at once. `bookings`: what gateways sent and what came
    back, as in production; it is the production router that runs then.
    """

    ENGINES = "engines"
    BOOKINGS = "bookings"


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """Details of routing.

    Attributes:
        knows: what the policy knows of load.
        scorer: `package.module:Class` of a scorer in place of the router's policy, or empty.
        temperature: of the policy `kvist`.
        gateways: how many route at once, each with bookings of its own; with `bookings` only.
        exchange_s: how often they tell each other; infinite for never.
        hold_s: requests wait at gateways while every node has more than this queued, with
            `bookings` only; infinite: none waits.
        overtaken_s: how much later a shorter request may come and still overtake one that waits.
    """

    knows: Knows = Knows.ENGINES
    scorer: str = ""
    temperature: float = 0.0
    gateways: int = 1
    exchange_s: float = 0.1
    hold_s: float = math.inf
    overtaken_s: float = OVERTAKEN_S

    def __post_init__(self) -> None:
        if not 1 <= self.gateways <= _MAX_GATEWAYS:
            raise ConfigError(f"must be 1 to {_MAX_GATEWAYS}", path="$.routing.gateways")
        if self.gateways > 1 and self.knows is Knows.ENGINES:
            raise ConfigError(
                "several gateways that know the engines are one",
                path="$.routing.gateways",
                remedy="set routing.knows: bookings",
            )
        if not self.temperature >= 0:
            raise ConfigError("must be 0 or more", path="$.routing.temperature")
        if not self.exchange_s > 0:
            raise ConfigError("must be above 0", path="$.routing.exchange_s")
        if not self.hold_s >= 0 or not 0 <= self.overtaken_s < math.inf:
            raise ConfigError("hold_s and overtaken_s must be 0 or more", path="$.routing")
        if self.knows is Knows.ENGINES and math.isfinite(self.hold_s):
            raise ConfigError(
                "a gateway holds requests by its bookings",
                path="$.routing.hold_s",
                remedy="set routing.knows: bookings",
            )

    def check(self, admission: AdmissionKind) -> None:
        """Refuses an admission that needs bookings where there are none.

        Raises:
            ConfigError: as said.
        """
        if admission is not AdmissionKind.NONE and self.knows is Knows.ENGINES:
            raise ConfigError(
                f"{admission.value!r} judges by bookings",
                path="$.admission",
                remedy="set routing.knows: bookings",
            )
