"""Scheduler-side state of the requests in flight: their keys, loads and unfinished saves."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvist.connectors.identity import lora_id, multimodal_extras
from kvist.connectors.plan import KeyChain, LoadSpan, SaveCursor
from kvist.core.keys import RequestScope, seed_bytes
from kvist.core.lease import ReadLease, WriteLease
from kvist.core.outcome import Tier
from kvist.native import chain_keys, digest


@dataclass(slots=True)
class Load:
    """Blocks on their way to a request: leased, then (with a job) being copied to its pages."""

    span: LoadSpan
    lease: ReadLease
    tiers: tuple[Tier, ...]
    hits: int = 0


@dataclass(slots=True)
class Save:
    """Blocks being copied from a request's pages into reserved slots."""

    lease: WriteLease
    blocks: range
    indices: tuple[int, ...]  # which of `blocks` the lease reserved
    preemptions: int  # of the request when the save began: a change means its pages are gone


@dataclass(slots=True)
class Sequence:
    """One request."""

    request: Any
    chain: KeyChain
    cursor: SaveCursor = field(default_factory=SaveCursor)
    load: Load | None = None
    copying: Load | None = None
    no_load: bool = False
    loaded: dict[Tier, int] = field(default_factory=dict)
    saves: dict[int, Save] = field(default_factory=dict)

    def drop_load(self) -> None:
        """Gives up blocks that were leased but not promised to the engine."""
        if self.load is not None:
            self.load.lease.release()
            self.load = None


class Scopes:
    """Seeds of requests: keyspace, LoRA adapter and salt, with the adapters' digests cached."""

    def __init__(self, fingerprint: bytes) -> None:
        self._fingerprint = fingerprint
        self._adapters: dict[tuple[str, int, str], str] = {}

    def seed(self, request: Any) -> bytes:
        """The chain seed of a vLLM request.

        Raises:
            ConfigError: its LoRA adapter cannot be read, so its KV cannot be named.
        """
        scope = RequestScope(self._lora(request.lora_request), request.cache_salt or "")
        return digest(seed_bytes(self._fingerprint, scope))

    def _lora(self, lora: Any) -> str:
        if lora is None:
            return ""
        if getattr(lora, "load_inplace", False):
            return uuid.uuid4().hex  # replaced under its own name: shared with nobody
        known = (lora.lora_name, lora.lora_int_id, lora.lora_path)
        if known not in self._adapters:
            self._adapters[known] = lora_id(lora.lora_path)
        return self._adapters[known]


def usable(request: Any) -> bool:
    """Whether a request's KV is named by its token ids at all."""
    embeds = getattr(request, "prompt_embeds", None)
    return request.prompt_token_ids is not None and embeds is None


def new_chain(request: Any, seed: bytes, block_tokens: int) -> KeyChain:
    """The key chain of a vLLM request, multimodal content included."""
    features = [
        (f.identifier, f.mm_position.offset, f.mm_position.length) for f in request.mm_features
    ]
    extras = multimodal_extras(features, block_tokens) if features else None
    chain: Callable[..., list[bytes]] = chain_keys
    return KeyChain(seed, block_tokens, chain, extras)
