"""Engines that never rest: publishes KV events as vLLM does, at a rate, as a process of its own.

`python -m kvist.bench.gateway.storm` prints where it publishes.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections import deque
from typing import Any

import msgspec

from kvist.cluster.log import Sealed
from kvist.native import digest
from kvist.node.events import EventPorts

_TOKENS = 16  # of a block
_RUN = 32  # blocks of one event: a step computes so much of a prompt
_EVENTS = 4  # of one message
_MOST_RUNS = 2000  # that are there at once; the oldest go first


class Storm:
    """One publisher: what comes, and as much that goes."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._there: deque[list[bytes]] = deque()
        self._count = 0
        self.number = 0

    def next(self) -> Sealed:
        """The next message, of `_EVENTS` prompts."""
        events = [event for _ in range(_EVENTS) for event in self._prompt()]
        sealed = Sealed(self.number, msgspec.msgpack.encode([time.time(), events, 0]))
        self.number += 1
        return sealed

    def _prompt(self) -> list[dict[str, Any]]:
        self._count += 1
        names = [digest(b"%d %d" % (self._count, n)) for n in range(_RUN)]
        self._there.append(names)
        tokens = [self._dice.randrange(1 << 17) for _ in range(_RUN * _TOKENS)]
        stored: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": names,
            "parent_block_hash": None,
            "token_ids": tokens,
            "block_size": _TOKENS,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "group_idx": 0,
        }
        if len(self._there) <= _MOST_RUNS:
            return [stored]
        gone = self._there.popleft()
        return [stored, {"type": "BlockRemoved", "block_hashes": gone, "medium": "GPU"}]


def main() -> None:
    """Publishes until it is killed. What it says is made beforehand, so that it costs little."""
    parser = argparse.ArgumentParser(prog="python -m kvist.bench.gateway.storm")
    parser.add_argument("--blocks-per-s", type=float, required=True, help="stored a second")
    args = parser.parse_args()
    ports, storm = EventPorts("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"), Storm(0)
    made = deque(storm.next() for _ in range(_MOST_RUNS))
    print(ports.events, flush=True)
    each_s = _RUN * _EVENTS / args.blocks_per_s
    due_s, number, pause = time.monotonic(), 0, threading.Event()
    while True:
        sealed = made[number % len(made)]
        ports.publish(b"", [Sealed(number, sealed.payload)])
        ports.answer(b"", lambda _: [])
        number += 1
        due_s += each_s
        pause.wait(max(0.0, due_s - time.monotonic()))


if __name__ == "__main__":
    main()
