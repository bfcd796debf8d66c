"""What commands write into pages of the documentation: tables, and all behind a mark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def written_behind(page: str, mark: str, text: str) -> str:
    """A page with what stands behind `mark` written anew.

    Raises:
        ValueError: it has no such mark.
    """
    before, found, _ = page.partition(mark)
    if not found:
        raise ValueError("the page does not say where the figures belong")
    return f"{before}{mark}\n\n{text}"


def written_between(page: str, mark: str, end: str, text: str) -> str:
    """A page with what stands between two marks written anew.

    Raises:
        ValueError: it has no such marks.
    """
    before, found, rest = page.partition(mark)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError("the page does not say where the figures belong")
    return f"{before}{mark}\n\n{text}\n\n{end}{after}"
