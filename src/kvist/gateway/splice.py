"""Fits the stream of a later attempt to what its client has of an earlier one."""

from __future__ import annotations

import re
from typing import Any

from kvist.gateway.delivered import Delivered
from kvist.gateway.resume import Plan, lost

_IDS = re.compile(rb'"((?:prompt_)?token_ids)":\s*\[[0-9,\s]*\]')
_CHAT_CHUNK = "chat.completion.chunk"


def without_ids(event: bytes) -> bytes:
    """An event as an engine sends it when nobody asks for token ids.

    Inside a JSON string the quotes around the name would be escaped, so that only fields match.
    """
    return _IDS.sub(rb'"\1":null', event)


class Splice:
    """Cuts what is known off the beginning of a stream, and makes the rest one with the first."""

    def __init__(self, plan: Plan, delivered: Delivered) -> None:
        self._plan, self._delivered = plan, delivered
        self._passed = 0  # known tokens that came again
        self._chars = dict(plan.known_chars)  # characters still to be dropped, by field

    def fit(self, event: dict[str, Any]) -> tuple[dict[str, Any] | None, bool]:
        """What the client gets of an event, if anything, and whether it is the whole of it.

        Raises:
            Fault: a token came out differently the second time.
        """
        if self._delivered.id:
            event["id"], event["created"] = self._delivered.id, self._delivered.created
            event["model"] = self._delivered.model
        self._count(event.get("usage"))
        if self._plan.as_chat:
            event["object"] = _CHAT_CHUNK
        choices = event.get("choices")
        if not choices:
            return event, True
        choice = choices[0]
        if self._plan.as_chat:
            _to_chat(choice)
        delta = choice.get("delta")
        if self._delivered.has_role and isinstance(delta, dict) and "role" in delta:
            del delta["role"]
            if not choice.get("token_ids") and not choice.get("finish_reason"):
                return None, True
        return self._cut(event, choice)

    def _cut(
        self, event: dict[str, Any], choice: dict[str, Any]
    ) -> tuple[dict[str, Any] | None, bool]:
        ids = choice.get("token_ids") or []
        known = self._plan.known
        left = len(known) - self._passed
        if left <= 0 and not any(self._chars.values()):
            return event, True
        again = ids[:left]
        if list(known[self._passed : self._passed + len(again)]) != again:
            raise lost("another one computes other tokens for it")
        if choice.get("finish_reason") and len(again) < left:
            raise lost("another one ends it sooner")
        self._passed += len(again)
        choice["token_ids"] = ids[len(again) :]
        said = self._drop_text(choice)
        _drop_logprobs(choice.get("logprobs"), len(again))
        if not said and not choice["token_ids"] and not choice.get("finish_reason"):
            return None, False
        return event, False

    def _drop_text(self, choice: dict[str, Any]) -> bool:
        """Drops known text; returns whether some is left."""
        said = False
        holder = choice if choice.get("delta") is None else choice["delta"]
        for name, text in holder.items():
            if not isinstance(text, str) or name not in _TEXTS:
                continue
            field = "text" if self._plan.as_chat else name
            dropped = min(len(text), self._chars.get(field, 0))
            if dropped:
                self._chars[field] -= dropped
            holder[name] = text[dropped:]
            said |= dropped < len(text)
        return said

    def _count(self, usage: Any) -> None:
        """Tokens of the answer that were a prompt's this time count as the answer's."""
        base = self._plan.base_tokens
        if base and isinstance(usage, dict):
            usage["prompt_tokens"] -= base
            usage["completion_tokens"] = (usage.get("completion_tokens") or 0) + base


_TEXTS = {"text", "content", "reasoning", "reasoning_content"}


def _to_chat(choice: dict[str, Any]) -> None:
    """A completion's part of an event, as a chat's."""
    choice["delta"] = {"content": choice.pop("text", "") or ""}
    choice.pop("prompt_token_ids", None)


def _drop_logprobs(logprobs: Any, tokens: int) -> None:
    """Drops those of the first tokens: lists beside each other, or one list of entries."""
    if isinstance(logprobs, dict):
        for name, values in logprobs.items():
            if isinstance(values, list):
                logprobs[name] = values[tokens:]
