"""Texts of agents and of retrieval: recorded ones where there are files, else the gazetteer's."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvist.bench.document import answered_questions
from kvist.core.errors import FormatError

GENERATED = "generated gazetteer"
AGENT_FOLDER = Path("lmcache-agent/miniswe")  # below the folder of traces
RAG_FILE = Path("rag-text/musique_s_150.json.gz")
_DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)
_MADE_UP_SESSIONS, _MADE_UP_TURNS, _MADE_UP_DOCUMENTS = 24, 12, 24
_ENTRIES_OF_A_TASK, _ENTRIES_OF_A_DOCUMENT = 8, 10
_TASK = "You work for the harbour office. Answer from these notes, and ask for what you lack.\n\n"


@dataclass(frozen=True, slots=True)
class Texts:
    """What prompts are made of.

    Attributes:
        name: where it comes from.
        agents: for each session its prompts, each of which begins with the one before.
        documents: texts that questions are asked about.
        questions: as many as there are documents, or more.
    """

    name: str
    agents: tuple[tuple[str, ...], ...]
    documents: tuple[str, ...]
    questions: tuple[str, ...]


def find_texts(traces: Path) -> Texts:
    """The recorded texts below `traces`, if all of them are there, else the generated ones.

    Raises:
        FormatError: a file is not what it should be; names it.
        OSError: a file cannot be read.
    """
    agents, rag = traces / AGENT_FOLDER, traces / RAG_FILE
    if not (agents.is_dir() and rag.is_file()):
        return generated_texts()
    sessions = [_session(file) for file in sorted(agents.glob("*.jsonl.gz"))]
    documents, questions = _passages(rag)
    if not sessions:
        raise FormatError(f"{agents}: no session")
    return Texts("recorded agents, MuSiQue", tuple(sessions), documents, questions)


def generated_texts() -> Texts:
    """The same every time."""
    chance = random.Random(GENERATED)
    needed = _MADE_UP_SESSIONS * (_ENTRIES_OF_A_TASK + 2 * _MADE_UP_TURNS)
    entries = answered_questions(needed + _MADE_UP_DOCUMENTS * _ENTRIES_OF_A_DOCUMENT)
    texts = (entry for entry, _, _ in entries)
    agents = []
    for _ in range(_MADE_UP_SESSIONS):
        said = _TASK + "\n\n".join(itertools.islice(texts, _ENTRIES_OF_A_TASK))
        prompts = [said]
        for _ in range(_MADE_UP_TURNS - 1):
            said += "\n\n" + "\n".join(itertools.islice(texts, chance.randint(1, 2)))
            prompts.append(said)
        agents.append(tuple(prompts))
    documents = [
        "\n\n".join(itertools.islice(texts, _ENTRIES_OF_A_DOCUMENT))
        for _ in range(_MADE_UP_DOCUMENTS)
    ]
    questions = [question for _, question, _ in entries[:_MADE_UP_DOCUMENTS]]
    return Texts(GENERATED, tuple(agents), tuple(documents), tuple(questions))


def _session(file: Path) -> tuple[str, ...]:
    """An agent's prompts as far as each continues the one before."""
    rows = sorted(_records(file), key=lambda row: float(row["timestamp"]))
    prompts: list[str] = []
    for row in rows:
        said = str(row["input"])
        if not prompts or (said.startswith(prompts[-1]) and said != prompts[-1]):
            prompts.append(said)
    return tuple(prompts)


def _records(file: Path) -> Iterator[dict[str, Any]]:
    try:
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                row = json.loads(line)
                if not isinstance(row, dict) or not {"timestamp", "input"} <= set(row):
                    raise FormatError(f"{file}, line {number}: no call of an agent")
                yield row
    except (ValueError, *_DAMAGED) as error:
        raise FormatError(f"{file}: {error}") from error


def _passages(file: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Documents of passages, and questions."""
    try:
        rows: Sequence[Any] = json.loads(gzip.decompress(file.read_bytes()))
        documents = tuple("\n\n".join(str(c["text"]) for c in row["ctxs"]) for row in rows)
        questions = tuple(str(row["question"]) for row in rows)
    except (ValueError, LookupError, TypeError, *_DAMAGED) as error:
        raise FormatError(f"{file}: no questions with passages: {error!r}") from error
    if not documents:
        raise FormatError(f"{file}: no questions")
    return documents, questions
