"""What every driver does: the same prompts, the same questions, the same clock.

Each of the workers holds a few long prompts; all prompts begin with the same blocks, as with a
system prompt. Standard library and numpy only: it runs in peers' environments, too.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

BLOCK_TOKENS = 16
EVENT_BLOCKS = 16
MESSAGE_EVENTS = 16  # of a message that carries several
_VOCABULARY = 128_256
_SEED = 0


class Workload:
    """Prompts of each worker, and those that are asked for."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """Makes the prompts.

        Args:
            settings: `workers`, `entries` (about how many blocks they hold together),
                `prompt_blocks`, `shared_blocks`, `samples`; `cores` to run on, all if empty;
                `events`: `nodes` (keys), `engines` (tokens), or `several` (keys, several events
                a message), for a driver that knows them.
        """
        self.events: str = settings["events"]
        if settings["cores"]:
            os.sched_setaffinity(0, settings["cores"])
        self.workers: int = settings["workers"]
        self.prompt_blocks: int = settings["prompt_blocks"]
        self.shared_blocks: int = settings["shared_blocks"]
        self.samples: int = settings["samples"]
        rng = np.random.default_rng(_SEED)
        shared = _tokens(rng, self.shared_blocks)
        each = max(1, settings["entries"] // (self.workers * self.prompt_blocks))
        rest = self.prompt_blocks - self.shared_blocks
        self.prompts = [
            [shared + _tokens(rng, rest) for _ in range(each)] for _ in range(self.workers)
        ]
        self.unknown = _tokens(rng, self.prompt_blocks)

    @property
    def entries(self) -> int:
        """Blocks held, counted for each worker."""
        own = len(self.prompts[0]) * (self.prompt_blocks - self.shared_blocks)
        return self.workers * (own + self.shared_blocks)

    def runs(self, prompt: int) -> range:
        """First blocks of the events that bring a worker's prompt; shared blocks come but once."""
        return range(self.shared_blocks if prompt else 0, self.prompt_blocks, EVENT_BLOCKS)

    def ask_of(self, sample: int) -> tuple[int, int]:
        """The worker and the number of its prompt that a sample asks for."""
        worker = sample % self.workers
        return worker, sample // self.workers % len(self.prompts[worker])

    def timed(self, call: Callable[[int], object]) -> list[float]:
        """Seconds of each of the samples' calls."""
        times = []
        for sample in range(self.samples):
            began = time.perf_counter()
            call(sample)
            times.append(time.perf_counter() - began)
        return times


def _tokens(rng: np.random.Generator, blocks: int) -> list[int]:
    found: list[int] = rng.integers(0, _VOCABULARY, blocks * BLOCK_TOKENS).tolist()
    return found


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Spent:
    """What applying events takes, from its making on: time, CPU time of all threads, memory."""

    def __init__(self, work: Workload) -> None:
        """Begins now."""
        self._entries = work.entries
        self._bytes = resident_bytes()
        self._cpu_s = time.process_time()
        self._began_s = time.perf_counter()

    def of_an_entry(self) -> dict[str, list[float]]:
        """Until now, of each block of a worker."""
        took_s = time.perf_counter() - self._began_s
        cpu_s = time.process_time() - self._cpu_s
        used = resident_bytes() - self._bytes
        figures = {"entry_s": took_s, "entry_cpu_s": cpu_s, "entry_bytes": used}
        return {name: [value / self._entries] for name, value in figures.items()}


def answer(measure: Callable[[Workload], dict[str, list[float]]]) -> None:
    """Measures by the settings in the first argument; prints JSON: seconds, or bytes, by name."""
    print(json.dumps(measure(Workload(json.loads(sys.argv[1])))))
