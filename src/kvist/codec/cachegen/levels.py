"""The levels of `cachegen`: numbers that payloads carry and words that people write."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvist.core.errors import ConfigError

CACHEGEN = "cachegen"
_PAPER_OFFSET = 100


class Family(Enum):
    """How a level codes: Kvist's own way, or the structure of the paper."""

    TUNED = "tuned"
    PAPER = "paper"


@dataclass(frozen=True, slots=True)
class Level:
    """One level. A higher `rank` within a family is smaller and less exact.

    `nominal_kl` is what the profile predicts for the tuned family: nats a next token, for a
    context of 512 tokens. It is 0 where nothing is predicted. `number` is a promise about bytes.
    """

    family: Family
    rank: int
    nominal_kl: float = 0.0

    @property
    def number(self) -> int:
        return self.rank + (_PAPER_OFFSET if self.family is Family.PAPER else 0)

    @property
    def name(self) -> str:
        """The word in a configuration and in a frame's codec chain."""
        middle = "paper-" if self.family is Family.PAPER else ""
        return f"{CACHEGEN}-{middle}{self.rank}"

    @property
    def summary(self) -> str:
        """What `kvist codec list` says of it."""
        if self.family is Family.PAPER:
            return f"the paper's anchors and deltas, step {self.rank} of 5 from fine to coarse"
        return f"by the model's table, about {self.nominal_kl:.2g} nats a token"


FINEST_KL = 2.0**-16
LEVELS = tuple(
    [Level(Family.TUNED, rank, FINEST_KL * 4 ** (rank - 1)) for rank in range(1, 8)]
    + [Level(Family.PAPER, rank) for rank in range(1, 6)]
)
BY_NAME = {level.name: level for level in LEVELS}
BY_NUMBER = {level.number: level for level in LEVELS}


def level_named(name: str) -> Level:
    """The level that `name` means.

    Raises:
        ConfigError: there is no such level.
    """
    if name not in BY_NAME:
        raise ConfigError(f"unknown codec {name!r}", remedy=f"known: {', '.join(BY_NAME)}")
    return BY_NAME[name]
