"""A name in a table, or one clear line that says what was meant."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

from kvist.core.errors import UnsupportedError

_Value = TypeVar("_Value")


def normal(name: str) -> str:
    """`name` as tables spell it: lower case, hyphens, no organisation before a slash."""
    return name.rsplit("/", 1)[-1].strip().lower().replace("_", "-").replace(" ", "-")


def find(name: str, table: Mapping[str, _Value], *, what: str, path: str, remedy: str) -> _Value:
    """The entry of `table` under `name`, in any spelling that `normal` brings to one.

    Args:
        what: what the table holds, as a user would say it.
        path: path of the knob that held `name`.
        remedy: what to do where no entry is near.

    Raises:
        UnsupportedError: no such entry; the line names the nearest.
    """
    key = normal(name)
    if key in table:
        return table[key]
    near = difflib.get_close_matches(key, table, n=1, cutoff=0.6)
    raise UnsupportedError(
        f"unknown {what} {name!r}",
        path=path,
        remedy=f"did you mean {near[0]}?" if near else remedy,
    )
