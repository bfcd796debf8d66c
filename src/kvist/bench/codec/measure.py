"""Times every chain of codecs on the same blocks, round by round, beside a copy of memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from kvist.codec.cachegen.table import ProfileTable
from kvist.codec.chain import CODECS, TABLED, Chain
from kvist.codec.keyring import Keyring
from kvist.codec.registry import open_codecs
from kvist.core.errors import ConfigError
from kvist.core.layout import BlockLayout
from kvist.native import digest

COPY = "memcpy"
_KEY = digest(b"a block of the benchmark")
_KEYRING = Keyring("bench", {"bench": digest(b"only for this benchmark")})


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Megabytes (10⁶) of raw bytes a second by one thread: over all rounds but the first."""

    median_mb_s: float
    least_mb_s: float
    most_mb_s: float

    @classmethod
    def of(cls, seconds: Sequence[float], raw_bytes: int) -> Rate:
        """The rates of rounds that took `seconds` each, the first of which is not kept."""
        rates = [raw_bytes / s / 1e6 for s in seconds[1:]]
        return cls(
            median_mb_s=statistics.median(rates), least_mb_s=min(rates), most_mb_s=max(rates)
        )


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One chain: raw by stored bytes, and how fast it is."""

    name: str
    exact: bool
    ratio: float
    encode: Rate
    decode: Rate


def chains_for(layout: BlockLayout, table: ProfileTable | None = None) -> list[Chain]:
    """Every chain that takes `layout` here; sealed ones where the package for it is there, those
    of `cachegen` where the model's table is.
    """
    found: list[Chain] = []
    for text in (*CODECS, *TABLED, "aead", "lossless+aead", "int8+aead"):
        try:
            writer = open_codecs(text, layout, _KEYRING if "aead" in text else None, table).writer
        except ConfigError:
            continue
        if writer is not None:
            found.append(writer)
    return found


def measure(
    layout: BlockLayout,
    blocks: Sequence[bytes],
    *,
    rounds: int,
    table: ProfileTable | None = None,
) -> list[Measured]:
    """Sizes and rates of `memcpy` and every chain over `blocks`, each of `layout`.

    In a round each does all blocks once; the first round is not kept.
    """
    out = memoryview(bytearray(layout.block_bytes))
    chains = chains_for(layout, table)
    stored = {c.name: [_encode(c, block) for block in blocks] for c in chains}
    names = [COPY, *(c.name for c in chains)]
    encode_s: dict[str, list[float]] = {name: [] for name in names}
    decode_s: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds + 1):
        copied_s = _seconds(partial(_copy, blocks, out))
        encode_s[COPY].append(copied_s)
        decode_s[COPY].append(copied_s)
        for chain in chains:
            name = chain.name
            encode_s[name].append(_seconds(partial(_encode_all, chain, blocks)))
            decode_s[name].append(_seconds(partial(_decode_all, chain, stored[name], out)))
    raw_bytes = sum(map(len, blocks))
    rows = [(COPY, True, raw_bytes)]
    rows += [(c.name, c.exact, sum(map(len, stored[c.name]))) for c in chains]
    return [
        Measured(
            name=name,
            exact=exact,
            ratio=raw_bytes / size,
            encode=Rate.of(encode_s[name], raw_bytes),
            decode=Rate.of(decode_s[name], raw_bytes),
        )
        for name, exact, size in rows
    ]


def _encode(chain: Chain, block: bytes) -> bytes:
    payload = chain.encode(memoryview(block), key=_KEY)
    return block if payload is None else bytes(payload)


def _encode_all(chain: Chain, blocks: Sequence[bytes]) -> None:
    for block in blocks:
        chain.encode(memoryview(block), key=_KEY)


def _decode_all(chain: Chain, stored: Sequence[bytes], out: memoryview) -> None:
    for payload in stored:
        chain.decode(memoryview(payload), out, key=_KEY)


def _copy(blocks: Sequence[bytes], out: memoryview) -> None:
    for block in blocks:
        out[:] = block


def _seconds(act: Callable[[], None]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began
