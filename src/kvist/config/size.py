"""Sizes as people write them: `8GiB`, `512MB`, `1.5g`, `4096`."""

from __future__ import annotations

import re

from kvist.core.errors import ConfigError

_UNIT_BYTES: dict[str, int] = {
    "": 1,
    "b": 1,
    **{p: 1 << 10 * i for i, p in enumerate("kmgt", start=1)},
    **{f"{p}ib": 1 << 10 * i for i, p in enumerate("kmgt", start=1)},
    **{f"{p}b": int(10 ** (3 * i)) for i, p in enumerate("kmgt", start=1)},
}
_SIZE = re.compile(r"\s*(\d{1,20}(?:\.\d{1,9})?)\s*([a-zA-Z]*)\s*")
_MAX_BYTES = 1 << 62
_REMEDY = 'write it like "8GiB", "512MB" or 4096'


def parse_size(text: object, path: str = "", origin: str = "") -> int:
    """Bytes meant by `text`: an int, or a number with an optional unit.

    `KiB MiB GiB TiB` (and `K M G T`) are powers of 1024, `KB MB GB TB` powers of 1000.

    Raises:
        ConfigError: not a size, negative, or above 2**62; names `path` and `origin`.
    """
    if isinstance(text, bool) or not isinstance(text, int | str):
        raise ConfigError(f"{text!r} is not a size", path=path, origin=origin, remedy=_REMEDY)
    if isinstance(text, str):
        match = _SIZE.fullmatch(text)
        unit = _UNIT_BYTES.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ConfigError(f"{text!r} is not a size", path=path, origin=origin, remedy=_REMEDY)
        whole, _, fraction = match[1].partition(".")
        size_bytes = int(whole) * unit + int(fraction or "0") * unit // int(
            f"1{'0' * len(fraction)}"
        )
    else:
        size_bytes = text
    if not 0 <= size_bytes <= _MAX_BYTES:
        raise ConfigError(
            f"{text!r} is out of range", path=path, origin=origin, remedy="use 0 to 4EiB"
        )
    return size_bytes


def format_size(size_bytes: int) -> str:
    """The shortest exact text that `parse_size` reads back: `268435456` → `256MiB`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        unit_bytes = _UNIT_BYTES[unit.lower()]
        if size_bytes and size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes}{unit}"
    return str(size_bytes)
