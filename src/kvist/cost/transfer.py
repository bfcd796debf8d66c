"""Time to bring bytes over a path (a tier or a peer): latency and bandwidth, learned, with queue.

Theory of operation. A path serves what is given to it in turn: a transfer of `n` bytes behind `q`
queued bytes takes `latency + (q + n) / bandwidth`. `begin` books the bytes, `end` takes them off
and learns by EWMA: from a transfer that was mostly waiting its latency, from the others the
seconds a byte. What is seen counts as at most `_MAX_STEP` times slower or faster than what was
believed, so that one stall does not condemn a path, and a bandwidth stays within `_MAX_RATIO` of
its seed.

Where transfers overlap, none of them shows the bandwidth that all get together. `observe_rate`
takes the bytes of an interval and the time in which the path was busy in it; the longer, the more
it counts. The first such interval replaces the seed, which was a guess.

What the connector spends beside the transfer (hashing, scattering pages, waking threads) is a
`LoadOverhead`: a fixed part for each load and a part for each block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvist.core.errors import ConfigError

_STEP = 0.2
_HALF_LIFE_S = 0.2  # of what a rate was believed to be, in seconds of a busy path
_MAX_STEP = 4.0
_MAX_RATIO = 1e4
_MIN_LATENCY_S = 1e-7
_MAX_LATENCY_S = 60.0


@dataclass(frozen=True, slots=True)
class PathSpeed:
    """Latency and bandwidth of a path; a bandwidth of 0 means that it cannot be used.

    Raises:
        ConfigError: a negative or non-finite value.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        for name in ("latency_s", "bytes_per_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} must be 0 or more and finite, not {value}")

    def transfer_s(self, size_bytes: int, queued_bytes: int = 0) -> float:
        """Seconds to bring `size_bytes` behind `queued_bytes`; infinite over a path of no use."""
        if size_bytes <= 0:
            return 0.0
        if not self.bytes_per_s:
            return math.inf
        return self.latency_s + (queued_bytes + size_bytes) / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class PathState:
    """A path now: its speed and the bytes queued on it."""

    speed: PathSpeed
    queued_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Transfer:
    """A booked transfer: `ahead_bytes` were on the path before it. Given back to `end`, once."""

    number: int
    path: str
    size_bytes: int
    ahead_bytes: int


class TransferTimes:
    """Speeds of all paths, learned from finished transfers. One owner; no clock."""

    __slots__ = ("_measured", "_next", "_open", "_queued", "_seeds", "_speeds")

    def __init__(self, seeds: Mapping[str, PathSpeed]) -> None:
        self._seeds = dict(seeds)
        self._speeds = dict(seeds)
        self._queued = dict.fromkeys(seeds, 0)
        self._open: dict[int, Transfer] = {}
        self._measured: set[str] = set()
        self._next = 0

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(self._speeds)

    def add_path(self, path: str, seed: PathSpeed) -> None:
        """Makes a path known, or forgets what was learned of it; its queue stays."""
        self._seeds[path] = self._speeds[path] = seed
        self._queued.setdefault(path, 0)

    def speed(self, path: str) -> PathSpeed:
        """What is believed of a path now.

        Raises:
            ConfigError: no such path.
        """
        if path not in self._speeds:
            raise ConfigError(f"unknown path {path!r}", remedy=f"known: {', '.join(self._speeds)}")
        return self._speeds[path]

    def queued_bytes(self, path: str) -> int:
        """Bytes booked on the path and not yet ended."""
        return self._queued.get(path, 0)

    def state(self, path: str) -> PathState:
        """Speed and queue of a path now.

        Raises:
            ConfigError: no such path.
        """
        return PathState(self.speed(path), self.queued_bytes(path))

    def transfer_s(self, size_bytes: int, path: str) -> float:
        """Predicted seconds to bring `size_bytes` behind what is queued.

        Raises:
            ConfigError: no such path.
        """
        return self.speed(path).transfer_s(size_bytes, self.queued_bytes(path))

    def begin(self, path: str, size_bytes: int) -> Transfer:
        """Books a transfer on a path.

        Raises:
            ConfigError: no such path.
            ValueError: negative bytes.
        """
        self.speed(path)
        if size_bytes < 0:
            raise ValueError(f"a transfer of {size_bytes} bytes")
        booked = Transfer(self._next, path, size_bytes, self._queued[path])
        self._next += 1
        self._open[booked.number] = booked
        self._queued[path] += size_bytes
        return booked

    def end(self, transfer: Transfer, seconds: float) -> None:
        """Takes a finished transfer off its path and learns from the time since `begin`.

        Raises:
            ValueError: a negative or non-finite time, or a transfer that is not open.
        """
        if not 0 <= seconds < math.inf:
            raise ValueError(f"a transfer of {seconds} s")
        self.abandon(transfer)
        if seconds > 0 and transfer.size_bytes:
            self._learn(transfer, seconds)

    def abandon(self, transfer: Transfer) -> None:
        """Takes a failed or cut-off transfer off its path; nothing is learned.

        Raises:
            ValueError: a transfer that is not open.
        """
        if self._open.pop(transfer.number, None) is None:
            raise ValueError(f"{transfer} is not open")
        self._queued[transfer.path] -= transfer.size_bytes

    def measured(self, path: str) -> bool:
        """Whether `observe_rate` has replaced the path's seed."""
        return path in self._measured

    def observe_rate(self, path: str, size_bytes: int, busy_s: float) -> None:
        """Learns from an interval in which `size_bytes` came while the path was busy `busy_s`.

        Raises:
            ConfigError: no such path.
            ValueError: no bytes, or a time that is not above 0 and finite.
        """
        now = self.speed(path)
        if size_bytes < 1 or not 0 < busy_s < math.inf:
            raise ValueError(f"{size_bytes} bytes in {busy_s} s")
        seen = busy_s / size_bytes
        if path in self._measured and now.bytes_per_s:
            # Bytes that were expected to take long and came soon say as much as a long interval.
            evidence_s = max(busy_s, size_bytes / now.bytes_per_s)
            step = max(_STEP, 1 - 0.5 ** (evidence_s / _HALF_LIFE_S))
            seen = _towards(1 / now.bytes_per_s, seen, step)
        self._measured.add(path)
        self._speeds[path] = PathSpeed(now.latency_s, 1 / seen)

    def _learn(self, transfer: Transfer, seconds: float) -> None:
        now, seed = self._speeds[transfer.path], self._seeds[transfer.path]
        moved = transfer.ahead_bytes + transfer.size_bytes
        if not now.bytes_per_s:  # believed to be of no use, and yet it came
            self._speeds[transfer.path] = PathSpeed(now.latency_s, moved / seconds)
            return
        moving_s = moved / now.bytes_per_s
        if moving_s < now.latency_s:
            seen = max(_MIN_LATENCY_S, seconds - moving_s)
            latency = min(_MAX_LATENCY_S, _towards(max(now.latency_s, _MIN_LATENCY_S), seen))
            self._speeds[transfer.path] = PathSpeed(latency, now.bytes_per_s)
            return
        # A transfer faster than its own latency says that the latency is too high.
        latency = min(now.latency_s, seconds / 2)
        byte_s = _towards(1 / now.bytes_per_s, (seconds - latency) / moved)
        rate = 1 / byte_s
        if seed.bytes_per_s:
            rate = min(seed.bytes_per_s * _MAX_RATIO, max(seed.bytes_per_s / _MAX_RATIO, rate))
        self._speeds[transfer.path] = PathSpeed(latency, rate)


class LoadOverhead:
    """Seconds beside the transfer: `per_load_s` for each load, `per_block_s` for each block."""

    __slots__ = ("per_block_s", "per_load_s")

    def __init__(self, per_load_s: float = 1e-3, per_block_s: float = 2e-5) -> None:
        self.per_load_s = per_load_s
        self.per_block_s = per_block_s

    def overhead_s(self, blocks: int) -> float:
        """Predicted overhead of a load of `blocks`; 0 for none."""
        return self.per_load_s + blocks * self.per_block_s if blocks else 0.0

    def observe(self, blocks: int, seconds: float) -> None:
        """Learns from a load whose work beside the transfer took `seconds`.

        The larger part as predicted takes what was seen: short loads teach the fixed part, long
        ones the part of a block.

        Raises:
            ValueError: fewer than one block, or a negative or non-finite time.
        """
        if blocks < 1 or not 0 <= seconds < math.inf:
            raise ValueError(f"a load of {blocks} blocks with an overhead of {seconds} s")
        block_part = blocks * self.per_block_s
        if block_part < self.per_load_s:
            seen = max(_MIN_LATENCY_S, seconds - block_part)
            self.per_load_s = _towards(max(self.per_load_s, _MIN_LATENCY_S), seen)
        else:
            fixed = min(self.per_load_s, seconds / 2)
            seen = max(_MIN_LATENCY_S / 100, (seconds - fixed) / blocks)
            self.per_block_s = _towards(max(self.per_block_s, _MIN_LATENCY_S / 100), seen)


def _towards(now: float, seen: float, step: float = _STEP) -> float:
    """One step of an EWMA; what is seen counts as at most `_MAX_STEP` away by factor."""
    return (1 - step) * now + step * min(now * _MAX_STEP, max(now / _MAX_STEP, seen))
