"""A context over a link: who has it offers its chunks, who wants it asks for them one by one.

The side that waits decides (`streaming.choose`), since it alone sees when bytes arrive. All
integers are little-endian.

    offer     magic `KVST`, u16 version 1, u16 levels, u32 chunks; then for each chunk: u32 tokens,
              and for each level, least lossy first: u32 bytes, u64 XXH3-64 of them
    request   u32 chunk, u32 level; or u32 0xFFFFFFFF, u32 0 to end
    answer    the chunk's bytes at that level, as many as were offered

One thread of the receiver asks and reads, the caller's thread decodes: while chunk i is decoded,
chunk i + 1 is on its way. Whatever goes wrong with a chunk (the link is cut, bytes are missing or
damaged, a payload cannot be decoded) makes the rest text; nothing is trusted that was offered.
"""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from kvist.codec.streaming import Bandwidth, Offer, Why, choose
from kvist.core.errors import FormatError, KvistError
from kvist.native import checksum

_MAGIC = b"KVST"
_VERSION = 1
_OFFER = struct.Struct("<4sHHI")
_TOKENS = struct.Struct("<I")
_SIZE = struct.Struct("<IQ")
_REQUEST = struct.Struct("<II")
_END = 0xFFFFFFFF
MAX_CHUNKS = 65536
MAX_LEVELS = 16
_JOIN_S = 5.0
_LONGEST_WAIT_S = 3600.0
_PART_BYTES = 1 << 20

_Item = tuple[int, Why, bytes] | None


class Link(Protocol):
    """Bytes in order between two sides, such as a socket's."""

    def send(self, data: bytes) -> None:
        """Sends all of `data`. Raises OSError if the link is cut."""
        ...

    def receive(self, size_bytes: int, timeout_s: float) -> bytes:
        """At most `size_bytes`, as soon as there are some; empty at the end of the stream.

        Raises:
            OSError: the link is cut, or nothing came in time (`TimeoutError`).
        """
        ...


class ContextSource(Protocol):
    """A context, encoded chunk by chunk. A chunk's bytes are the same whenever they are asked."""

    @property
    def tokens(self) -> Sequence[int]:
        """Tokens of each chunk."""
        ...

    @property
    def levels(self) -> int: ...

    def payload(self, chunk: int, level: int) -> bytes:
        """A chunk at a level; 0 is the least lossy."""
        ...


class End(Enum):
    """How a transfer ended."""

    WHOLE = "whole"
    DEADLINE = "deadline"  # no level of the rest would have come in time
    CUT = "cut"  # the link ended or stood still
    DAMAGED = "damaged"  # a chunk was not what was offered, or could not be decoded


@dataclass(frozen=True, slots=True)
class Received:
    """Chunks `[0, len(levels))` are decoded; what comes after is to be computed from its text."""

    levels: tuple[int, ...]
    why: tuple[Why, ...]
    end: End
    bytes_per_s: float | None


def serve(link: Link, source: ContextSource, *, timeout_s: float) -> None:
    """Offers a context and sends what is asked for, until the other side ends.

    Raises:
        FormatError: a request for what was not offered.
        OSError: the link is cut, or no request comes for `timeout_s`.
    """
    tokens, levels = list(source.tokens), source.levels
    parts = [_OFFER.pack(_MAGIC, _VERSION, levels, len(tokens))]
    for chunk, count in enumerate(tokens):
        parts.append(_TOKENS.pack(count))
        for level in range(levels):
            payload = source.payload(chunk, level)
            parts.append(_SIZE.pack(len(payload), checksum(payload)))
    link.send(b"".join(parts))
    while True:
        request = _exactly(link, _REQUEST.size, _until(time.monotonic() + timeout_s))
        chunk, level = _REQUEST.unpack(request)
        if chunk == _END:
            return
        if chunk >= len(tokens) or level >= levels:
            raise FormatError(f"a request for chunk {chunk} at level {level}")
        link.send(source.payload(chunk, level))


@dataclass(slots=True)
class Receiver:
    """Takes one context from a link. Use once.

    Attributes:
        decode: `(chunk, level, payload)`: decodes a chunk to where it belongs; called in order, in
            the thread that calls `run`. Raises `FormatError` for a payload that cannot be decoded.
        deadline_s: from the call of `run`, by `clock`, until all is decoded.
        recompute_s: `(chunk)`: what computing from that chunk's text to the end takes.
        max_chunk_bytes: a chunk offered larger is not taken.
    """

    link: Link
    decode: Callable[[int, int, bytes], None]
    deadline_s: float
    max_chunk_bytes: int
    recompute_s: Callable[[int], float] = lambda _chunk: 0.0
    bandwidth: Bandwidth = field(default_factory=Bandwidth)
    clock: Callable[[], float] = time.monotonic
    _end: End = End.CUT
    _stop: threading.Event = field(default_factory=threading.Event)
    _decode_s: float = 0.0

    def run(self) -> Received:
        """Receives and decodes until all is there, or the rest is better computed."""
        until = self.clock() + self.deadline_s
        ready: queue.Queue[_Item] = queue.Queue(maxsize=2)
        fetcher = threading.Thread(
            target=self._fetch, args=(until, ready), name="kvist-stream", daemon=True
        )
        fetcher.start()
        levels: list[int] = []
        whys: list[Why] = []
        damaged = False
        try:
            while (item := self._next(ready, fetcher)) is not None:
                level, why, payload = item
                began_s = self.clock()
                self.decode(len(levels), level, payload)
                self._decode_s = self.clock() - began_s
                levels.append(level)
                whys.append(why)
        except FormatError:
            damaged = True
        finally:
            self._stop.set()
            fetcher.join(_JOIN_S)
        end = End.DAMAGED if damaged else self._end
        return Received(tuple(levels), tuple(whys), end, self.bandwidth.bytes_per_s)

    def _next(self, ready: queue.Queue[_Item], fetcher: threading.Thread) -> _Item:
        while True:
            try:
                return ready.get(timeout=_JOIN_S)
            except queue.Empty:
                if not fetcher.is_alive():
                    return None

    def _fetch(self, until: float, ready: queue.Queue[_Item]) -> None:
        """Asks for chunks, one after another, and hands them on."""
        try:
            self._end = self._fetch_all(until, ready)
        except KvistError:
            self._end = End.DAMAGED
        except TimeoutError:
            self._end = End.DEADLINE
        except OSError:
            self._end = End.CUT
        finally:
            self._put(ready, None)

    def _fetch_all(self, until: float, ready: queue.Queue[_Item]) -> End:
        offers, sums = read_offer(self.link, _until(until, self.clock))
        if any(size > self.max_chunk_bytes for offer in offers for size in offer.sizes_bytes):
            return End.DAMAGED
        end = End.WHOLE
        for chunk in range(len(offers)):
            choice = choose(
                offers[chunk:],
                bytes_per_s=self.bandwidth.bytes_per_s,
                remaining_s=until - self.clock(),
                last_decode_s=self._decode_s,
                recompute_s=self.recompute_s(chunk),
            )
            if choice.level is None:
                end = End.DEADLINE
                break
            began_s = self.clock()
            self.link.send(_REQUEST.pack(chunk, choice.level))
            size = offers[chunk].sizes_bytes[choice.level]
            # Past the deadline bytes are of use while computing would take longer.
            limit = max(until, began_s + self.recompute_s(chunk))
            payload = _exactly(self.link, size, _until(limit, self.clock))
            self.bandwidth.saw(size, self.clock() - began_s)
            if checksum(payload) != sums[chunk][choice.level]:
                return End.DAMAGED
            if not self._put(ready, (choice.level, choice.why, payload)):
                return End.DAMAGED
        self.link.send(_REQUEST.pack(_END, 0))
        return end

    def _put(
        self,
        ready: queue.Queue[_Item],
        item: _Item,
    ) -> bool:
        while not self._stop.is_set():
            try:
                ready.put(item, timeout=0.05)
            except queue.Full:
                continue
            return True
        return False


def read_offer(
    link: Link, left_s: Callable[[], float]
) -> tuple[list[Offer], list[tuple[int, ...]]]:
    """The chunks that the other side offers, and the checksums of their levels.

    Args:
        left_s: how many seconds are left for it.

    Raises:
        FormatError: not an offer, or one beyond the limits.
        OSError: the link is cut or stands still.
    """
    head = _exactly(link, _OFFER.size, left_s)
    magic, version, levels, count = _OFFER.unpack(head)
    if magic != _MAGIC or version != _VERSION:
        raise FormatError("not an offer of a context")
    if not 0 < levels <= MAX_LEVELS or count > MAX_CHUNKS:
        raise FormatError(f"an offer of {count} chunks at {levels} levels")
    one = _TOKENS.size + levels * _SIZE.size
    body = _exactly(link, one * count, left_s)
    offers, sums = [], []
    for chunk in range(count):
        at = chunk * one + _TOKENS.size
        found = [_SIZE.unpack_from(body, at + level * _SIZE.size) for level in range(levels)]
        (tokens,) = _TOKENS.unpack_from(body, chunk * one)
        offers.append(Offer(tokens, tuple(size for size, _ in found)))
        sums.append(tuple(value for _, value in found))
    return offers, sums


def _exactly(link: Link, size_bytes: int, left_s: Callable[[], float]) -> bytes:
    """So many bytes, before nothing is left of the time: a link that only drips is cut, too."""
    parts = []
    while size_bytes:
        if (timeout_s := left_s()) <= 0:
            raise TimeoutError("the link is too slow for what was asked of it")
        part = link.receive(min(size_bytes, _PART_BYTES), timeout_s)
        if not part:
            raise ConnectionError("the link ended before its chunk")
        parts.append(part)
        size_bytes -= len(part)
    return b"".join(parts)


def _until(end_s: float, clock: Callable[[], float] = time.monotonic) -> Callable[[], float]:
    """How many seconds are left until then; an hour at most, however far it is."""
    return lambda: min(end_s - clock(), _LONGEST_WAIT_S)
