"""An engine in a process of its own: takes leases as it is told and says what it holds.

Arguments: the socket, then orders: `write:FIRST:COUNT` reserves blocks, fills half of each and
keeps the lease; `put:FIRST:COUNT` writes and commits; `read:FIRST:COUNT` leases and keeps. `worker`
starts a process that maps the arena as a vLLM worker does and outlives this one. Then it waits for
its end.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from node_process import attach

from kvist.core.outcome import Outcome
from kvist.node.client import NodeStore
from kvist.testing.store_suite import key, put, ref

LONG_S = 600.0
WORKER = """
import sys, threading
from kvist.tiers.dram import Arena, ArenaLocator
numbers = [int(text) for text in sys.argv[1:]]
arena = Arena.join(ArenaLocator(*numbers))
print("mapped", flush=True)
threading.Event().wait(600)
"""


def main() -> None:
    """Carries out the orders, says `ready` and waits."""
    path, *orders = sys.argv[1:]
    store = NodeStore(Path(path), attach(1), name="engine")
    kept: list[object] = []
    for order in orders:
        what, *numbers = order.split(":")
        if what == "worker":
            start_worker(store)
            continue
        first, count = map(int, numbers)
        if what == "put":
            assert all(put(store, range(first, first + count)))
        elif what == "write":
            lease = store.write([ref(n) for n in range(first, first + count)])
            for i in range(count):
                buffer = lease.buffer(i)
                buffer[: len(buffer) // 2] = bytes(len(buffer) // 2)
            kept.append(lease)
        else:
            reading = store.read([key(n) for n in range(first, first + count)], deadline_s=LONG_S)
            print([reading.outcome(i) is Outcome.HIT for i in range(count)], file=sys.stderr)
            kept.append(reading)
    print("ready", flush=True)
    threading.Event().wait(LONG_S)


def start_worker(store: NodeStore) -> None:
    """A process that has the arena mapped; says its number."""
    locator = store.locator()
    assert locator is not None
    numbers = (
        locator.pid,
        locator.fd,
        locator.size_bytes,
        locator.slot_bytes,
        locator.base,
        locator.life,
    )
    reader, writer = os.pipe()
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", WORKER, *map(str, numbers)],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, writer, 1)],
    )
    os.close(writer)
    assert os.read(reader, 64).startswith(b"mapped")  # `reader` stays open: it may write more
    print(f"worker {pid}", flush=True)


if __name__ == "__main__":
    main()
