"""Runs every driver in turn, round by round, on one core and on all of them."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvist.bench.environments import SETUP_SCRIPT, peer_python
from kvist.bench.machine import describe_machine, load
from kvist.bench.samples import Machine

KVIST, SEVERAL, ENGINES, DYNAMO = "kvist", "kvist-several", "kvist-engines", "dynamo"
ONE_CORE, ALL_CORES = "one core", "all cores"
_DRIVERS = Path(__file__).with_name("drivers")
_RUN_S = 900.0
_MOST_WORDS = 300
_LEAST_FOR_P99 = 100


class Settings(msgspec.Struct, frozen=True):
    """The size of a run."""

    workers: int = 64
    entries: int = 1 << 20
    prompt_blocks: int = 8192
    shared_blocks: int = 1024
    samples: int = 200
    rounds: int = 3


Samples = dict[str, list[float]]  # by a name that ends in their unit


class Figure(msgspec.Struct, frozen=True):
    """Samples of all rounds, summed up; of fewer than 100 there is no 99th percentile."""

    samples: int
    median: float
    p99: float | None

    @classmethod
    def of(cls, samples: list[float]) -> Figure:
        """Sums up samples, of which there is at least one."""
        count = len(samples)
        p99 = sorted(samples)[int(count * 0.99)] if count >= _LEAST_FOR_P99 else None
        return cls(count, statistics.median(samples), p99)


class Outcome(msgspec.Struct, frozen=True):
    """A run as it is written to a file: way (of cores) → contender → name → figure."""

    machine: Machine
    settings: Settings
    figures: dict[str, dict[str, dict[str, Figure]]]
    missing: dict[str, str]  # contenders that could not be measured, and why
    schema: int = 1

    def figure(self, way: str, contender: str, name: str) -> Figure | None:
        """A figure, if it was measured."""
        return self.figures.get(way, {}).get(contender, {}).get(name)


class DriverError(RuntimeError):
    """A driver did not answer."""


@dataclass(frozen=True, slots=True)
class _Contender:
    name: str
    python: Path
    script: str
    events: str


def _contenders(missing: dict[str, str]) -> Iterator[_Contender]:
    """Who can be measured here; says why others cannot."""
    python = peer_python(DYNAMO)
    if python is None:
        missing[DYNAMO] = f"no environment; {SETUP_SCRIPT} makes it"
    else:
        yield _Contender(DYNAMO, python, "dynamo_driver.py", "nodes")
    yield _Contender(KVIST, Path(sys.executable), "kvist_driver.py", "nodes")
    yield _Contender(SEVERAL, Path(sys.executable), "kvist_driver.py", "several")
    yield _Contender(ENGINES, Path(sys.executable), "kvist_driver.py", "engines")


def measure(settings: Settings, say: Callable[[str], None]) -> Outcome:
    """Measures all that can be; what fails is left out, and says why."""
    machine = describe_machine()
    missing: dict[str, str] = {}
    contenders = list(_contenders(missing))
    ways = {ONE_CORE: sorted(os.sched_getaffinity(0))[-1:], ALL_CORES: []}
    taken: dict[str, dict[str, Samples]] = {way: {} for way in ways}
    for round_number in range(settings.rounds):
        for way, cores in ways.items():
            for contender in contenders:
                if contender.name in missing:
                    continue
                say(f"round {round_number + 1} of {settings.rounds}: {contender.name}, {way}")
                try:
                    found = _driven(contender, settings, cores)
                except DriverError as error:
                    missing[contender.name] = str(error)
                    continue
                kept = taken[way].setdefault(contender.name, {})
                for name, samples in found.items():
                    kept.setdefault(name, []).extend(samples)
    machine = msgspec.structs.replace(machine, load_after=load())
    figures = {
        way: {
            contender: {name: Figure.of(samples) for name, samples in kept.items()}
            for contender, kept in sides.items()
        }
        for way, sides in taken.items()
    }
    return Outcome(machine, settings, figures, missing)


def _driven(contender: _Contender, settings: Settings, cores: list[int]) -> Samples:
    told = msgspec.to_builtins(settings) | {"cores": cores, "events": contender.events}
    command = [str(contender.python), contender.script, msgspec.json.encode(told).decode()]
    try:
        done = subprocess.run(command, cwd=_DRIVERS, capture_output=True, text=True, timeout=_RUN_S)
    except subprocess.TimeoutExpired as error:
        raise DriverError(f"no answer in {_RUN_S:.0f} s") from error
    if done.returncode:
        words = done.stderr.strip().splitlines() or ["without a word"]
        raise DriverError(words[-1][:_MOST_WORDS])
    try:
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=Samples)
    except (IndexError, msgspec.DecodeError) as error:
        raise DriverError(f"not an answer: {done.stdout[-_MOST_WORDS:]}") from error
