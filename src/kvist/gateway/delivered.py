"""What a client has got of a stream: enough to go on elsewhere without a token lost or doubled.

An engine that is asked for `return_token_ids` names the tokens of each event. Text may lag behind
them: a token that ends in the middle of a character has no text yet. Behind an event of one token
that has text nothing is held back (engines give text only up to whole characters), so another
engine can go on from there with the tokens as its prompt. Such a place is an *anchor*.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

_BROKEN_OFF = {"abort", "error"}


class Delta(msgspec.Struct):
    """Of a chat's event. `content` is UNSET where the engine's parser kept the text back."""

    role: str | None = None
    content: str | UnsetType | None = UNSET
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class ChunkChoice(msgspec.Struct):
    """One answer's part of an event."""

    index: int = 0
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: Any = None

    @property
    def is_hollow(self) -> bool:
        """Whether there is nothing in it but token ids."""
        delta = self.delta
        return (
            delta is not None
            and delta.content is UNSET
            and self.token_ids is not None
            and delta.role is None
            and not delta.tool_calls
            and not self.texts()
            and self.finish_reason is None
            and self.logprobs is None
        )

    def texts(self) -> dict[str, str]:
        """What it says, by the name of the field; nothing empty."""
        delta = self.delta
        if delta is None:
            return {"text": self.text} if self.text else {}
        named = {
            "content": delta.content,
            "reasoning": delta.reasoning,
            "reasoning_content": delta.reasoning_content,
        }
        return {name: text for name, text in named.items() if isinstance(text, str) and text}


class PromptDetails(msgspec.Struct):
    """Of `usage.prompt_tokens_details`."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Tokens of a request."""

    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptDetails | None = None


class Chunk(msgspec.Struct):
    """An event of a stream, as far as it matters here."""

    id: str | None = None
    created: int | float | None = None
    model: str | None = None
    choices: list[ChunkChoice] = []
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    error: Any = None

    @property
    def tokens(self) -> int:
        """Tokens in it, by their ids."""
        count = 0
        for choice in self.choices:
            count += len(choice.token_ids or ())
        return count

    @property
    def is_broken_off(self) -> bool:
        """Whether the engine gave the request up, which nobody asked of it."""
        return any(choice.finish_reason in _BROKEN_OFF for choice in self.choices)

    @property
    def is_hollow(self) -> bool:
        """Whether it is there for its token ids alone: an engine sends none if nobody asks."""
        return bool(self.choices) and all(choice.is_hollow for choice in self.choices)


class Delivered:
    """The one answer of a stream, as far as its client has it.

    Attributes:
        prompt: the prompt's tokens, as the engine saw them; empty until they are known.
        tokens: the answer's.
        chars: characters of text, by field.
        anchor_tokens, anchor_chars: the last place to go on from; 0: only from the start.
        has_role: the chat's first event, which has no token, was delivered.
        finished: nothing is missing but the stream's end.
        usage_given: neither is the count of tokens.
        is_plain: all text was `text` or `content`, as the tokens give it.
        can_cut: all that was delivered is text, with the ids of its tokens.
    """

    def __init__(self) -> None:
        self.id: str | None = None
        self.created: int | float | None = None
        self.model: str | None = None
        self.prompt, self.tokens = array("I"), array("I")
        self.chars: dict[str, int] = {}
        self.anchor_tokens = self.anchor_chars = 0
        self.has_role = self.finished = self.usage_given = False
        self.is_plain = self.can_cut = True

    @property
    def is_empty(self) -> bool:
        """Whether a request that is sent again from the start doubles nothing."""
        return not (self.tokens or self.chars or self.finished) and self.can_cut

    def note(self, chunk: Chunk, *, is_whole: bool = True) -> None:
        """Counts an event that is handed on. `is_whole`: it is as an engine sent it, not cut."""
        if not self.id:
            self.id, self.created, self.model = chunk.id, chunk.created, chunk.model
        if chunk.usage is not None and not chunk.choices:
            self.usage_given = True
        for choice in chunk.choices:
            prompt = choice.prompt_token_ids or chunk.prompt_token_ids
            if prompt and not self.prompt:
                self.prompt = array("I", prompt)
            self._note_choice(choice, is_whole=is_whole)

    def _note_choice(self, choice: ChunkChoice, *, is_whole: bool) -> None:
        texts, ids, delta = choice.texts(), choice.token_ids or (), choice.delta
        self.tokens.extend(ids)
        for name, text in texts.items():
            self.chars[name] = self.chars.get(name, 0) + len(text)
        if delta is not None:
            self.has_role |= delta.role is not None
            if delta.tool_calls:
                self.can_cut = False
            if ids and (delta.content is UNSET or set(texts) - {"content"}):
                self.is_plain = False
        if texts and not ids and not choice.finish_reason:
            self.can_cut = False  # an engine that does not name its tokens
        if is_whole and len(ids) == 1 and texts:
            self.anchor_tokens = len(self.tokens)
            self.anchor_chars = self.chars.get("text" if delta is None else "content", 0)
        self.finished |= choice.finish_reason is not None
