"""What a benchmark run measured, as it is kept in a JSON file: every sample, none averaged."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path

import msgspec

from kvist.core.errors import ConfigError

SCHEMA = 1
_MAX_FILE_BYTES = 16 << 20


class Kind(Enum):
    """Where the KV of a measured request came from."""

    COLD = "cold"  # nowhere: a prompt that nobody has seen
    REPEAT = "repeat"  # the engine's own prefix cache
    RESTART = "restart"  # a cache that outlived the engine process
    DISK = "disk"  # the same, and the kernel has none of its files in memory
    MEMORY = "memory"  # a cache's memory, the engine's own prefix cache being empty
    SLOW = "slow"  # a disk slower than computing, as far as it is used
    FLOW = "flow"  # nowhere: a batch of prompts that nobody has seen, prefill and decode
    FIRST = "first"  # nowhere: one more such prompt, its first token, where nothing ever hits


class Phase(Enum):
    """Part of a run."""

    FILL = "fill"  # prompts are computed by every participant, and saved by those that can
    FLOW = "flow"  # batches without any reuse
    REUSE = "reuse"  # caches were restarted; the prompts of FILL come again
    DISK = "disk"  # once more, from files that are on the disk only
    HARM = "harm"  # a disk slower than computing


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One timed call of an engine."""

    phase: Phase
    kind: Kind
    participant: str
    prompt_tokens: int
    round: int
    took_s: float
    cached_tokens: int


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a run took place."""

    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    python: str
    versions: dict[str, str]
    commit: str
    load_before: float
    load_after: float = 0.0


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was asked of a run."""

    rounds: int
    lengths_tokens: list[int]
    model: str
    dtype: str
    engine_cores: str
    flow_prompts: int
    flow_prompt_tokens: int
    flow_output_tokens: int
    seed: int
    flow_starts: int = 1  # processes of each engine that serve batches, one after the other
    restart_each_round: bool = False  # of REUSE; older runs restarted once
    flow_batches: int = 0  # of each start; 0: as many as rounds
    flow_singles: int = 0  # single prompts after each batch

    def batches_per_start(self) -> int:
        """Batches of FLOW that one process serves and that count."""
        return self.flow_batches or self.rounds


class Result(msgspec.Struct, forbid_unknown_fields=True):
    """A run. `absent`: participant → why it was not measured, or not to the end."""

    started: str
    machine: Machine
    settings: Settings
    schema: int = SCHEMA
    took_s: float = 0.0
    complete: bool = False
    samples: list[Sample] = []
    absent: dict[str, str] = {}
    prefill_error_ratio: float | None = None  # median, of the passes that Kvist predicted

    def times_s(
        self, phase: Phase, kind: Kind, participant: str, prompt_tokens: int
    ) -> dict[int, float]:
        """Seconds by round, of the samples that are what they claim to be (`valid`)."""
        return {
            s.round: s.took_s
            for s in self.samples
            if (s.phase, s.kind, s.participant, s.prompt_tokens)
            == (phase, kind, participant, prompt_tokens)
            and valid(s)
        }

    def flaws(self) -> list[Sample]:
        """Samples that are not what they claim to be."""
        return [s for s in self.samples if not valid(s)]


def valid(sample: Sample) -> bool:
    """Whether a cold request found nothing, and another one all but the last two blocks.

    An engine recomputes at least one token, so the last full block may be missing; a cache that
    keeps larger blocks may lack a little more.
    """
    if sample.kind in (Kind.COLD, Kind.FLOW, Kind.FIRST):
        return sample.cached_tokens == 0
    if sample.kind is Kind.SLOW:
        return True
    return sample.cached_tokens >= sample.prompt_tokens - 256


def after(machine: Machine, load_after: float) -> Machine:
    """The same machine when the run has ended."""
    return msgspec.structs.replace(machine, load_after=load_after)


def write(run: msgspec.Struct, path: Path) -> None:
    """Writes any benchmark's run; `path` holds either the old or the new text at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(run), indent=1)
    work = path.with_name(f".{path.name}.{os.getpid()}")
    work.write_bytes(text + b"\n")
    work.replace(path)


def read(path: Path) -> Result:
    """A run that `write` wrote.

    Raises:
        ConfigError: it cannot be read or is something else.
    """
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"{path} is too large for a benchmark result")
        result = msgspec.json.decode(path.read_bytes(), type=Result)
    except (OSError, msgspec.MsgspecError) as e:
        raise ConfigError(f"{path} is no benchmark result: {e}") from e
    if result.schema != SCHEMA:
        raise ConfigError(f"{path} has schema {result.schema}, this Kvist reads {SCHEMA}")
    return result
