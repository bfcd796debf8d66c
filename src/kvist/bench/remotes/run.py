"""Kvist's remote tier beside the plain client of the same service, by turns.

Both move the same blocks over as many connections, in one process. Kvist's come as the store hands
them over: framed, with a checksum that is taken here and proven there, behind a deadline, retries
and a breaker, by a call for many blocks. A ratio is of two values of one round; the first round is
not kept.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import msgspec

from kvist.adapters.opening import Limits, open_layered
from kvist.bench.remotes import plain
from kvist.bench.remotes.services import (
    BUCKET,
    HOST,
    mooncake_service,
    redis_service,
    s3_service,
)
from kvist.bench.store.contender import Blocks, Contender, ContenderError, round_keys
from kvist.core.errors import KvistError
from kvist.core.outcome import Outcome
from kvist.tiers.protocol import Payload
from kvist.tiers.remote import LearnLimits, RemoteTier

_BATCH = 32  # blocks in one put, as the store's writer makes them
_TIMEOUT_S = 60.0
_STOP_S = 10.0
KVIST, PLAIN = "kvist", "plain"


class Settings(msgspec.Struct, frozen=True):
    """What is asked of a run. `only`: these media; none means all."""

    rounds: int = 7
    blocks: int = 32
    block_bytes: int = 2 << 20
    connections: int = 4
    only: tuple[str, ...] = ()


class Values(msgspec.Struct):
    """Bytes a second of one medium, by who moved them (`kvist`, `plain`), one value a round."""

    put: dict[str, list[float]] = {}
    get: dict[str, list[float]] = {}

    def ratio(self, way: str) -> float:
        """Median of Kvist's value over the plain client's in the same round."""
        values: dict[str, list[float]] = getattr(self, way)
        return statistics.median(
            ours / theirs for ours, theirs in zip(values[KVIST], values[PLAIN], strict=True)
        )

    def median(self, way: str, who: str) -> float:
        """Of the values of one of them."""
        values: dict[str, list[float]] = getattr(self, way)
        return statistics.median(values[who])


class Outcomes(msgspec.Struct):
    """What was measured by medium, and why a medium is missing."""

    settings: Settings
    media: dict[str, Values] = {}
    missing: dict[str, str] = {}


class Remote:
    """A `Contender`: the remote tier of a URL."""

    def __init__(self, blocks: Blocks, url: str, *, connections: int) -> None:
        """Opens it.

        Raises:
            ContenderError: it cannot be opened.
        """
        self._blocks = blocks
        limits = Limits(connections=connections, timeout_s=_TIMEOUT_S)
        try:
            opened = open_layered(url, limits)
        except KvistError as error:
            raise ContenderError(str(error)) from error
        self._tier = RemoteTier(
            opened.adapter,
            keyspace=bytes(32),
            connections=connections,
            limits=LearnLimits(probe_s=_TIMEOUT_S),
            available=opened.breaker.passes,
            counts=opened.counts.counts,
        )

    def write(self, round_number: int) -> float:
        """Puts every block; seconds."""
        keys = round_keys(round_number, self._blocks.count)
        began = time.perf_counter()
        for first in range(0, len(keys), _BATCH):
            part = range(first, min(first + _BATCH, len(keys)))
            above = [keys[i - 1] if i else None for i in part]
            payloads = [
                Payload(keys[i], parent, self._blocks.view(i))
                for i, parent in zip(part, above, strict=True)
            ]
            try:
                self._tier.put(payloads)
            except KvistError as error:
                raise ContenderError(str(error)) from error
        return time.perf_counter() - began

    def read(self, round_number: int) -> float:
        """Gets every block, and deletes it then; seconds of the first."""
        keys = round_keys(round_number, self._blocks.count)
        self._blocks.forget()
        items = [(key, self._blocks.room(i)) for i, key in enumerate(keys)]
        began = time.perf_counter()
        try:
            outcomes = [outcome for _, outcome in self._tier.read_many(items)]
            took_s = time.perf_counter() - began
            self._tier.remove(keys)
        except KvistError as error:
            raise ContenderError(str(error)) from error
        if any(outcome is not Outcome.HIT for outcome in outcomes):
            raise ContenderError("a block did not come back")
        self._blocks.prove("Kvist")
        return took_s

    def close(self) -> None:
        """Closes the tier."""
        self._tier.close()


Pair = tuple[Contender, Contender]  # Kvist's, and the plain client


def measure(settings: Settings, tell: Callable[[str], None], *, seed: int = 1) -> Outcomes:
    """Runs every medium that can be had; `tell` gets a line now and then.

    Raises:
        ContenderError: a medium failed while it was measured, or gave back other bytes.
    """
    found = Outcomes(settings)
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="kvist-remotes-") as name, ExitStack() as ends:
        blocks = ends.enter_context(
            Blocks(count=settings.blocks, block_bytes=settings.block_bytes, seed=seed)
        )
        for medium, opened in _MEDIA.items():
            if settings.only and medium not in settings.only:
                continue
            folder = Path(name) / medium
            folder.mkdir()
            with ExitStack() as service:
                try:
                    pair = service.enter_context(opened(blocks, folder, settings))
                except ContenderError as error:
                    found.missing[medium] = str(error)
                    continue
                found.media[medium] = _rounds(settings, blocks, pair, chance)
            tell(f"{medium}: {settings.rounds} rounds")
    return found


def _rounds(settings: Settings, blocks: Blocks, pair: Pair, chance: random.Random) -> Values:
    values = Values()
    for number in range(settings.rounds + 1):
        turns = list(zip((KVIST, PLAIN), pair, strict=True))
        chance.shuffle(turns)
        for who, contender in turns:
            put_s, get_s = contender.write(number), contender.read(number)
            if get_s is None:
                raise ContenderError("it reads nothing")
            if number:
                values.put.setdefault(who, []).append(blocks.total_bytes / put_s)
                values.get.setdefault(who, []).append(blocks.total_bytes / get_s)
    return values


@contextmanager
def _pair(
    blocks: Blocks, url: str, settings: Settings, client: Callable[[], plain.Client]
) -> Iterator[Pair]:
    with ExitStack() as ends:
        kvist = Remote(blocks, url, connections=settings.connections)
        ends.callback(kvist.close)
        beside = plain.Plain(blocks, client(), threads=settings.connections)
        ends.callback(beside.close)
        yield kvist, beside


@contextmanager
def _files(blocks: Blocks, folder: Path, settings: Settings) -> Iterator[Pair]:
    client = partial(plain.Files, folder / "beside")
    with _pair(blocks, f"file://{folder}/kvist", settings, client) as pair:
        yield pair


@contextmanager
def _redis(blocks: Blocks, folder: Path, settings: Settings) -> Iterator[Pair]:
    with redis_service(folder) as port:
        client = partial(plain.RedisPy, port, threads=settings.connections)
        with _pair(blocks, f"redis://{HOST}:{port}/0", settings, client) as pair:
            yield pair


@contextmanager
def _s3(blocks: Blocks, folder: Path, settings: Settings) -> Iterator[Pair]:
    del folder
    with s3_service() as port:
        url = f"s3://{BUCKET}/kvist?endpoint=http://{HOST}:{port}&region=us-east-1"
        with _pair(blocks, url, settings, partial(plain.Obstore, port)) as pair:
            yield pair


@contextmanager
def _mooncake(blocks: Blocks, folder: Path, settings: Settings) -> Iterator[Pair]:
    del folder
    with mooncake_service() as (master, metadata):
        url = f"mooncake://{master}?metadata={metadata}"
        client = partial(plain.Mooncake, master, metadata)
        with (
            _held(master, metadata, 4 * blocks.total_bytes),
            _pair(blocks, url, settings, client) as pair,
        ):
            yield pair


@contextmanager
def _held(master: str, metadata: str, size_bytes: int) -> Iterator[None]:
    """A process that gives the pool its memory.

    Raises:
        ContenderError: it does not.
    """
    command = [sys.executable, "-m", "kvist.bench.remotes.holder", master, metadata]
    holder = subprocess.Popen(
        [*command, str(size_bytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin is not None, "it was opened as a pipe"
    assert holder.stdout is not None, "it was opened as a pipe"
    try:
        while (line := holder.stdout.readline()) != b"held\n":
            if not line:
                raise ContenderError("the process that holds the memory did not come up")
        yield
    finally:
        holder.stdin.close()
        try:
            holder.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            holder.kill()
            holder.wait(_STOP_S)
        holder.stdout.close()


_MEDIA = {"files": _files, "redis": _redis, "s3": _s3, "mooncake": _mooncake}
MEDIA = tuple(_MEDIA)
