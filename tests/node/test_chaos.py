"""Engines work while the node is killed, stopped, replaced and started again: no wrong byte, ever.

KVIST_STRESS_S sets for how long, KVIST_STRESS_SEED the seed.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from node_process import EngineFailed, EngineProcess, NodeProcess, eventually

from kvist.core.errors import LeaseError, NoSpaceError
from kvist.core.outcome import Outcome
from kvist.node.client import NodeStore
from kvist.testing.store_suite import content, key, put

RUN_S = float(os.environ.get("KVIST_STRESS_S", "6"))
SEED = int(os.environ.get("KVIST_STRESS_SEED", "1"))
UNIVERSE = 60
FRESH = 1000  # from here on, blocks of engines that are killed
SLOTS = 24
LIMIT_S = 60.0


class Worker(threading.Thread):
    """Writes and reads runs of blocks, whatever becomes of the node; every hit must be right."""

    def __init__(self, store: NodeStore, seed: int, until: float) -> None:
        super().__init__(name=f"worker-{seed}", daemon=True)
        self._store, self._chance, self._until = store, random.Random(seed), until
        self.did: Counter[str] = Counter()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while time.monotonic() < self._until:
                first = self._chance.randrange(UNIVERSE - 6)
                numbers = range(first, first + self._chance.randrange(1, 6))
                try:
                    self.did["written"] += sum(put(self._store, numbers))
                    self._read(numbers)
                except NoSpaceError:
                    self.did["no space"] += 1
                    time.sleep(0.001)
                except LeaseError:
                    self.did["died in between"] += 1
        except BaseException as error:
            self.failure = error
            raise

    def _read(self, numbers: range) -> None:
        deadline_s = self._chance.choice([0.0, 0.05, 2.0])
        began = time.monotonic()
        with self._store.read([key(n) for n in numbers], deadline_s=deadline_s) as lease:
            found = [lease.wait(i) for i in range(len(lease))]
            assert Outcome.PENDING not in found
            assert time.monotonic() - began < deadline_s + LIMIT_S / 4
            for i, n in enumerate(numbers):
                if found[i] is not Outcome.HIT:
                    self.did["missed"] += 1
                    continue
                view = lease.buffer(i)  # the node may die from here on: the bytes stay
                time.sleep(self._chance.choice([0, 0, 0.002]))
                assert bytes(view) == content(key(n)), f"block {n} has other bytes"
                self.did["right"] += 1


def torment(node: NodeProcess, chance: random.Random, until: float) -> Counter[str]:
    """Kills, stops and ends the node and engines of it, again and again."""
    did: Counter[str] = Counter()
    while time.monotonic() < until:
        time.sleep(chance.uniform(0.05, 0.6))
        what = chance.choice(["kill", "end", "stop", "engine"])
        did[what] += 1
        if what == "stop":
            node.stop()
            time.sleep(chance.uniform(0.05, 0.8))
            node.go_on()
        elif what == "engine":
            first = FRESH + 10 * did["engine"]
            orders = (f"put:{first}:2", f"read:{first}:2", f"write:{first + 2}:2")
            with contextlib.suppress(EngineFailed):  # there may be no room, or no node
                EngineProcess(node.path, *orders).kill()
        else:
            node.kill() if what == "kill" else node.terminate()
            node.start_again()
    return did


@pytest.mark.slow
@pytest.mark.timeout(RUN_S + 4 * LIMIT_S)
def test_no_death_of_a_node_shows_an_engine_a_wrong_byte(folder: Path) -> None:
    with (
        NodeProcess(folder / "n.sock", slots=SLOTS, ssd=folder / "ssd") as node,
        node.client(answer_s=0.2) as a,
        node.client(answer_s=0.2) as b,
    ):
        until = time.monotonic() + RUN_S
        workers = [Worker(store, SEED * 100 + i, until) for i, store in enumerate((a, a, b, b))]
        for worker in workers:
            worker.start()
        did = torment(node, random.Random(SEED), until)
        for worker in workers:
            worker.join(LIMIT_S)
            assert not worker.is_alive(), f"{worker.name} hangs"
        assert [w.failure for w in workers if w.failure is not None] == []
        total = sum((w.did for w in workers), Counter())
        assert min(total["right"], total["written"], sum(did.values())) > 0, (total, did)
        eventually(lambda: a.attached and b.attached, LIMIT_S)
        eventually(lambda: node.status()["lingering"] == 0, LIMIT_S)
        eventually(lambda: sum(k["leases"] for k in node.status()["keyspaces"]) == 0, LIMIT_S)
        node.assert_sound()
