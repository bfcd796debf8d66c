"""What the body of a request says, as far as the gateway has to know it.

The fields below are checked here; what the gateway does not know goes to the engine as it came.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvist.gateway.faults import Fault

MOST_STOPS = 64
SESSION = "X-Session-Id"
DEADLINE = "X-Deadline-S"
MOST_DEADLINE_S = 86_400.0
_MOST_NAME = 512
_MOST_CHOICES = 128
_MOST_TOKENS = (1 << 31) - 1
_MOST_TEMPERATURE = 100.0
_SAID_CHARS = 120


class Endpoint(Enum):
    """The paths whose requests are routed."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    EMBEDDINGS = "/v1/embeddings"


_Name = Annotated[str, Meta(max_length=_MOST_NAME)]
_Tokens = Annotated[int, Meta(ge=0, le=_MOST_TOKENS)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Stops = Annotated[list[str], Meta(max_length=MOST_STOPS)]


class StreamOptions(msgspec.Struct):
    """Of `stream_options`."""

    include_usage: bool | None = None


class Body(msgspec.Struct):
    """The fields that the gateway reads, of any endpoint."""

    model: _Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=_MOST_CHOICES)] | None = None
    max_tokens: _Tokens | None = None
    max_completion_tokens: _Tokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=_MOST_TEMPERATURE)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: str | _Stops | None = None
    priority: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    user: _Name | None = None
    session_id: _Name | None = None
    cache_salt: _Name | None = None
    return_token_ids: bool | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    input: str | list[Any] | None = None


class Draining(msgspec.Struct, forbid_unknown_fields=True):
    """What the operator asks of a replica, by its URL."""

    replica: str
    draining: bool = True


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was read: `payload` is all of its body, `fields` what is known of it."""

    endpoint: Endpoint
    payload: dict[str, Any]
    fields: Body

    @property
    def streams(self) -> bool:
        """Whether the answer comes as events."""
        return bool(self.fields.stream) and self.endpoint is not Endpoint.EMBEDDINGS

    @property
    def is_single(self) -> bool:
        """Whether there is one answer to one prompt."""
        prompt = self.fields.prompt
        several = isinstance(prompt, list) and (
            not prompt or (not isinstance(prompt[0], int) and len(prompt) > 1)
        )
        return (self.fields.n or 1) == 1 and not several

    @property
    def most_tokens(self) -> int | None:
        """Tokens that an answer may have, if the request says so."""
        limit = self.fields.max_completion_tokens
        return self.fields.max_tokens if limit is None else limit


def read_body(endpoint: Endpoint, body: bytes) -> Asked:
    """What a body asks.

    Raises:
        Fault: 400, it is not JSON in UTF-8, or a field cannot be meant.
    """
    try:
        payload = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise _bad(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(payload, dict):
        raise _bad("the body is not a JSON object", code="invalid_json")
    try:
        fields = msgspec.convert(payload, Body, strict=False)
    except (msgspec.ValidationError, RecursionError, OverflowError) as error:
        text = str(error)
        _, _, where = text.partition("`$.")
        raise _bad(text, code="invalid_value", param=where.rstrip("`") or None) from error
    asked = Asked(endpoint, payload, fields)
    _check(asked)
    return asked


def written(payload: dict[str, Any]) -> bytes:
    """A body that was read, and changed, as engines get it.

    Raises:
        Fault: 400, a number in it cannot be written as JSON.
    """
    try:
        return msgspec.json.encode(payload)
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        raise _bad(f"the body: {error}", code="invalid_value") from error


def _check(asked: Asked) -> None:
    fields = asked.fields
    needed = {
        Endpoint.CHAT: ("messages", fields.messages),
        Endpoint.COMPLETIONS: ("prompt", fields.prompt),
        Endpoint.EMBEDDINGS: ("input", fields.input or fields.messages),
    }
    name, value = needed[asked.endpoint]
    embeds = asked.endpoint is Endpoint.COMPLETIONS and asked.payload.get("prompt_embeds")
    if not value and not embeds:
        raise _bad(f"`{name}` is missing or empty", code="missing_required_parameter", param=name)
    prompt = fields.prompt
    if asked.endpoint is Endpoint.COMPLETIONS and isinstance(prompt, list) and prompt:
        for item in prompt if not isinstance(prompt[0], int) else [prompt]:
            if not isinstance(item, str) and not _are_tokens(item):
                raise _bad("`prompt` is neither text nor tokens", code="invalid_value", param=name)


def _are_tokens(item: Any) -> bool:
    return (
        isinstance(item, list)
        and bool(item)
        and all(type(token) is int and 0 <= token <= _MOST_TOKENS for token in item)
    )


def _bad(message: str, *, code: str, param: str | None = None) -> Fault:
    if len(message) > _SAID_CHARS * 3:
        message = message[: _SAID_CHARS * 3] + "…"
    return Fault(HTTPStatus.BAD_REQUEST, message, code=code, param=param)
