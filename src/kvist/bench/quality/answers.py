"""Short answers judged as SQuAD judges them: exact match and F1 of words after normalisation.

Source: Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text"
(2016), §6.1.
Different here: white space and punctuation are Unicode's, and an answer that normalises to nothing
never matches.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence

_ARTICLES = frozenset(("a", "an", "the"))


def normalised(answer: str) -> list[str]:
    """The words of an answer: lower case, without punctuation and articles."""
    kept = (c for c in answer.lower() if not unicodedata.category(c).startswith("P"))
    return [word for word in "".join(kept).split() if word not in _ARTICLES]


def exact_match(answer: str, accepted: Sequence[str]) -> bool:
    """Whether the answer is one of those accepted, once normalised."""
    words = normalised(answer)
    return bool(words) and any(words == normalised(good) for good in accepted)


def f1(answer: str, accepted: Sequence[str]) -> float:
    """The best F1 of words, in [0, 1], against any accepted answer."""
    return max((_f1(normalised(answer), normalised(good)) for good in accepted), default=0.0)


def _f1(words: Sequence[str], good: Sequence[str]) -> float:
    both = (Counter(words) & Counter(good)).total()
    return 2 * both / (len(words) + len(good)) if both else 0.0
