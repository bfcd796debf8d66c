"""The demo's prompt: a long document and a question about it, as token ids."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvist.bench.document import long_document
from kvist.core.errors import ConfigError

DOCUMENT_TOKENS = 4096
ANSWER_TOKENS = 32
# A model of this size sums up better than it looks up.
QUESTION = "What is this document about?"
_SYSTEM = "You answer questions about a document in one short sentence."


@dataclass(frozen=True, slots=True)
class Prompt:
    """`token_ids` of the whole prompt; `end_id` ends an answer."""

    token_ids: tuple[int, ...]
    question: str
    end_id: int
    tokenizer: Any

    def answer_ids(self, generated: list[int]) -> tuple[int, ...]:
        """`generated` up to the end token: engines differ in whether they report it."""
        end = generated.index(self.end_id) if self.end_id in generated else len(generated)
        return tuple(generated[:end])

    def text(self, token_ids: tuple[int, ...]) -> str:
        """The answer in words."""
        return str(self.tokenizer.decode(list(token_ids))).strip()


class _Counted:
    """`kvist.bench.document` wants token ids of a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)


def build_prompt(model_folder: Path) -> Prompt:
    """The same prompt every time.

    Raises:
        ConfigError: the package `tokenizers` is missing.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as e:
        raise ConfigError("the demo needs tokenizers", remedy="pip install 'kvist[demo]'") from e
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    document = long_document(DOCUMENT_TOKENS, _Counted(tokenizer))
    text = (
        f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n"
        f"<|im_start|>user\n{document}\n{QUESTION}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    token_ids = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
    end_id = tokenizer.token_to_id("<|im_end|>")
    if end_id is None:
        raise ConfigError("is not SmolLM2's tokenizer", path=str(model_folder / "tokenizer.json"))
    return Prompt(token_ids, QUESTION, end_id, tokenizer)
