"""The reader's side against owners that are right, wrong, gone, or more than one."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace

import pytest
from node_process import attach
from peer_thread import owner, peering, until
from test_peers_fuzz import _member, said

from kvist.core.errors import ClosedError
from kvist.core.outcome import Outcome
from kvist.native import checksum
from kvist.native.answer import BLOCK, HIT, MISS
from kvist.node.peers import messages as m
from kvist.node.peers.beliefs import Probed
from kvist.node.peers.member import Member
from kvist.node.peers.tier import PeerTier
from kvist.node.protocol import ProtocolError
from kvist.testing.store_suite import RAW_BYTES, DictTier, content, key
from kvist.tiers.remote.knowledge import Knowledge

KEYS = [key(n) for n in range(4)]
GREETING = b"".join(
    m.encode(message)
    for message in (m.Challenge(2, b"o" * 16, b"y" * 32, False), m.Proof(b""), m.Welcome(True))
)


def frame(n: int, of: int, size_bytes: int = RAW_BYTES) -> bytes:
    """Block `of` as the answer to the n-th key."""
    block = content(key(of), size_bytes)
    return BLOCK.pack(n, HIT, size_bytes, checksum(block), key(of)) + block


@pytest.mark.parametrize(
    "frames",
    [
        [frame(0, 1)],
        [frame(0, 0), frame(0, 0)],
        [frame(0, 0), frame(9, 1)],
        [frame(0, 0, RAW_BYTES + 1)],
        [frame(0, 0, RAW_BYTES - 1)],
        [BLOCK.pack(0, 2, RAW_BYTES, 0, key(0))],
        [BLOCK.pack(0, MISS, RAW_BYTES, 0, key(0))],
    ],
)
def test_answers_out_of_step_end_the_conversation_and_are_no_hit(frames: list[bytes]) -> None:
    """Each block is whole, but not what was asked for there."""
    wire, theirs = said(GREETING + b"".join(frames))
    member = _member(wire)
    outs = [bytearray(RAW_BYTES) for _ in range(2)]
    items = [(i, key(i), memoryview(outs[i])) for i in range(2)]
    settled: dict[int, Outcome] = {}
    with pytest.raises(ProtocolError):
        member.read(items, settled.update, time.monotonic() + 1.0, lambda: True)
    for i, outcome in settled.items():
        assert outcome is Outcome.HIT
        assert bytes(outs[i]) == content(key(i))
    assert member.counts.failed == 1
    theirs.close()


def _read(lender: PeerTier) -> list[Outcome]:
    outs = [bytearray(RAW_BYTES) for _ in KEYS]
    outcomes = dict(lender.read_many(list(zip(KEYS, map(memoryview, outs), strict=True))))
    for i, outcome in outcomes.items():
        assert outcome is Outcome.MISS or bytes(outs[i]) == content(KEYS[i])
    return [outcomes[i] for i in range(len(KEYS))]


@contextlib.contextmanager
def _lender(*servers: object):  # type: ignore[no-untyped-def]
    found = [peering(server) for server in servers]  # type: ignore[arg-type]
    both = replace(found[0], members=tuple(f.members[0] for f in found))
    lender = both.lender(attach(1))
    assert lender is not None
    yield lender
    lender.close()


def test_blocks_that_one_peer_fails_to_bring_come_from_another() -> None:
    with owner() as (first, _), owner() as (second, _), _lender(first, second) as lender:
        until(lambda: all(len(known) == 4 for known in _asked(lender)))
        assert _read(lender) == [Outcome.HIT] * 4
        first.stop(5.0)
        assert _read(lender) == [Outcome.HIT] * 4
        assert _read(lender) == [Outcome.HIT] * 4
        assert [member.resting() for member in _members(lender)] == [True, False]
        second.stop(5.0)
        assert _read(lender) == [Outcome.MISS] * 4
        assert [member.queued_bytes for member in _members(lender)] == [0, 0]


def test_what_one_peer_brings_is_told_while_another_is_slow() -> None:
    below = DictTier()
    with owner(below=below) as (slow, lagging), owner() as (quick, other):
        assert lagging.evict(KEYS[:3]) == 3
        assert other.evict(KEYS[3:]) == 1
        with _lender(slow, quick) as lender:
            until(lambda: [len(known) for known in _asked(lender)] == [1, 3])
            below.open.clear()
            outs = [bytearray(RAW_BYTES) for _ in KEYS]
            keys = [KEYS[3], *KEYS[:3]]
            reads = iter(lender.read_many(list(zip(keys, map(memoryview, outs), strict=True))))
            early = dict(next(reads) for _ in range(3))
            below.open.set()
            assert early == dict.fromkeys((1, 2, 3), Outcome.HIT)
            ((late, outcome),) = reads
            assert late == 0
            assert outcome is Outcome.MISS or bytes(outs[0]) == content(KEYS[3])


def _members(lender: PeerTier) -> list[Member]:
    assert isinstance(lender.beliefs, Probed)
    return list(lender.beliefs.known)


def _asked(lender: PeerTier) -> list[Knowledge]:
    assert isinstance(lender.beliefs, Probed)
    for member in lender.beliefs.known:
        lender.beliefs.ask(member, KEYS)
    return list(lender.beliefs.known.values())


def test_owner_that_lost_blocks_is_a_miss_and_is_believed_no_more() -> None:
    with owner() as (server, store), _lender(server) as lender:
        until(lambda: lender.contains_run(KEYS) == 4)
        assert store.evict(KEYS[:2]) == 2
        assert _read(lender) == [Outcome.MISS] * 2 + [Outcome.HIT] * 2
        assert lender.known_run(KEYS) == 0
        assert lender.contains(KEYS[2])
        assert not _members(lender)[0].resting()


def test_connection_that_died_while_idle_costs_nothing() -> None:
    with owner() as (server, _), _lender(server) as lender:
        until(lambda: lender.contains_run(KEYS) == 4)
        for wire in _members(lender)[0]._idle:
            wire.abort()
        assert _read(lender) == [Outcome.HIT] * 4
        assert _members(lender)[0].counts.failed == 0


def test_reads_that_are_given_up_let_go_of_their_buffers() -> None:
    with owner() as (server, store), _lender(server) as lender:
        until(lambda: lender.contains_run(KEYS) == 4)
        outs = [bytearray(RAW_BYTES) for _ in KEYS]
        reads = lender.read_many(list(zip(KEYS, map(memoryview, outs), strict=True)))
        next(reads)
        reads.close()  # type: ignore[attr-defined]
        assert _members(lender)[0].queued_bytes == 0
        until(lambda: store.stats().leases == 0)
        assert _read(lender) == [Outcome.HIT] * 4


def test_what_is_forgotten_is_asked_for_again() -> None:
    with owner() as (server, _), _lender(server) as lender:
        until(lambda: lender.contains_run(KEYS) == 4)
        lender.put([])
        lender.remove(KEYS[:1])
        assert lender.contains_run(KEYS) == 0
        lender.clear()
        assert lender.known_run(KEYS) == 0
        until(lambda: lender.contains_run(KEYS) == 4)


def test_closed_tier_has_nothing_and_refuses() -> None:
    with owner() as (server, _), _lender(server) as lender:
        until(lambda: lender.contains_run(KEYS) == 4)
        lender.close()
        assert lender.contains_run(KEYS) == 0
        assert not lender.contains(KEYS[0])
        for refused in (lambda: lender.put([]), lambda: lender.remove([]), lender.clear):
            with pytest.raises(ClosedError):
                refused()
        with pytest.raises(ClosedError):
            lender.read_many([])
