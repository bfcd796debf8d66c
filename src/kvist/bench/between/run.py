"""All ways in turn, in an order drawn anew each round; a ratio is of two values of one round."""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from kvist.bench.between.ways import PlainSocket, TwoNodes, Way, Written
from kvist.bench.store.contender import Blocks, ContenderError
from kvist.bench.store.driven import Driven, find_peer
from kvist.bench.store.redis import Redis
from kvist.bench.store.samples import MOONCAKE, REDIS

SOCKET, NODES, BY_NIXL = "socket", "kvist", "kvist over NIXL"


class Settings(msgspec.Struct, frozen=True):
    """What is asked of a run. `blocks` of `block_bytes` over `streams` connections."""

    rounds: int = 25
    blocks: int = 64
    block_bytes: int = 2 << 20
    streams: int = 2
    peers: bool = True
    nixl: bool = False


class Outcomes(msgspec.Struct):
    """Bytes a second by way, one value a round; why a way is missing."""

    settings: Settings
    rounds: dict[str, list[float]] = {}
    missing: dict[str, str] = {}

    def bytes_per_s(self, way: str) -> float:
        """Median of a way's values."""
        return statistics.median(self.rounds[way])

    def ratio(self, way: str, to: str = SOCKET) -> float:
        """Median of one way's value over another's in the same round."""
        return statistics.median(
            a / b for a, b in zip(self.rounds[way], self.rounds[to], strict=True)
        )


def measure(settings: Settings, tell: Callable[[str], None], *, seed: int = 1) -> Outcomes:
    """Runs all; `tell` gets a line now and then. The first round is not kept.

    Raises:
        ContenderError: a node or the plain socket did not come up, or other bytes came.
    """
    found = Outcomes(settings)
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name, ExitStack() as ends:
        folder = Path(name)
        blocks = Blocks(count=settings.blocks, block_bytes=settings.block_bytes, seed=seed)
        ends.enter_context(blocks)
        ways = _open(settings, blocks, folder, found)
        for way in ways.values():
            ends.callback(way.close)
        for number in range(settings.rounds + 1):
            order = list(ways.items())
            chance.shuffle(order)
            for label, way in order:
                way.prepare(number)
                took_s = way.read(number)
                if number:
                    found.rounds.setdefault(label, []).append(blocks.total_bytes / took_s)
            tell(f"round {number} of {settings.rounds}")
    return found


def _open(settings: Settings, blocks: Blocks, folder: Path, found: Outcomes) -> dict[str, Way]:
    streams = settings.streams
    with ExitStack() as undo:
        ways: dict[str, Way] = {SOCKET: PlainSocket(blocks, streams=streams)}
        undo.callback(ways[SOCKET].close)
        ways[NODES] = TwoNodes(blocks, folder, streams=streams)
        undo.callback(ways[NODES].close)
        by_nixl: dict[str, Callable[[], Way]] = {
            BY_NIXL: lambda: TwoNodes(blocks, folder, streams=streams, transport="nixl")
        }
        others: dict[str, Callable[[], Way]] = {
            REDIS: lambda: Written(
                Redis(blocks, folder, threads=streams, durable=False, over_tcp=True)
            ),
            MOONCAKE: lambda: Written(Driven(find_peer(MOONCAKE), blocks, folder, medium="peer")),
        }
        wanted = (by_nixl if settings.nixl else {}) | (others if settings.peers else {})
        for label, make in wanted.items():
            try:
                ways[label] = make()
                undo.callback(ways[label].close)
            except ContenderError as error:
                found.missing[label] = str(error)
        undo.pop_all()
    return ways
