"""What a run of the store benchmark measured, as it is kept in a JSON file: every sample."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Literal

import msgspec

from kvist.bench.samples import Machine
from kvist.core.errors import ConfigError

SCHEMA = 1
KVIST, LIMIT, FILES = "kvist", "limit", "files"
REDIS, LMCACHE, MOONCAKE = "redis", "lmcache", "mooncake"
PEERS = (FILES, REDIS, LMCACHE, MOONCAKE)

_MAX_FILE_BYTES = 16 << 20


class Row(Enum):
    """What is measured; the unit of its values."""

    DRAM_WRITE = "dram_write"  # bytes per second, as all moves
    DRAM_READ = "dram_read"
    DRAM_WRITE_SUMMED = "dram_write_summed"  # with the checksum taken as the bytes pass
    DRAM_READ_SUMMED = "dram_read_summed"
    TOKENS_APART_WRITE = "tokens_apart_write"  # the engine's pages are in another order
    TOKENS_APART_READ = "tokens_apart_read"
    TRANSPOSED_WRITE = "transposed_write"
    TRANSPOSED_READ = "transposed_read"
    DISK_WRITE = "disk_write"
    DISK_READ = "disk_read"
    MATCH = "match"  # seconds
    INDEX = "index"  # bytes a block
    OPEN = "open"  # seconds


class StoreSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One value of `row` in one round; `who` is Kvist, the limit or a peer."""

    row: Row
    who: str
    round: int
    value: float


class StoreSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was asked of a run. `medium`: the file system that the disk rows were measured on."""

    rounds: int
    medium: str
    block_bytes: int = 2 << 20
    dram_blocks: int = 128
    disk_blocks: int = 128
    threads: int = 2
    write_depth: int = 1
    read_depth: int = 16
    match_keys: int = 8192
    indexed_blocks: int = 1_000_000


class StoreResult(msgspec.Struct, forbid_unknown_fields=True):
    """A run. `absent`: peer and medium, or row → why it was not measured, or not to the end."""

    started: str
    machine: Machine
    settings: StoreSettings
    part: Literal["store"] = "store"
    schema: int = SCHEMA
    took_s: float = 0.0
    complete: bool = False
    samples: list[StoreSample] = []
    absent: dict[str, str] = {}

    def add(self, row: Row, who: str, round_number: int, value: float) -> None:
        """Keeps one value."""
        self.samples.append(StoreSample(row, who, round_number, value))

    def values(self, row: Row, who: str) -> dict[int, float]:
        """Values by round."""
        return {s.round: s.value for s in self.samples if (s.row, s.who) == (row, who)}


def is_store(path: Path) -> bool:
    """Whether a file holds a result of this benchmark, as far as one can see without reading it."""
    try:
        return b'"part": "store"' in path.read_bytes()[:_MAX_FILE_BYTES]
    except OSError:
        return False


def read(path: Path) -> StoreResult:
    """A run that `write` wrote.

    Raises:
        ConfigError: it cannot be read or is something else.
    """
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"{path} is too large for a benchmark result")
        result = msgspec.json.decode(path.read_bytes(), type=StoreResult)
    except (OSError, msgspec.MsgspecError) as e:
        raise ConfigError(f"{path} is no result of the store benchmark: {e}") from e
    if result.schema != SCHEMA:
        raise ConfigError(f"{path} has schema {result.schema}, this Kvist reads {SCHEMA}")
    return result
