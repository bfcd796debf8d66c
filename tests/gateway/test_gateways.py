"""Several gateways, as processes of their own, before the same engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

import pytest
from gateway_thread import LIMIT_S, Running, eventually, small_router, stats

from kvist.testing.stub_engine import Pace, StubEngine

COMPLETIONS = "/v1/completions"
ASKED = {"prompt": "p" * 100, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
START_S = 60.0


@dataclass
class Gateway:
    """A process of `kvist gateway`."""

    process: subprocess.Popen[str]
    port: int
    asking: list[threading.Thread] = field(default_factory=list)

    @property
    def client(self) -> Running:
        """Asks it."""
        return Running(self.port, small_router(), lambda: None)

    def sample(self, name: str) -> float:
        """A value of `/metrics`."""
        return self.client.samples()[name]

    def hears_anew(self) -> None:
        """Returns when it has heard three words more.

        The second was said after this began, and the third that nothing was booked since.
        """
        name = "kvist_gateway_peer_words_total"
        before = self.sample(name)
        eventually(lambda: self.sample(name) >= before + 3)

    def begin(self, engines: Sequence[StubEngine]) -> None:
        """Sends a request that no engine answers; returns when one has it."""
        had = sum(running(engines))

        thread = threading.Thread(target=self._ask, daemon=True)
        thread.start()
        self.asking.append(thread)
        eventually(lambda: sum(running(engines)) == had + 1)

    def _ask(self) -> None:
        with suppress(OSError, HTTPException), self.client.open(COMPLETIONS, ASKED):
            pass  # the gateway is ended under it


def running(engines: Sequence[StubEngine]) -> list[int]:
    """Requests at each engine."""
    return [stats(engine)["running"] for engine in engines]


@contextmanager
def gateways(
    engines: Sequence[StubEngine], folder: Path, count: int, *sets: str, told: bool = True
) -> Iterator[list[Gateway]]:
    """Gateways that tell each other, or not."""
    places = [f"ipc://{folder}/{n}" for n in range(count)]
    with ExitStack() as stack:
        started = []
        for place in places:
            command = [sys.executable, "-m", "kvist.cli.main", "gateway", "--json", "--quiet"]
            command += [*(engine.url for engine in engines), "--listen=127.0.0.1:0"]
            peers = {"listen": place, "members": ",".join(places), "expire_s": "1.5"}
            if told:
                command += [f"--set=gateway.peers.{name}={value}" for name, value in peers.items()]
            command += [f"--set={text}" for text in sets]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            started.append(process)
        found = []
        for process in started:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            found.append(Gateway(process, int(url.rpartition(":")[2])))
        if told:
            for one in found:
                eventually(lambda g=one: g.sample("kvist_gateway_peers") == count - 1, START_S)
        yield found


@pytest.fixture(scope="module")
def engines() -> Iterator[list[StubEngine]]:
    """Engines that take for ever to their first token."""
    with ExitStack() as stack:
        yield [stack.enter_context(StubEngine(Pace(prefill_s=600.0))) for _ in range(4)]


@pytest.fixture(autouse=True)
def _idle(engines: list[StubEngine]) -> Iterator[None]:
    yield
    eventually(lambda: running(engines) == [0] * 4)


@pytest.mark.parametrize(
    ("policy", "told", "spread"),
    [
        ("least-loaded", False, [2, 2, 0, 0]),
        ("least-loaded", True, [1, 1, 1, 1]),
        ("kvist", True, [1, 1, 1, 1]),
    ],
)
def test_burst_at_two_gateways_spreads_if_they_tell_each_other(
    engines: list[StubEngine], tmp_path: Path, policy: str, told: bool, spread: list[int]
) -> None:
    """Each takes the idlest as it sees it, so two that do not know of each other take the same."""
    sets = (f"router.policy={policy}",)
    with gateways(engines, tmp_path, 2, *sets, told=told) as found:
        for n in range(4):
            found[n % 2].begin(engines)
            if told:
                found[(n + 1) % 2].hears_anew()
        assert running(engines) == spread


def test_bookings_of_a_killed_gateway_are_forgotten(
    engines: list[StubEngine], tmp_path: Path
) -> None:
    with gateways(engines, tmp_path, 2, "router.policy=least-loaded") as (first, second):
        first.begin(engines)
        first.begin(engines)
        second.hears_anew()
        second.begin(engines)
        assert running(engines) == [1, 1, 1, 0]
        os.kill(first.process.pid, signal.SIGKILL)
        eventually(lambda: running(engines) == [0, 0, 1, 0])
        eventually(lambda: second.sample("kvist_gateway_peers") == 0)
        second.begin(engines)
        assert running(engines) == [1, 0, 1, 0]


@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
def test_tenants_limit_holds_over_all_gateways(
    tmp_path: Path, engine: StubEngine, told: bool
) -> None:
    """What one lets in is known to the other a word later: two requests here."""
    limit, each = 40, 2
    sets = (f"gateway.limits.requests_per_min={limit}",)
    with gateways([engine], tmp_path, 2, *sets, told=told) as found:
        admitted, began_s = 0, time.monotonic()
        while True:
            answers = [g.client.ask(COMPLETIONS, ASKED)[0] for g in found for _ in range(each)]
            admitted += answers.count(200)
            if answers.count(429) == len(answers):
                break
            for gateway in found if told else ():
                gateway.hears_anew()
            assert time.monotonic() < began_s + LIMIT_S * 3
        refilled = (time.monotonic() - began_s) * limit / 60
        allowed = limit * (1 if told else 2)
        assert allowed <= admitted <= allowed + (1 if told else 2) * (refilled + each)
