"""How long a request's prompt is, and which blocks it begins with: what a router wants to know."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from kvist.gateway.ask import Asked, Endpoint

# Tokens, LoRA adapter and tenant's salt → keys of the whole blocks.
KeysOf = Callable[[Sequence[int], str, str], tuple[bytes, ...]]

_TOKEN_BYTES = 4  # of a text that nobody reads
_AT_ONCE_BYTES = 4096  # a body whose tokens are found in less time than a thread takes to wake


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens of a prompt (a guess, if there are no keys) and keys of its whole blocks."""

    tokens: int
    keys: tuple[bytes, ...] = ()


class ReadsPrompts(Protocol):
    """A model's tokenizer."""

    def text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a prompt."""
        ...

    def chat(self, payload: Mapping[str, Any]) -> list[int]:
        """The tokens of a chat; ValueError: they are not known."""
        ...


class Prompts:
    """Reads prompts with a tokenizer, or guesses their length without one."""

    def __init__(
        self, tokenizer: ReadsPrompts | None, keys_of: KeysOf | None, *, threads: int = 2
    ) -> None:
        self._tokenizer, self._keys_of = tokenizer, keys_of
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvist-tokenizer")

    async def read(self, asked: Asked, body_bytes: int, lora: str) -> Prompt:
        """What is known of the prompt; long ones are read beside the loop."""
        if self._tokenizer is None or asked.endpoint is Endpoint.EMBEDDINGS:
            return Prompt(max(1, body_bytes // _TOKEN_BYTES))
        if body_bytes <= _AT_ONCE_BYTES:
            return self._read(asked, body_bytes, lora)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._read, asked, body_bytes, lora)

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _read(self, asked: Asked, body_bytes: int, lora: str) -> Prompt:
        try:
            tokens = self._tokens(asked)
        except ValueError:  # the engine will know, or say what is wrong with it
            return Prompt(max(1, body_bytes // _TOKEN_BYTES))
        if self._keys_of is None or asked.payload.get("truncate_prompt_tokens"):
            return Prompt(len(tokens))
        return Prompt(len(tokens), self._keys_of(tokens, lora, asked.fields.cache_salt or ""))

    def _tokens(self, asked: Asked) -> Sequence[int]:
        assert self._tokenizer is not None
        if asked.endpoint is Endpoint.CHAT:
            return self._tokenizer.chat(asked.payload)
        prompt = asked.fields.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise ValueError("several prompts")
            prompt = prompt[0]
        if isinstance(prompt, str):
            special = asked.payload.get("add_special_tokens", True)
            return self._tokenizer.text(prompt, add_special_tokens=bool(special))
        return prompt or []
