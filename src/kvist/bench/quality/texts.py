"""Texts to measure on: files of several kinds, or the generated gazetteer.

A file's kind is seen from its content; each may be gzipped.

* a JSON list or JSON lines of records with `question`, `answers` and `ctxs` (MuSiQue, NQ-open):
  the passages of a record are a document, and the question is asked;
* JSON lines with `input` and `output` (recordings of an agent): the last call of a session is a
  document, of which the end is new;
* anything else is plain text, one document.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, TypeVar

from kvist.bench.document import Tokenizer, answered_questions, long_document
from kvist.core.errors import FormatError

GENERATED = "generated gazetteer"

_MAX_TEXT_BYTES = 256 << 20
_GZIP = b"\x1f\x8b"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Document:
    """A text; its end is what nobody else says if `from_end`, else its start."""

    text: str
    from_end: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """A question with the passages that belong to it, and the answers that are accepted."""

    passages: tuple[str, ...]
    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Texts:
    """What there is to measure on; files take turns, so that the first few are of all of them."""

    names: tuple[str, ...]
    documents: tuple[Document, ...]
    questions: tuple[Question, ...]


def generated_texts(tokenizer: Tokenizer, documents: int, tokens: int, questions: int) -> Texts:
    """`documents` of at least `tokens` tokens each, and questions, of the gazetteer."""
    parts = _shares(long_document(documents * (tokens + 128), tokenizer), documents)
    asked = [Question((e,), q, (a,)) for e, q, a in answered_questions(questions)]
    return Texts((GENERATED,), tuple(map(Document, parts)), tuple(asked))


def _shares(text: str, count: int) -> list[str]:
    """`text` in `count` parts of about the same length, cut between words."""
    cuts = [0]
    for i in range(1, count):
        cuts.append(text.index(" ", len(text) * i // count) + 1)
    return [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def read_texts(paths: Sequence[Path]) -> Texts:
    """The documents and questions of all files.

    Raises:
        FormatError: a file is no text, too large, or JSON of no known kind; names file and line.
        OSError: a file cannot be read.
    """
    documents, questions = [], []
    for path in paths:
        text = _read(path)
        records = _records(path, text)
        if records is None:
            documents.append([Document(text)])
        elif "input" in records[0]:
            documents.append(_sessions(path, records))
        else:
            asked = [_question(path, n, r) for n, r in enumerate(records, 1)]
            questions.append(asked)
            documents.append([Document("\n\n".join(q.passages)) for q in asked])
    return Texts(
        tuple(path.name for path in paths), tuple(_turns(documents)), tuple(_turns(questions))
    )


def _turns(lists: Sequence[Sequence[_T]]) -> Iterator[_T]:
    together = chain.from_iterable(zip_longest(*lists))
    return (one for one in together if one is not None)


def _read(path: Path) -> str:
    raw = path.read_bytes()
    try:
        if raw.startswith(_GZIP):
            with gzip.open(path) as file:
                raw = file.read(_MAX_TEXT_BYTES + 1)
        if len(raw) > _MAX_TEXT_BYTES:
            raise FormatError(f"{path}: more than {_MAX_TEXT_BYTES >> 20} MiB of text")
        return raw.decode()
    except (UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FormatError(f"{path}: no text: {error}") from error


def _records(path: Path, text: str) -> list[dict[str, Any]] | None:
    """Records of JSON; `None` for plain text."""
    start = text.lstrip()[:1]
    if start == "[":
        try:
            found = json.loads(text)
        except ValueError:
            return None  # text may begin with a bracket
        rows = list(enumerate(found, 1))
    elif start == "{":
        lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
        rows = []
        for number, line in lines:
            try:
                rows.append((number, json.loads(line)))
            except ValueError as error:
                raise FormatError(f"{path}:{number}: no JSON: {error}") from error
    else:
        return None
    for number, row in rows:
        if not isinstance(row, dict) or not ({"ctxs", "question"} <= set(row) or "input" in row):
            raise FormatError(f"{path}:{number}: a record with neither question and ctxs nor input")
    if not rows:
        raise FormatError(f"{path}: no records")
    return [row for _, row in rows]


def _question(path: Path, number: int, record: dict[str, Any]) -> Question:
    try:
        passages = tuple(
            f"{ctx['title']}: {ctx['text']}" if ctx.get("title") else str(ctx["text"])
            for ctx in record["ctxs"]
        )
        if not passages:
            raise FormatError(f"{path}: record {number}: a question without passages")
        return Question(passages, str(record["question"]), tuple(map(str, record["answers"])))
    except (KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path}: record {number}: {error!r} in a question") from error


def _sessions(path: Path, records: Sequence[dict[str, Any]]) -> list[Document]:
    """The last call of each session: it repeats those before it."""
    last: dict[str, str] = {}
    for number, record in enumerate(records, 1):
        if not isinstance(record["input"], str):
            raise FormatError(f"{path}: record {number}: its input is no text")
        last[str(record.get("session_id", ""))] = record["input"] + str(record.get("output", ""))
    return [Document(text, from_end=True) for text in last.values()]
