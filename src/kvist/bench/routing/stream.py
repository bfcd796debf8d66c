"""The requests of a run: sessions that grow turn by turn, and questions about popular documents.

Times count in requests: one comes a unit of time on average, so that a rate turns them into
seconds. A turn is sent no sooner than the answer before it is there, as an agent does. All follows
from the seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

from kvist.bench.routing.texts import Texts

_STARTED_RATIO = 0.5  # of the run, in which all sessions begin
_ASKED = "Answer in a few words from the passages below.\n\n{document}\n\nQuestion: {question}"


class Kind(Enum):
    """What a request is."""

    AGENT = "agent"
    RAG = "rag"


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: when it is meant to be sent, counted in requests, and its prompt."""

    at: float
    prompt: str


@dataclass(frozen=True, slots=True)
class Session:
    """Requests that follow each other; a question has one."""

    kind: Kind
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Mix:
    """What a stream is made of.

    Attributes:
        sessions: of agents.
        turns: of a session at most.
        questions: about documents.
        documents: how many there are; the n-th is asked about 1/n as often as the first.
        prompt_chars: of the longest prompt; sessions end before it, documents are cut.
    """

    sessions: int = 12
    turns: int = 6
    questions: int = 48
    documents: int = 8
    prompt_chars: int = 9000


def make_stream(texts: Texts, mix: Mix, seed: int) -> tuple[Session, ...]:
    """The requests of one play, in order of their first times."""
    chance = random.Random(seed)
    grown = _agents(texts, mix, chance)
    span = float(sum(map(len, grown)) + mix.questions)
    sessions = [_spread(prompts, span, chance) for prompts in grown]
    sessions += _questions(texts, mix, span, chance)
    return tuple(sorted(sessions, key=lambda session: session.turns[0].at))


def _agents(texts: Texts, mix: Mix, chance: random.Random) -> list[tuple[str, ...]]:
    """Sessions' prompts; a text that serves twice is told apart at its beginning."""
    able = [a for a in texts.agents if len(a[0]) <= mix.prompt_chars]
    chosen: list[tuple[str, ...]] = []
    while able and len(chosen) < mix.sessions:
        order = chance.sample(able, len(able))
        chosen += order[: mix.sessions - len(chosen)]
    found = []
    for number, prompts in enumerate(chosen):
        fitting = [p for p in prompts if len(p) <= mix.prompt_chars][: mix.turns]
        found.append(tuple(f"Task {number}.\n{prompt}" for prompt in fitting))
    return found


def _spread(prompts: tuple[str, ...], span: float, chance: random.Random) -> Session:
    """A session that begins in the first part of a run and whose turns fill the rest."""
    at = chance.uniform(0.0, span * _STARTED_RATIO)
    pause = span * (1 - _STARTED_RATIO) / len(prompts)
    turns = []
    for prompt in prompts:
        turns.append(Turn(at, prompt))
        at += chance.uniform(0.5, 1.5) * pause
    return Session(Kind.AGENT, tuple(turns))


def _questions(texts: Texts, mix: Mix, span: float, chance: random.Random) -> list[Session]:
    count = min(mix.documents, len(texts.documents))
    documents = chance.sample(texts.documents, count)
    weights = [1 / (place + 1) for place in range(count)]
    found = []
    for _ in range(mix.questions if count else 0):
        (document,) = chance.choices(documents, weights)
        question = chance.choice(texts.questions)
        room = mix.prompt_chars - len(_ASKED) - len(question)
        prompt = _ASKED.format(document=document[: max(0, room)], question=question)
        found.append(Session(Kind.RAG, (Turn(chance.uniform(0.0, span), prompt),)))
    return found
