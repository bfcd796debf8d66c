"""The requests in flight, as the scheduler side sees them: their scope and their keys."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvist.connectors.identity import lora_id, multimodal_extras
from kvist.connectors.plan import KeyChain, SaveCursor
from kvist.core.hints import Finish, Hints
from kvist.core.keys import RequestScope, seed_bytes
from kvist.core.outcome import Tier
from kvist.native import chain_keys, digest

TENANT_PARAM = "kvist.tenant"
FINISH_PARAM = "kvist.finish"  # `tool_use`, `end_turn` or `sub_agent`
SESSION_PARAM = "kvist.session"  # what a recorded trace groups requests by
SAVE_PARAM = "kvist.save"  # true: its blocks are for another engine, whoever has asked for them
COMPUTED_PARAM = "kvist.computed"  # tokens of the prompt that another engine has computed
_MAX_TENANT_CHARS = 64


@dataclass(slots=True)
class Sequence:
    """One request: its keys, how far it was saved, and what its last load brought from where."""

    request: Any
    chain: KeyChain
    cursor: SaveCursor = field(default_factory=SaveCursor)
    loaded: dict[Tier, int] = field(default_factory=dict)
    tenant: str = ""
    no_load: bool = False  # a load was tried and gave nothing; cleared when the request runs
    arrived_s: float = 0.0
    asked: bool = False  # its prompt was counted (`connectors/reuse.py`)
    no_blend: bool = False  # a blend was tried or would spare nothing; cleared when it runs
    indexed: int = 0  # blocks whose text can be found
    tainted_from: int | None = None  # from this token on the engine's own hit is blended KV
    blended_from: int | None = None  # from this token on its KV is blended, or will be
    must_save: bool = False  # all its blocks are saved, likely to be asked for or not
    handed_tokens: int = 0  # that another engine computed and that may still be waited for

    def clean_tokens(self, tokens: int) -> int:
        """How many of the first `tokens` have KV that a pass over the whole prompt gives."""
        return min(t for t in (tokens, self.tainted_from, self.blended_from) if t is not None)


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


def tenant_of(request: Any) -> str:
    """Whose share of DRAM a request's blocks take: a name that the client gives, else its salt.

    A long name is taken by its digest, which bounds what a client can make us keep.
    """
    named = _told(request, TENANT_PARAM)
    tenant = named if isinstance(named, str) else request.cache_salt or ""
    return tenant if len(tenant) <= _MAX_TENANT_CHARS else digest(tenant.encode()).hex()


def session_of(request: Any) -> str:
    """The conversation that a client says a request belongs to; empty if it says nothing."""
    named = _told(request, SESSION_PARAM)
    return named if isinstance(named, str) else ""


def must_save(request: Any) -> bool:
    """Whether a request computes a prompt for another engine."""
    return _told(request, SAVE_PARAM) is True


def handed_tokens_of(request: Any) -> int:
    """Tokens of a request's prompt that another engine is said to have computed."""
    told = _told(request, COMPUTED_PARAM)
    return min(told, request.num_prompt_tokens) if type(told) is int and told > 0 else 0


def hints_of(request: Any) -> Hints:
    """What is known of a request that has ended.

    The engine says whether it stopped by itself, not why: a tool call looks like the end of a
    turn. Who knows better (a gateway, an agent) says so in `kv_transfer_params`. Only full blocks
    are stored, so there is no partial one.
    """
    told = _told(request, FINISH_PARAM)
    stopped = getattr(getattr(request, "status", None), "name", "") == "FINISHED_STOPPED"
    finish = Finish.END_TURN if stopped else Finish.UNKNOWN
    if isinstance(told, str) and told.upper() in Finish.__members__:
        finish = Finish[told.upper()]
    return Hints(finish, request.num_tokens - request.num_prompt_tokens)


def _told(request: Any, name: str) -> object:
    told = getattr(request, "kv_transfer_params", None)
    return told.get(name) if isinstance(told, Mapping) else None


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
