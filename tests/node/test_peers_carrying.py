"""Blocks that are carried: the right ones or misses, in time, whoever is killed, stopped or lies.

Each test runs with carriers that read another process's memory, which is always possible, and with
NIXL where it is installed: `pip install --no-deps nixl nixl-cu12`. NIXL then uses TCP on loopback,
so that an owner that is stopped stops a read half-way.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from carried import BLOCKS, KINDS, TIMEOUT_S, Owner, Reader, alive, needs_nixl, pair, stopped
from peer_thread import until

from kvist.node.peers.carrying.staging import LOTS
from kvist.node.peers.carrying.transport import Carrying

ALL = range(BLOCKS)
LATE_S = 3 * TIMEOUT_S
START_S = 90.0


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """How bytes travel."""
    return str(request.param)


@pytest.fixture
def both(kind: str) -> Iterator[tuple[Owner, Reader]]:
    """An owner and a reader; nothing is left of them."""
    with pair(kind) as (owner, reader):
        yield owner, reader
        reads = reader.carrying.facts()["reads"]
    assert isinstance(reads, list)
    until(lambda: not any(map(alive, reads)))


def test_blocks_are_carried_whole_and_what_is_not_there_is_a_miss(
    both: tuple[Owner, Reader],
) -> None:
    owner, reader = both
    before = reader.carrying.counts.blocks
    assert reader.read([*ALL, BLOCKS]) == [True] * BLOCKS + [False]
    assert reader.carrying.counts.blocks - before == BLOCKS
    assert reader.carrying.counts.failures == 0
    until(lambda: owner.say("leases") == "0")
    shows = owner.carrier()
    owner.end()
    until(lambda: not alive(shows))


def test_block_that_is_not_what_its_checksum_says_is_a_miss(both: tuple[Owner, Reader]) -> None:
    owner, reader = both
    owner.say("spoil 7")
    assert reader.read(ALL) == [n != 7 for n in ALL]


def test_owner_that_is_killed_or_stopped_costs_misses_in_time(both: tuple[Owner, Reader]) -> None:
    owner, reader = both
    with stopped(owner.process.pid):
        began = time.monotonic()
        assert reader.read(ALL) == [False] * BLOCKS
        assert time.monotonic() - began < LATE_S
    until(reader.carried, START_S)
    reader.learn(BLOCKS)
    shows = owner.carrier()
    owner.kill()
    began = time.monotonic()
    assert reader.read(ALL) == [False] * BLOCKS
    assert time.monotonic() - began < LATE_S
    until(lambda: not alive(shows))


@needs_nixl
def test_read_that_stalls_half_way_is_a_miss_in_time_and_its_lot_comes_back_later() -> None:
    """NIXL cannot call a read back: what is late still writes, to a lot that nobody uses."""
    with pair("nixl") as (owner, reader):
        with stopped(owner.carrier()):
            began = time.monotonic()
            assert reader.read(ALL) == [False] * BLOCKS
            assert time.monotonic() - began < LATE_S
            assert reader.carrying.facts()["late_lots"] != 0
            until(lambda: owner.say("leases") == "0")
        until(lambda: reader.carrying.facts()["late_lots"] == 0)
        until(reader.carried, START_S)
        reader.learn(BLOCKS)
        assert reader.read(ALL) == [True] * BLOCKS


@needs_nixl
@pytest.mark.parametrize("whole", [False, True], ids=["carrier", "owner"])
def test_owner_killed_while_it_is_read_from_is_over_in_time(whole: bool) -> None:
    """Of its carrier alone: blocks are sent. Of the owner as well: what had not come is missed."""
    with pair("nixl") as (owner, reader), ThreadPoolExecutor(1) as crew:
        staging = reader.peering.carrying._staging  # type: ignore[union-attr]
        assert staging is not None
        shows = owner.carrier()
        with stopped(shows):
            read = crew.submit(reader.read, ALL)
            until(lambda: staging.free_lots < LOTS)
            began = time.monotonic()
            if whole:
                owner.kill()
            else:
                os.kill(shows, signal.SIGKILL)
            hits = read.result(LATE_S)
            assert time.monotonic() - began < LATE_S
        assert hits == [not whole] * BLOCKS
        if not whole:
            until(reader.carried, START_S)
            reader.learn(BLOCKS)
            assert reader.read(ALL) == [True] * BLOCKS


def test_own_carrier_that_is_stopped_costs_misses_in_time_and_no_lot(
    both: tuple[Owner, Reader],
) -> None:
    owner, reader = both
    with stopped(reader.carrier()):
        began = time.monotonic()
        assert reader.read(ALL) == [False] * BLOCKS
        assert time.monotonic() - began < LATE_S
        assert reader.carrying.facts()["late_lots"] != 0
    until(lambda: reader.carrying.facts()["late_lots"] == 0)
    until(lambda: owner.say("leases") == "0")
    until(reader.carried, START_S)


def test_own_carrier_that_is_killed_costs_nothing_and_comes_back(
    both: tuple[Owner, Reader],
) -> None:
    _, reader = both
    killed = reader.carrier()
    with stopped(killed):  # so that blocks are surely on their way
        os.kill(killed, signal.SIGKILL)
        assert reader.read(ALL) == [True] * BLOCKS  # over TCP
    until(reader.carried, START_S)
    assert reader.carrier() != killed


def test_owner_whose_carrier_is_killed_sends_blocks_and_has_another_one(
    both: tuple[Owner, Reader],
) -> None:
    owner, reader = both
    killed = owner.carrier()
    os.kill(killed, signal.SIGKILL)
    until(lambda: not alive(killed))
    assert reader.read(ALL) == [True] * BLOCKS
    until(lambda: owner.say("carriers") not in ("", str(killed)), START_S)
    until(reader.carried, START_S)


def test_lots_that_never_come_back_are_freed_by_ending_the_carrier() -> None:
    """A carrier that hangs keeps what it may still write to; it is ended, and nothing is lost."""
    with pair("memory") as (_, reader):
        staging = reader.peering.carrying._staging  # type: ignore[union-attr]
        assert staging is not None
        staging._patience_s = 0.0
        hung = reader.carrier()
        os.kill(hung, signal.SIGSTOP)
        assert reader.read(ALL) == [False] * BLOCKS
        assert staging.late_lots > 0
        until(reader.carried, START_S)
        assert not alive(hung)
        assert staging.late_lots == 0
        assert staging.free_lots == LOTS


def test_without_a_carrier_on_the_other_side_blocks_are_sent_and_it_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    carrying = Carrying("memory")
    with Owner("another") as owner:
        reader = Reader(owner.address, carrying)
        until(lambda: carrying.facts()["reads"] != [], START_S)
        reader.learn(BLOCKS)
        for _ in range(3):
            assert reader.read(ALL) == [True] * BLOCKS
        reader.tier.close()
        carrying.close()
    assert carrying.counts.blocks == 0
    assert caplog.text.count("does not offer memory") == 1


def test_carrier_that_cannot_begin_says_why_and_blocks_are_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    carrying = Carrying("pigeon")
    with Owner("pigeon") as owner:
        reader = Reader(owner.address, carrying)
        reader.learn(BLOCKS)
        assert reader.read(ALL) == [True] * BLOCKS
        until(lambda: "'pigeon' is no way to carry blocks" in caplog.text, START_S)
        reader.tier.close()
        carrying.close()
