"""How exact each chunk of a streamed context is sent, so that all of it is there by a deadline.

Theory of operation. A context is cut into chunks, each encoded by itself at several levels, so that
any level may follow any other. Before each chunk: the least lossy level at which all chunks that
are left would arrive in time at the bandwidth seen so far. If none would, the rest is computed from
its text, which needs next to no bytes. What a level costs is its sizes; what the text costs, the
caller says. Decoding hides behind the transfer of the next chunk, but for the last.

Nothing here waits or reads a clock.

Source: CacheGen, SIGCOMM 2024, section 5.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvist.core.errors import ConfigError

_STEP = 0.5  # a chunk is large: what the last one saw counts as much as all before


class Why(Enum):
    """Why a chunk is sent as it is."""

    FITS = "fits"  # the level is the least lossy that meets the deadline
    UNKNOWN = "unknown"  # nothing is known of the link yet: the coarsest level tells
    LATE = "late"  # the deadline is lost either way, and bytes come sooner than computing
    TEXT = "text"  # no level meets the deadline


@dataclass(frozen=True, slots=True)
class Choice:
    """Level of the next chunk, 0 being the least lossy; `None`: compute from the text."""

    level: int | None
    why: Why


@dataclass(frozen=True, slots=True)
class Offer:
    """What can be had of one chunk: its tokens, and its size at each level, least lossy first."""

    tokens: int
    sizes_bytes: tuple[int, ...]


class Bandwidth:
    """Bytes a second of a link, as chunks show it. One owner."""

    def __init__(self, bytes_per_s: float | None = None) -> None:
        """Begins with what is known from before, if anything.

        Raises:
            ConfigError: it is not above 0 and finite.
        """
        if bytes_per_s is not None and not 0 < bytes_per_s < math.inf:
            raise ConfigError(f"a bandwidth of {bytes_per_s} bytes a second")
        self._seconds_a_byte = None if bytes_per_s is None else 1 / bytes_per_s

    @property
    def bytes_per_s(self) -> float | None:
        """`None` until something was seen."""
        return None if self._seconds_a_byte is None else 1 / self._seconds_a_byte

    def saw(self, size_bytes: int, seconds: float) -> None:
        """Learns from a finished transfer; one without bytes or time says nothing."""
        if size_bytes <= 0 or not 0 < seconds < math.inf:
            return
        seen = seconds / size_bytes
        before = self._seconds_a_byte
        self._seconds_a_byte = seen if before is None else before + _STEP * (seen - before)


def choose(
    chunks: Sequence[Offer],
    *,
    bytes_per_s: float | None,
    remaining_s: float,
    last_decode_s: float = 0.0,
    recompute_s: float = 0.0,
) -> Choice:
    """The level of `chunks[0]`.

    Args:
        chunks: what is left to send, in order; all with the same levels.
        bytes_per_s: of the link; `None` if nothing is known yet.
        remaining_s: until the deadline; below 0 once it has passed.
        last_decode_s: what decoding the last chunk takes, which nothing hides.
        recompute_s: what computing all that is left from its text takes.

    Raises:
        ConfigError: no chunks, or chunks of unequal levels.
    """
    if not chunks or len({len(chunk.sizes_bytes) for chunk in chunks}) != 1:
        raise ConfigError("chunks to choose from must have the same levels")
    sizes = [sum(level) for level in zip(*(chunk.sizes_bytes for chunk in chunks), strict=True)]
    if not sizes:
        return Choice(None, Why.TEXT)
    coarsest = len(sizes) - 1
    if bytes_per_s is None:
        if remaining_s <= 0:
            return Choice(None, Why.TEXT)
        return Choice(coarsest, Why.UNKNOWN)
    budget_bytes = (remaining_s - last_decode_s) * bytes_per_s
    for level, size_bytes in enumerate(sizes):
        if size_bytes <= budget_bytes:
            return Choice(level, Why.FITS)
    if sizes[coarsest] / bytes_per_s + last_decode_s < recompute_s:
        return Choice(coarsest, Why.LATE)
    return Choice(None, Why.TEXT)
