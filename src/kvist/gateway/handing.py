"""From a replica's events to what the client gets: as it came, cut, or not at all."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec

from kvist.gateway.ask import Asked
from kvist.gateway.delivered import Chunk, Delivered, Usage
from kvist.gateway.resume import Plan, Way
from kvist.gateway.splice import Splice, without_ids
from kvist.gateway.sse import DONE, payload_of
from kvist.gateway.upstream import Broken

_decoder = msgspec.json.Decoder(Chunk)


class _Error(msgspec.Struct):
    code: int | str | None = None
    message: str = ""


class Handing:
    """One attempt's events, on their way to the client.

    Attributes:
        done: the engine said that the stream has ended.
        tokens: that came in this attempt; where they have no ids, events with text.
        usage: what the engine last said of the request's tokens.
        broken: the engine gave the request up; what `take` returned before is the client's.
    """

    def __init__(self, asked: Asked, plan: Plan, delivered: Delivered, *, tracked: bool) -> None:
        """`tracked`: token ids are asked for, by the client or only by us."""
        self._delivered = delivered
        self._tracked = tracked
        self._hides_ids = tracked and not asked.fields.return_token_ids
        is_first = plan.way is Way.AGAIN and not delivered.id
        self._splice = None if is_first else Splice(plan, delivered)
        self.done = False
        self.tokens = 0
        self.usage: Usage | None = None
        self.broken: Broken | None = None

    @property
    def delivered_tokens(self) -> int:
        """Tokens that the client has, of all attempts."""
        return len(self._delivered.tokens) or self.tokens

    def take(self, events: list[bytes]) -> bytes:
        """What the client gets of them, up to the one at which the engine gave the request up.

        Raises:
            Fault: see `Splice.fit`.
        """
        out = []
        for event in events:
            try:
                out.append(self._one(event))
            except Broken as broken:
                self.broken = broken
                break
        return b"".join(out)

    def _one(self, event: bytes) -> bytes:
        data = payload_of(event)
        if data is None:
            return event
        if data == b"[DONE]":
            self.done = True
            return DONE
        try:
            chunk = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise Broken(f"an event that is none: {error}") from error
        if chunk.error is not None:
            self._judge(chunk.error)
        if chunk.is_broken_off:
            raise Broken("the engine gave it up")
        self.tokens += chunk.tokens or sum(bool(choice.texts()) for choice in chunk.choices)
        if self._splice is not None:
            return self._spliced(self._splice, data)
        self.usage = chunk.usage or self.usage
        self._delivered.note(chunk)
        if not self._hides_ids:
            return event
        return b"" if chunk.is_hollow else without_ids(event)

    def _spliced(self, splice: Splice, data: bytes) -> bytes:
        fitted, is_whole = splice.fit(msgspec.json.decode(data))
        if fitted is None:
            return b""
        chunk = msgspec.convert(fitted, Chunk)
        self.usage = chunk.usage or self.usage
        self._delivered.note(chunk, is_whole=is_whole)
        if self._hides_ids and chunk.is_hollow:
            return b""
        event = b"data: " + msgspec.json.encode(fitted) + b"\n\n"
        return without_ids(event) if self._hides_ids else event

    def _judge(self, given: Any) -> None:
        """An error in a stream: of the engine, unless it says that it is the request's.

        Raises:
            Broken: it is the engine's.
        """
        try:
            error = msgspec.convert(given, _Error)
        except msgspec.MsgspecError:
            error = _Error()
        is_clients = isinstance(error.code, int) and (
            HTTPStatus.BAD_REQUEST <= error.code < HTTPStatus.INTERNAL_SERVER_ERROR
        )
        if not is_clients:
            raise Broken(f"the engine failed: {error.message}")
        self._delivered.finished = True


def closing(delivered: Delivered, *, with_usage: bool) -> bytes:
    """The end of a stream whose answer was delivered whole, as the engine would have said it."""
    if not with_usage or delivered.usage_given:
        return DONE
    prompt, completion = len(delivered.prompt), len(delivered.tokens)
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    is_chat = "text" not in delivered.chars
    event: dict[str, Any] = {
        "id": delivered.id,
        "object": "chat.completion.chunk" if is_chat else "text_completion",
        "created": delivered.created,
        "model": delivered.model,
        "choices": [],
        "usage": usage,
    }
    return b"data: " + msgspec.json.encode(event) + b"\n\n" + DONE
