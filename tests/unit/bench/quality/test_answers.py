"""`bench/quality/answers.py`: answers are judged as SQuAD judges them."""

from __future__ import annotations

import pytest

from kvist.bench.quality.answers import exact_match, f1, normalised


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("The  Eiffel Tower.", ["eiffel", "tower"]),
        ("“An Apple,” a day", ["apple", "day"]),
        ("U.S.A.", ["usa"]),
        ("theatre", ["theatre"]),  # an article is a word, not a part of one
        ("a", []),
        ("", []),
    ],
)
def test_case_punctuation_and_articles_do_not_count(answer: str, words: list[str]) -> None:
    assert normalised(answer) == words


def test_exact_match_is_with_any_accepted_answer() -> None:
    assert exact_match("the Röntgen!", ["Curie", "röntgen"])
    assert not exact_match("Röntgen rays", ["Curie", "Röntgen"])
    assert not exact_match("", [""])


def test_f1_equals_the_case_done_by_hand() -> None:
    # Two of three words given are right, two of four wanted are there: 2·2/(3+4).
    assert f1("wilhelm conrad smith", ["Wilhelm Conrad von Röntgen"]) == pytest.approx(4 / 7)
    assert f1("cat cat", ["cat"]) == pytest.approx(2 / 3)  # a word counts once for each time
    assert f1("dog", ["cat"]) == 0
    assert f1("", ["cat"]) == 0
    assert f1("cat", []) == 0


def test_f1_takes_the_accepted_answer_that_fits_best() -> None:
    assert f1("in 1901", ["the year 1901", "1901", "in 1901"]) == 1
