"""KV events: what the store tells whoever keeps an index of it."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.core.keys import Key
from kvist.core.outcome import Tier


@dataclass(frozen=True, slots=True)
class Content:
    """What is in blocks, said by an engine whose keys are hashes of its own.

    Attributes:
        tokens: little-endian u32, of all the blocks unless some are left out.
        block_tokens: tokens of a block.
        lora: the name of the LoRA adapter, if there is one.
        salt: the tenant's salt, said of the first block of a prompt only.
        named_blocks: how many blocks, from the first, are made of nothing else.
        spec: the kind of attention of the KV cache group, as the engine calls it, if it says so.
    """

    tokens: bytes
    block_tokens: int
    lora: str = ""
    salt: str = ""
    named_blocks: int = 0
    spec: str | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks became present in a tier.

    `content` comes from engines only, and so does a `group` other than 0: which of its KV caches.
    """

    keys: tuple[Key, ...]
    parent: Key | None
    tier: Tier
    content: Content | None = None
    group: int = 0


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks left a tier."""

    keys: tuple[Key, ...]
    tier: Tier
    group: int = 0


@dataclass(frozen=True, slots=True)
class Cleared:
    """Every block left every tier."""


KvEvent = Stored | Removed | Cleared
