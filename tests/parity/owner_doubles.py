"""What the tests of the table of owners share."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from kvist.core.keys import token_bytes
from kvist.native import digest
from kvist.native import owner_twin as twin
from kvist.native.twin import chain_keys

KEYS = [digest(b"%d" % n) for n in range(24)]
SEED = digest(b"seed")
NOBODY = 0xFFFF
WIDTH = 2  # tokens of a block in these tests


def new_table(native: ModuleType, most_keys: int = 1 << 20, most_names: int = 1 << 20) -> Any:
    if native.__name__.endswith("twin"):
        return twin.OwnerTable(most_keys, most_names)
    return native.OwnerTable(most_keys, most_names)


def readers(*pairs: tuple[int, int]) -> np.ndarray[Any, Any]:
    return np.array(pairs, np.uint16).reshape(-1, 2)


def named(who: int, length: int) -> tuple[list[bytes], list[bytes], bytes]:
    """Names that a source gives to a prompt's blocks, their keys, and their tokens."""
    tokens = list(range(length * WIDTH))
    names = [digest(b"name %d %d" % (who, n)) for n in range(length)]
    return names, chain_keys(SEED, tokens, WIDTH), token_bytes(tokens)


def contents(table: Any) -> dict[bytes, list[tuple[int, int]]]:
    return dict(table.items())
