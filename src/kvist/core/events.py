"""KV events: what the store tells whoever keeps an index of it."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.core.keys import Key
from kvist.core.outcome import Tier


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks became present in a tier."""

    keys: tuple[Key, ...]
    parent: Key | None
    tier: Tier


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks left a tier."""

    keys: tuple[Key, ...]
    tier: Tier


@dataclass(frozen=True, slots=True)
class Cleared:
    """Every block left every tier."""


KvEvent = Stored | Removed | Cleared
