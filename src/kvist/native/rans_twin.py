"""Range coding with 32 interleaved states: the specification of `cpp/rans.hpp`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int64]
Frequencies = npt.NDArray[np.int64]

SCALE_BITS = 12
SCALE = 1 << SCALE_BITS
LANES = 32
LOW = 1 << 16
SYMBOLS = 256
STATE_BYTES = 4 * LANES
_NOT_A_STREAM = "the stream is not one of these symbols"


def count_symbols(symbols: Bytes) -> Counts:
    """How often each of the 256 symbols occurs: (256,)."""
    return np.bincount(symbols, minlength=SYMBOLS).astype(np.int64)


def normalise(counts: Counts) -> Frequencies:
    """Frequencies of (256,) counts that add up to `SCALE`, at least 1 where a symbol occurs."""
    total = int(counts.sum())
    rounded = (2 * counts * SCALE + total) // (2 * total)
    out = np.where(counts > 0, np.maximum(1, rounded), 0)
    left = SCALE - int(out.sum())
    while left:
        most = int(out.argmax())
        part = max(left, -((int(out[most]) + 7) // 8))
        out[most] += part
        left -= part
    return out


def log2_q8(value: int) -> int:
    """log2 of 1 ≤ `value` < 2³¹ in 1/256, rounded down; integers only."""
    whole = value.bit_length() - 1
    mantissa = value << (31 - whole)
    out = whole << 8
    for bit in range(7, -1, -1):
        mantissa = mantissa * mantissa >> 31
        if mantissa >> 32:
            mantissa >>= 1
            out |= 1 << bit
    return out


def cost_bytes(counts: Counts, frequencies: Frequencies) -> int:
    """Bytes that symbols with these counts take, about, without states and table."""
    cost = sum(
        int(count) * ((SCALE_BITS << 8) - log2_q8(int(frequencies[symbol])))
        for symbol, count in enumerate(counts)
        if count
    )
    return (cost + 2047) // 2048


def pack_table(frequencies: Frequencies) -> bytes:
    """A table as bytes: which symbols occur (256 bits), then their frequencies, 12 bits each."""
    used = np.packbits(frequencies > 0, bitorder="little").tobytes()
    values = [int(f) for f in frequencies if f]
    nibbles = [value >> shift & 15 for value in values for shift in (0, 4, 8)]
    nibbles += [0] * (len(nibbles) % 2)
    return used + bytes(
        low | high << 4 for low, high in zip(nibbles[::2], nibbles[1::2], strict=True)
    )


def unpack_table(data: bytes) -> tuple[Frequencies, int]:
    """The table at the start of `data`, and the bytes that it takes.

    Raises:
        ValueError: there is none.
    """
    used = np.unpackbits(np.frombuffer(data[: SYMBOLS // 8], np.uint8), bitorder="little")
    count = int(used.sum())
    size = SYMBOLS // 8 + (count * 3 + 1) // 2
    if len(used) < SYMBOLS or len(data) < size:
        raise ValueError(_NOT_A_STREAM)
    packed = np.frombuffer(data[SYMBOLS // 8 : size], np.uint8).astype(np.int64)
    nibbles = np.stack([packed & 15, packed >> 4], 1).ravel()[: count * 3].reshape(count, 3)
    out = np.zeros(SYMBOLS, np.int64)
    out[used == 1] = nibbles[:, 0] | nibbles[:, 1] << 4 | nibbles[:, 2] << 8
    if (out[used == 1] == 0).any():
        raise ValueError(_NOT_A_STREAM)
    return out, size


class Encoder:
    """Writes a stream from its end: the last run first."""

    def __init__(self) -> None:
        self._states = np.full(LANES, LOW, np.uint64)
        self._words: list[npt.NDArray[np.uint64]] = []

    def run(self, frequencies: Frequencies, symbols: Bytes) -> None:
        """Puts `symbols` before what is there; each has a frequency from 1 to `SCALE` - 1."""
        frequency = frequencies.astype(np.uint64)
        start = np.cumsum(frequency) - frequency
        for at in range((len(symbols) - 1) // LANES * LANES, -1, -LANES):
            now = symbols[at : at + LANES]
            x, f = self._states[: len(now)], frequency[now]
            full = x >> np.uint64(32 - SCALE_BITS) >= f
            self._words.append(x[full] & np.uint64(LOW - 1))
            x = np.where(full, x >> np.uint64(16), x)
            self._states[: len(now)] = (x // f << np.uint64(SCALE_BITS)) + x % f + start[now]

    def finish(self) -> bytes:
        """The stream."""
        words = np.concatenate(self._words[::-1]) if self._words else np.zeros(0, np.uint64)
        return self._states.astype("<u4").tobytes() + words.astype("<u2").tobytes()


class Decoder:
    """Reads a stream, run by run."""

    def __init__(self, data: bytes) -> None:
        """Raises ValueError if `data` has no states, or half a word."""
        if len(data) < STATE_BYTES or len(data) % 2:
            raise ValueError(_NOT_A_STREAM)
        self._states = np.frombuffer(data[:STATE_BYTES], "<u4").astype(np.uint64)
        self._words = np.frombuffer(data[STATE_BYTES:], "<u2").astype(np.uint64)
        self._at = 0

    def run(self, frequencies: Frequencies, count: int) -> Bytes:
        """The next `count` symbols.

        Raises:
            ValueError: the frequencies do not add up, or the stream ends before.
        """
        if int(frequencies.sum()) != SCALE or int(frequencies.max()) >= SCALE:
            raise ValueError(_NOT_A_STREAM)
        frequency = frequencies.astype(np.uint64)
        start = np.cumsum(frequency) - frequency
        symbol_of = np.repeat(np.arange(SYMBOLS, dtype=np.uint8), frequencies)
        out = np.empty(count, np.uint8)
        for at in range(0, count, LANES):
            width = min(LANES, count - at)
            x = self._states[:width]
            low = x & np.uint64(SCALE - 1)
            now = symbol_of[low]
            out[at : at + width] = now
            x = frequency[now] * (x >> np.uint64(SCALE_BITS)) + low - start[now]
            hungry = x < LOW
            words = self._words[self._at : self._at + int(hungry.sum())]
            if len(words) < int(hungry.sum()):
                raise ValueError(_NOT_A_STREAM)
            x[hungry] = x[hungry] << np.uint64(16) | words
            self._at += len(words)
            self._states[:width] = x
        return out

    def end(self) -> None:
        """Raises ValueError unless the stream was read to its end and is one that was encoded."""
        if self._at != len(self._words) or (self._states != LOW).any():
            raise ValueError(_NOT_A_STREAM)
