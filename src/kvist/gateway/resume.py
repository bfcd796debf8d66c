"""How a request goes on when its replica broke: with which body, and what of it is known already.

Three ways, the first that is exact:

* *again*: the client has nothing yet. The request is sent as it came, whatever it asks.
* *continued*: prompt and delivered tokens, up to the last anchor, become the prompt of a
  completion, and what was delivered behind the anchor is computed once more and dropped. Exact if
  the next token depends on nothing but the tokens before it: greedy decoding, and no field besides
  those in `_PLAIN`. A chat's prompt is taken from the tokens that the engine said it read.
* *replayed*: the request is sent as it came, and what was delivered is computed once more and
  dropped. Exact for whatever is the same each time (greedy decoding or a seed), with penalties,
  stop strings, tools and grammars; it costs the decoding.

Whatever is computed once more is compared with what was delivered, token by token
(`splice.py`), so that an answer that comes out differently is an error and never a mixture.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from http import HTTPStatus
from typing import Any

import msgspec

from kvist.gateway.ask import Asked, Endpoint, written
from kvist.gateway.delivered import Delivered
from kvist.gateway.faults import Fault
from kvist.gateway.settings import Migrate

_DEFAULT_COMPLETION_TOKENS = 16  # of OpenAI's API
# What a completion that continues may be given as it came.
_KEPT = {
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "stream", "stream_options"),
    *("user", "ignore_eos", "cache_salt", "priority", "session_id", "request_id"),
    *("skip_special_tokens", "kv_transfer_params"),
}
# What only shapes the prompt, or counts tokens, and is accounted for.
_PLAIN = _KEPT | {
    *("messages", "prompt", "max_tokens", "max_completion_tokens", "n", "return_token_ids"),
    *("add_special_tokens", "add_generation_prompt", "chat_template", "chat_template_kwargs"),
}
# Numbers that say nothing where they are 0.
_NOTHING_AT_ZERO = {"frequency_penalty", "presence_penalty", "min_tokens"}


class Way(Enum):
    """How a request goes on."""

    AGAIN = "again"
    CONTINUED = "continued"
    REPLAYED = "replayed"


@dataclass(frozen=True, slots=True)
class Plan:
    """The next attempt at a request.

    Attributes:
        path: of the API.
        body: JSON.
        base_tokens: delivered tokens that are part of its prompt.
        known: tokens that it will give first and that were delivered.
        known_chars: characters of text that belong to them, by field.
        as_chat: it is a completion whose client expects a chat.
    """

    way: Way
    path: str
    body: bytes
    base_tokens: int = 0
    known: array[int] = field(default_factory=lambda: array("I"))
    known_chars: dict[str, int] = field(default_factory=dict)
    as_chat: bool = False


def tracks(asked: Asked, migrate: Migrate) -> bool:
    """Whether the engine is asked for token ids: for one plain stream, unless it would differ.

    With `echo`, an engine that is asked for ids leaves the prompt's text out.
    """
    return (
        migrate != "off"
        and asked.streams
        and asked.is_single
        and not asked.payload.get("echo")
        and not asked.payload.get("use_beam_search")
    )


def with_ids(asked: Asked) -> bytes:
    """The request's body, asking for token ids.

    Raises:
        Fault: 400, a number in it cannot be written as JSON.
    """
    return written(asked.payload | {"return_token_ids": True})


def plan_next(
    asked: Asked, body: bytes, delivered: Delivered, migrate: Migrate, context_tokens: int | None
) -> Plan:
    """How a stream goes on; `body` was sent first, `context_tokens` is the model's limit.

    Raises:
        Fault: not exactly, or not as `migrate` wants it.
    """
    path = asked.endpoint.value
    if delivered.is_empty and (asked.is_single or not delivered.id):
        return Plan(Way.AGAIN, path, body)
    if not tracks(asked, migrate):
        raise lost("this kind of stream cannot go on elsewhere")
    if not delivered.can_cut:
        raise lost("a call of a tool was half said")
    is_same_each_time = asked.fields.temperature == 0 or asked.fields.seed is not None
    if not is_same_each_time and migrate != "sampled":
        raise lost("its tokens were drawn at random, without a seed")
    if asked.fields.temperature == 0 or not is_same_each_time:
        continued = _continued(asked, delivered, context_tokens, exact=is_same_each_time)
        if continued is not None:
            return continued
    if not is_same_each_time:
        raise lost("its tokens were drawn at random, without a seed")
    return Plan(
        Way.REPLAYED, path, body, known=delivered.tokens[:], known_chars=dict(delivered.chars)
    )


def lost(why: str) -> Fault:
    """A stream that ends here."""
    return Fault(
        HTTPStatus.BAD_GATEWAY, f"the replica broke off, and {why}", code="stream_interrupted"
    )


def _continued(
    asked: Asked, delivered: Delivered, context_tokens: int | None, *, exact: bool
) -> Plan | None:
    """The request as a completion of what was delivered; None where that is not the same."""
    anchor = delivered.anchor_tokens
    if not anchor or not delivered.prompt or not delivered.is_plain or not _is_plain(asked):
        return None
    known = delivered.tokens[anchor:]
    limit = _limit(asked, delivered, None if exact else context_tokens)
    if limit is None or limit <= anchor or (known and not exact):
        return None
    is_chat = asked.endpoint is Endpoint.CHAT
    payload = {name: value for name, value in asked.payload.items() if name in _KEPT}
    payload |= {
        "prompt": [*delivered.prompt, *delivered.tokens[:anchor]],
        "max_tokens": limit - anchor,
        "return_token_ids": True,
    }
    said = delivered.chars.get("content" if is_chat else "text", 0)
    return Plan(
        Way.CONTINUED,
        Endpoint.COMPLETIONS.value,
        msgspec.json.encode(payload),
        base_tokens=anchor,
        known=known,
        known_chars={"text": said - delivered.anchor_chars},
        as_chat=is_chat,
    )


def _limit(asked: Asked, delivered: Delivered, context_tokens: int | None) -> int | None:
    """Tokens that the whole answer may have; None: the engine decides, by what we cannot see."""
    if asked.endpoint is Endpoint.COMPLETIONS:
        limit = asked.fields.max_tokens
        return _DEFAULT_COMPLETION_TOKENS if limit is None else limit
    if asked.most_tokens is not None:
        return asked.most_tokens
    return None if context_tokens is None else context_tokens - len(delivered.prompt)


def _is_plain(asked: Asked) -> bool:
    """Whether nothing but tokens decides on the next one."""
    named = {name for name, value in asked.payload.items() if not _says_nothing(name, value)}
    return named <= _PLAIN and all(_is_text(m.get("content")) for m in asked.fields.messages or ())


def _says_nothing(name: str, value: Any) -> bool:
    if value is None or value is False or value in ([], {}, ""):
        return True
    return name in _NOTHING_AT_ZERO and value == 0


def _is_text(content: Any) -> bool:
    if isinstance(content, list):  # parts, of which images are no tokens that could be sent
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return content is None or isinstance(content, str)
