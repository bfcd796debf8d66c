"""A long English document for demos and benchmarks: deterministic, and no passage repeats.

It is a gazetteer of an imaginary archipelago. Every entry has its own names, numbers and facts, so
no two blocks of tokens are equal and questions about it have answers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

_SEED = 20260
_MAX_ENTRIES = 20_000

_HEADS = "Al Bre Cor Dun El Fen Gar Hol Is Jor Kel Lan Mor Nor Os Pel Quen Ral Sten Tor Ul Ves Wyn"
_MIDDLES = "a e i o u ar en il or un ast eld ing orth umb ave ith oll"
_TAILS = "by dale fjord garth ham holm ness mouth rock sund thorpe vik wick stead haven skerry"
_TRADES = (
    "salting herring", "carving whalebone", "growing barley", "breeding ponies", "casting bells",
    "weaving sailcloth", "quarrying slate", "keeping bees", "distilling juniper", "mending nets",
    "grinding lenses", "tarring rope", "pressing cider", "drying cod", "binding books",
)  # fmt: skip
_SIGHTS = (
    "a lighthouse with a green lamp", "a chapel roofed with turf", "a bridge of nine arches",
    "a mill that turns against the wind", "a library cut into the cliff", "a tide clock of brass",
    "an orchard behind a sea wall", "a drowned forest seen at low water", "a row of painted boats",
    "a market hall on stilts", "a stone ring older than the harbour", "a cable ferry",
)  # fmt: skip
_WINDS = ("north-westerly", "easterly", "soft southern", "fitful", "steady western", "bitter polar")
_OFFICES = ("harbour master", "schoolteacher", "midwife", "surveyor", "ferryman", "bell ringer")
_EVENTS = (
    "the winter when the strait froze", "the great storm", "the year without a harvest",
    "the arrival of the first steamer", "the fire in the rope works", "the quarrel over the wells",
)  # fmt: skip


class Tokenizer(Protocol):
    """What `long_document` asks of a tokenizer; any Hugging Face tokenizer will do."""

    def encode(self, text: str) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class _Entry:
    place: str
    people: int
    founder: str
    year: int
    text: str


def _name(rng: random.Random) -> str:
    middle = rng.choice(_MIDDLES.split())
    return rng.choice(_HEADS.split()) + middle + rng.choice(_TAILS.split())


def _entries() -> Iterator[_Entry]:
    rng = random.Random(_SEED)
    seen: set[str] = set()
    for number in range(1, _MAX_ENTRIES + 1):
        place = _name(rng)
        while place in seen:
            place = f"{rng.choice(('Upper', 'Lower', 'Old', 'New', 'Far'))} {_name(rng)}"
        seen.add(place)
        founder = f"{rng.choice(_HEADS.split())}{rng.choice('aeio')} {_name(rng)}"
        year, people = rng.randint(1201, 1890), rng.randint(40, 9800)
        first, second = rng.sample(_TRADES, 2)
        text = (
            f"{number}. {place}. A settlement of {people} people, founded in {year} by {founder}, "
            f"{rng.randint(2, 97)} miles from the nearest port at {_name(rng)}. It lives by "
            f"{first} and, since {rng.choice(_EVENTS)}, by {second}. Visitors come for "
            f"{rng.choice(_SIGHTS)}, which stands {rng.randint(7, 310)} feet above the water. The "
            f"wind is {rng.choice(_WINDS)} for {rng.randint(3, 11)} months of the year. The "
            f"{rng.choice(_OFFICES)}, {_name(rng)} by name, keeps {rng.randint(2, 60)} "
            f"{rng.choice(('goats', 'charts', 'clocks', 'lanterns', 'letters', 'doves'))} and "
            f"says that the ferry on day {rng.randint(1, 365)} is the one to take.\n\n"
        )
        yield _Entry(place, people, founder, year, text)


def long_document(min_tokens: int, tokenizer: Tokenizer) -> str:
    """At least `min_tokens` tokens of text, and at most one entry more; the same every time.

    Raises:
        ValueError: more was asked for than the gazetteer holds (about three million tokens).
    """
    parts = ["A gazetteer of the Outer Archipelago, in the order its places were seen.\n\n"]
    counted = 0
    for entry in _entries():
        if counted >= min_tokens:
            text = "".join(parts)
            # Entries are counted alone; where two meet, tokens may merge, so the sum is checked.
            counted = len(tokenizer.encode(text))
            if counted >= min_tokens:
                return text
        parts.append(entry.text)
        counted += len(tokenizer.encode(entry.text))
    raise ValueError(f"the document has fewer than {min_tokens} tokens")


def questions() -> list[str]:
    """Questions that the first entries of the document answer; the same every time."""
    out: list[str] = []
    for number, entry in enumerate(_entries()):
        if number == 8:
            break
        asks = (
            f"Who founded {entry.place}?",
            f"In which year was {entry.place} founded?",
            f"How many people live in {entry.place}?",
            f"What do the people of {entry.place} live by?",
        )
        out.append(asks[number % len(asks)])
    return out


def answered_questions(count: int) -> list[tuple[str, str, str]]:
    """`count` of (entry, question, the words in the entry that answer it); the same every time.

    Raises:
        ValueError: the gazetteer has fewer entries.
    """
    out: list[tuple[str, str, str]] = []
    for number, entry in enumerate(_entries()):
        if number == count:
            return out
        asks = (
            (f"Who founded {entry.place}?", entry.founder),
            (f"In which year was {entry.place} founded?", str(entry.year)),
            (f"How many people live in {entry.place}?", str(entry.people)),
        )
        out.append((entry.text.strip(), *asks[number % len(asks)]))
    raise ValueError(f"the document has fewer than {count} entries")
