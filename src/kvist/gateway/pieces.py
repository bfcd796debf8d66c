"""Tokens of texts whose parts come again: a chat is mostly what it was a turn ago.

Special tokens cut a text into pieces that a tokenizer reads apart from each other: `A<|end|>B` has
the tokens of `A`, the special one, and those of `B`. A chat template puts them around each message,
so of a chat that grows only the new messages have to be read; the tokens of the others are kept.

That holds for tokenizers whose steps look at one piece at a time, which is seen from their file:
byte-level ones, as Llama 3, Qwen, Mistral's newer models and SmolLM2 have. Others (SentencePiece's,
which put a space before the first piece only) read the whole text each time.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

MOST_BYTES = 64 << 20  # of kept pieces and their tokens
_LEAST_CHARS = 64  # of a piece that is kept: shorter ones are read as soon as found
_TOKEN_BYTES = 4
_PIECE_BYTES = 200  # of a kept piece besides its text and tokens
_APART = {"Digits", "Split", "Punctuation", "Whitespace", "WhitespaceSplit", "BertPreTokenizer"}
_NORMALIZERS = {"NFC", "NFKC", "NFD", "NFKD", "Lowercase"}


def reads_apart(spec: Mapping[str, Any]) -> bool:
    """Whether the tokenizer of this `tokenizer.json` reads the pieces between its added tokens
    each by itself."""
    return (
        spec.get("truncation") is None
        and spec.get("padding") is None
        and _each_alone(spec.get("pre_tokenizer"), _APART)
        and _each_alone(spec.get("normalizer"), _NORMALIZERS)
        and all(
            token["content"]
            and not (token["normalized"] or token["lstrip"] or token["rstrip"])
            and not token["single_word"]
            for token in spec.get("added_tokens", ())
        )
    )


def _each_alone(step: Mapping[str, Any] | None, known: set[str]) -> bool:
    """Whether a step of a tokenizer does the same to a piece whatever stands before it."""
    if step is None:
        return True
    kind = step["type"]
    if kind == "Sequence":
        parts = step.get("pretokenizers") or step.get("normalizers") or []
        return all(_each_alone(part, known) for part in parts)
    if kind == "ByteLevel":
        return not step.get("add_prefix_space")
    return kind in known


class Pieces:
    """Reads texts with a tokenizer for which `reads_apart` holds. Thread-safe."""

    def __init__(
        self, tokenizer: Tokenizer, spec: Mapping[str, Any], most_bytes: int = MOST_BYTES
    ) -> None:
        """`spec` is the tokenizer's file; at most `most_bytes` are kept."""
        self._tokenizer, self._most = tokenizer, most_bytes
        self._added = {token["content"]: token["id"] for token in spec.get("added_tokens", ())}
        longest_first = sorted(self._added, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self._kept: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self.kept_bytes = 0

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text to which no special ones are added."""
        found: list[int] = []
        parts = self._cut.split(text) if self._added else [text]
        for place, part in enumerate(parts):
            if place % 2:
                found.append(self._added[part])
            elif part:
                found.extend(self._piece(part))
        return found

    def _piece(self, text: str) -> array[int]:
        if len(text) < _LEAST_CHARS:
            return self._read(text)
        with self._lock:
            found = self._kept.get(text)
            if found is not None:
                self._kept.move_to_end(text)
                return found
        found = self._read(text)  # beside the lock: it takes long
        with self._lock:
            self._keep(text, found)
        return found

    def _read(self, text: str) -> array[int]:
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return array("I", encoding.ids)

    def _keep(self, text: str, tokens: array[int]) -> None:
        size = _size_bytes(text, tokens)
        if text in self._kept or size > self._most:
            return
        self._kept[text] = tokens
        self.kept_bytes += size
        while self.kept_bytes > self._most:
            self.kept_bytes -= _size_bytes(*self._kept.popitem(last=False))


def _size_bytes(text: str, tokens: array[int]) -> int:
    # A string of other letters than Latin ones takes up to four bytes for each.
    return _PIECE_BYTES + 4 * len(text) + _TOKEN_BYTES * len(tokens)
