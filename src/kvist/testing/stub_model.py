"""A model that is a function: the next token follows from the tokens before it, and nothing else.

Tokens 0 to 255 are bytes, those from `FIRST_WORD` words. Some characters take several tokens, as
with byte-level tokenizers, so that text lags behind tokens. With a penalty the count of output
tokens matters too, with a temperature a random number: as with real engines, such a request cannot
be continued from its tokens, or not at all.
"""

from __future__ import annotations

import codecs
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FIRST_WORD = 1000
EOS = 999
_WORDS = (" the", " cache", " of", " keys", " holds", " a", " block", "\n", ",", " and", ' "', "}")
_LONG = ("é", "→", "字", "😀")  # their bytes come one token at a time
# The first byte of each → the others; no two begin with the same byte.
_LEADS = {text.encode()[0]: tuple(text.encode()[1:]) for text in _LONG}
_LONG_IN_16 = 5
_EOS_IN = 97


@dataclass(slots=True)
class Request:
    """What the model is asked. `tokens` are the prompt's."""

    tokens: list[int]
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    penalised: bool = False
    ignores_eos: bool = False
    stops: tuple[str, ...] = ()


@dataclass(slots=True)
class Step:
    """One token: its text, as far as it is known to be whole, and why it is the last, if it is."""

    token: int
    text: str
    finish: str | None = None
    stop: str | None = None


@dataclass(slots=True)
class _Text:
    """Text of tokens; what could be the beginning of a stop string is held back."""

    stops: tuple[str, ...]
    decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    whole: str = ""
    given: int = 0

    def add(self, token: int) -> str | None:
        """Takes a token; returns a stop string that is complete now."""
        self.whole += self.decoder.decode(token_bytes(token))
        found = [(self.whole.find(stop), stop) for stop in self.stops if stop in self.whole]
        if not found:
            return None
        place, stop = min(found)
        self.whole = self.whole[:place]
        return stop

    def take(self, *, is_last: bool) -> str:
        """What may be given now."""
        held = 0 if is_last else max((len(stop) - 1 for stop in self.stops), default=0)
        end = max(self.given, len(self.whole) - held)
        text, self.given = self.whole[self.given : end], end
        return text


def generate(request: Request) -> Iterator[Step]:
    """The answer, a token at a time."""
    history = zlib.crc32(_packed(request.tokens))
    pending = _pending(request.tokens)
    dice = random.Random(request.seed)
    text = _Text(request.stops)
    for count in range(1, request.max_tokens + 1):
        luck = dice.getrandbits(32) if request.temperature > 0 else 0
        mixed = zlib.crc32(_packed([luck, count if request.penalised else 0]), history)
        token = pending.pop(0) if pending else _drawn(mixed, eos=not request.ignores_eos)
        if not pending and token in _LEADS:
            pending = list(_LEADS[token])
        history = zlib.crc32(_packed([token]), history)
        if token == EOS:
            yield Step(token, text.take(is_last=True), "stop")
            return
        stop = text.add(token)
        finish = "stop" if stop is not None else "length" if count == request.max_tokens else None
        yield Step(token, text.take(is_last=finish is not None), finish, stop)
        if finish is not None:
            return


def token_bytes(token: int) -> bytes:
    """What a token stands for."""
    if token >= FIRST_WORD:
        return _WORDS[(token - FIRST_WORD) % len(_WORDS)].encode()
    return b"" if token == EOS else bytes([token & 0xFF])


def tokens_of(text: str) -> list[int]:
    """A prompt's tokens: its bytes."""
    return list(text.encode())


def chat_tokens(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """A chat's tokens."""
    lines = [f"{m.get('role')}: {m.get('content')}\n" for m in messages]
    return tokens_of("".join(lines) + "assistant:")


def _drawn(mixed: int, *, eos: bool) -> int:
    if eos and mixed % _EOS_IN == 0:
        return EOS
    if (mixed >> 8) % 16 < _LONG_IN_16:
        return _LONG[(mixed >> 12) % len(_LONG)].encode()[0]
    return FIRST_WORD + (mixed >> 16) % len(_WORDS)


def _pending(tokens: Sequence[int]) -> list[int]:
    """Bytes that a character at the prompt's end still lacks."""
    for there in range(min(3, len(tokens))):  # bytes behind its first one
        lead, *said = tokens[len(tokens) - 1 - there :]
        rest = _LEADS.get(lead, ())
        if there < len(rest) and tuple(said) == rest[:there]:
            return list(rest[there:])
    return []


def _packed(tokens: Sequence[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)
