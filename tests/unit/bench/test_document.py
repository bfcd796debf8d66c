"""The demo document is deterministic, long enough, and never repeats itself."""

from __future__ import annotations

import pytest

from kvist.bench.document import long_document, questions


class Words:
    def encode(self, text: str) -> list[int]:
        return [hash(word) for word in text.split()]


def test_document_has_the_tokens_asked_for_and_little_more() -> None:
    for wanted in (1, 500, 9_000):
        tokens = len(Words().encode(long_document(wanted, Words())))
        assert wanted <= tokens < wanted + 200


def test_a_longer_document_begins_with_the_shorter() -> None:
    short = long_document(500, Words())
    assert long_document(9_000, Words()).startswith(short)
    assert long_document(500, Words()) == short


def test_no_passage_of_thirty_two_words_repeats() -> None:
    words = long_document(9_000, Words()).split()
    passages = [tuple(words[i : i + 32]) for i in range(len(words) - 32)]
    assert len(set(passages)) == len(passages)


def test_questions_are_answered_by_the_document() -> None:
    text = long_document(3_000, Words())
    assert len(questions()) == 8
    assert len(set(questions())) == 8
    places = [line.split(". ")[1] for line in text.splitlines() if ". A settlement" in line]
    assert all(any(place in question for place in places) for question in questions())


def test_a_document_beyond_the_gazetteer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvist.bench.document._MAX_ENTRIES", 3)
    with pytest.raises(ValueError, match="fewer than"):
        long_document(10_000, Words())
