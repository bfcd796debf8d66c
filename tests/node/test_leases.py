"""Leases of a client against a node that says what it should not, or says it late."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from kvist.core.errors import LeaseError
from kvist.core.outcome import Outcome
from kvist.node import messages as m
from kvist.node.attachment import Attachment
from kvist.node.leases import NodeReadLease, NodeWriteLease
from kvist.node.protocol import Frames, ProtocolError, pack_slots
from kvist.tiers.dram import PAGE_BYTES, ArenaMap

SLOTS = 4
RAW_BYTES = 100


class Clock:
    """Stands still until it is moved."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def attachment() -> Iterator[Attachment]:
    fd = os.memfd_create("test")
    os.ftruncate(fd, SLOTS * PAGE_BYTES)
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    arena = ArenaMap(fd, SLOTS * PAGE_BYTES, slot_bytes=PAGE_BYTES)
    welcome = m.Welcome(1, 1, 1, SLOTS * PAGE_BYTES, PAGE_BYTES, RAW_BYTES)
    with ours, theirs, arena:
        yield Attachment(
            ours, welcome, arena, Frames(), base=0, answer_s=1.0, on_event=lambda event: None
        )


def leased(attachment: Attachment, clock: Clock, *outcomes: int) -> NodeReadLease:
    lease = NodeReadLease(attachment, len(outcomes), deadline_s=5.0, clock=clock)
    slots = [i if code == m.HIT else m.NO_SLOT for i, code in enumerate(outcomes)]
    lease.granted(m.Leased(1, 1, bytes(outcomes), pack_slots(slots)))
    return lease


def test_block_that_comes_after_the_deadline_stays_a_miss(attachment: Attachment) -> None:
    clock = Clock()
    lease = leased(attachment, clock, m.HIT, m.PENDING)
    assert (lease.outcome(1), lease.ready()) == (Outcome.PENDING, False)
    clock.now_s = 5.0
    assert (lease.outcome(1), lease.ready()) == (Outcome.MISS, True)
    lease.settled(m.Settled(1, (1,), bytes([m.HIT]), pack_slots([1])))
    clock.now_s = 0.0
    assert [lease.outcome(i) for i in range(2)] == [Outcome.HIT, Outcome.MISS]
    assert lease.hits() == 1


def test_block_that_was_decided_stays_decided(attachment: Attachment) -> None:
    lease = leased(attachment, Clock(), m.PENDING, m.MISS)
    lease.settled(m.Settled(1, (0, 1), bytes([m.HIT, m.HIT]), pack_slots([2, 3])))
    assert [lease.outcome(i) for i in range(2)] == [Outcome.HIT, Outcome.MISS]
    assert lease.slot(0) == 2 * PAGE_BYTES
    assert len(lease.buffer(0)) == RAW_BYTES
    assert lease.ready()


def test_hit_without_a_slot_is_a_miss(attachment: Attachment) -> None:
    lease = NodeReadLease(attachment, 1, deadline_s=5.0, clock=Clock())
    lease.granted(m.Leased(1, 1, bytes([m.HIT]), pack_slots([m.NO_SLOT])))
    assert lease.outcome(0) is Outcome.MISS
    with pytest.raises(LeaseError):
        lease.slot(0)


@pytest.mark.parametrize(
    "reply",
    [
        m.Leased(1, 1, bytes([m.HIT]), pack_slots([SLOTS])),
        m.Leased(1, 1, bytes([m.HIT, m.HIT]), pack_slots([0, 1])),
        m.Leased(1, 1, bytes([m.HIT]), pack_slots([])),
        m.Leased(1, 1, bytes([m.HIT]), b"odd"),
        m.Reserved(1, 1, pack_slots([0])),
    ],
)
def test_grant_of_something_else_breaks_the_protocol(
    attachment: Attachment, reply: m.Leased | m.Reserved
) -> None:
    lease = NodeReadLease(attachment, 1, deadline_s=5.0, clock=Clock())
    with pytest.raises(ProtocolError):
        lease.granted(reply)


@pytest.mark.parametrize(
    "news",
    [
        m.Settled(1, (2,), bytes([m.HIT]), pack_slots([1])),
        m.Settled(1, (1,), bytes([m.HIT]), pack_slots([SLOTS])),
        m.Settled(1, (1,), bytes([m.HIT, m.HIT]), pack_slots([1])),
    ],
)
def test_news_of_what_is_not_leased_break_the_protocol(
    attachment: Attachment, news: m.Settled
) -> None:
    lease = leased(attachment, Clock(), m.HIT, m.PENDING)
    with pytest.raises(ProtocolError):
        lease.settled(news)
    assert lease.outcome(1) is Outcome.PENDING


def test_write_lease_hears_no_news(attachment: Attachment) -> None:
    lease = NodeWriteLease(attachment, 2)
    lease.granted(m.Reserved(1, 1, pack_slots([m.NO_SLOT, 3])))
    assert [lease.present(i) for i in range(2)] == [True, False]
    assert lease.slot(1) == 3 * PAGE_BYTES
    with pytest.raises(ProtocolError):
        lease.settled(m.Settled(1, (0,), bytes([m.HIT]), pack_slots([1])))
    with pytest.raises(ProtocolError):
        lease.granted(m.Leased(1, 1, b"", b""))
    with pytest.raises(LeaseError):
        lease.commit(0)
