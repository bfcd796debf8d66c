"""A link whose time is counted, not spent: streaming tested at any bandwidth, to the byte."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from kvist.codec.stream_link import ContextSource
from kvist.native import checksum


@dataclass
class VirtualLink:
    """A link to one who serves `source`, on a clock of its own; the other side answers at once.

    Attributes:
        bandwidth: bytes a second at a time of the clock.
        latency_s: from a request to its answer's first byte.
        cut_after_bytes: the link ends behind so many.
        damage: a chunk in which a bit is turned.
    """

    source: ContextSource
    bandwidth: Callable[[float], float]
    latency_s: float = 0.01
    now_s: float = 0.0
    cut_after_bytes: int = 1 << 60
    damage: int | None = None
    ready: bytearray = field(default_factory=bytearray)
    sent_bytes: int = 0

    def __post_init__(self) -> None:
        parts = [struct.pack("<4sHHI", b"KVST", 1, self.source.levels, len(self.source.tokens))]
        for chunk, count in enumerate(self.source.tokens):
            parts.append(struct.pack("<I", count))
            for level in range(self.source.levels):
                data = self.source.payload(chunk, level)
                parts.append(struct.pack("<IQ", len(data), checksum(data)))
        self.ready += b"".join(parts)

    def clock(self) -> float:
        """Seconds, by this link's clock."""
        return self.now_s

    def send(self, data: bytes) -> None:
        """Takes a request, and has its answer ready."""
        chunk, level = struct.unpack("<II", data)
        if chunk != 0xFFFFFFFF:
            self.now_s += self.latency_s
            payload = bytearray(self.source.payload(chunk, level))
            if self.damage == chunk:
                payload[7] ^= 1
            self.ready += payload

    def receive(self, size_bytes: int, timeout_s: float) -> bytes:
        """See `Link`; moves the clock by what the bytes take."""
        part = bytes(self.ready[: min(size_bytes, 500)])
        if self.sent_bytes + len(part) > self.cut_after_bytes:
            return b""
        took_s = len(part) / self.bandwidth(self.now_s)
        if took_s > timeout_s:
            self.now_s += timeout_s
            raise TimeoutError
        self.now_s += took_s
        self.sent_bytes += len(part)
        del self.ready[: len(part)]
        return part
