"""What one node leaves to the next, on the wire: all of it as it was, or nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from node_process import attach

from kvist.core.errors import NodeAwayError, NodeRefusedError
from kvist.node import handover
from kvist.node import messages as m
from kvist.node.estates import Estates, Left, LifeFences
from kvist.node.protocol import encode
from kvist.store.succession import Bequest, Estate, Legacy
from kvist.testing.store_suite import key
from kvist.tiers.dram import PAGE_BYTES

WAIT_S = 10.0
SLOTS = 8
BLOCKS = (
    Bequest(key(3), None, 5, 0, tenant="alice", dirty=True, lent=True),
    Bequest(key(4), key(3), 0, (1 << 64) - 1, refused=True),
    Bequest(key(5), key(4), 7, 77, pinned=True),
)
ESTATE = Estate(SLOTS, BLOCKS, frozenset({1, 5}))
REPORT = encode(m.Report('{"draining": true}'))


@pytest.fixture
def left() -> Iterator[Left]:
    """What a node with one keyspace leaves; somebody may touch two slots of it."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, SLOTS * PAGE_BYTES)
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    fences = LifeFences({reader: {1, 5}})
    one = Left(attach(1), Legacy(fd, SLOTS * PAGE_BYTES, PAGE_BYTES, ESTATE, fences))
    yield one
    one.close()
    os.close(writer)


def given_to(send: Callable[[socket.socket], None]) -> list[Left]:
    """What the next node makes of what `send` sends before it hangs up."""
    ours, theirs = socket.socketpair()

    def leave() -> None:
        with ours, contextlib.suppress(OSError):  # who finds a fault hangs up at once
            ours.sendall(REPORT)
            send(ours)

    thread = threading.Thread(target=leave)
    thread.start()
    with theirs:
        found = handover.receive(theirs, deadline_s=WAIT_S)
    thread.join(WAIT_S)
    return found


def pass_on(*left: Left) -> list[Left]:
    return given_to(lambda heir: handover.bequeath(heir, left, deadline_s=WAIT_S))


def test_everything_arrives_as_it_was(left: Left) -> None:
    (found,) = pass_on(left)
    assert found.attach == left.attach
    got = found.legacy
    assert (got.size_bytes, got.slot_bytes) == (SLOTS * PAGE_BYTES, PAGE_BYTES)
    assert (got.estate.touched_slots, tuple(got.estate.blocks)) == (SLOTS, BLOCKS)
    assert got.estate.fenced == {1, 5}
    assert os.fstat(got.fd).st_ino == os.fstat(left.legacy.fd).st_ino
    (slots,) = got.fences.pipes().values()
    assert slots == {1, 5}
    found.close()


def test_nothing_left_is_nothing(left: Left) -> None:
    assert pass_on() == []


def test_many_blocks_come_in_parts(left: Left) -> None:
    legacy = left.legacy
    os.ftruncate(legacy.fd, 10_000 * PAGE_BYTES)
    blocks = [Bequest(key(n), None, n, n) for n in range(10_000)]
    many = replace(
        legacy, size_bytes=10_000 * PAGE_BYTES, estate=Estate(10_000, blocks, frozenset())
    )
    (found,) = pass_on(replace(left, legacy=many))
    assert list(found.legacy.estate.blocks) == blocks
    found.close()


@pytest.mark.parametrize(
    "estate",
    [
        pytest.param(replace(ESTATE, touched_slots=SLOTS + 1), id="used more than there is"),
        pytest.param(replace(ESTATE, blocks=(replace(BLOCKS[0], slot=SLOTS),)), id="far slot"),
        pytest.param(replace(ESTATE, blocks=BLOCKS[:1] * 2), id="twice"),
        pytest.param(
            replace(ESTATE, blocks=(BLOCKS[0], replace(BLOCKS[0], slot=2))), id="two slots"
        ),
        pytest.param(
            replace(ESTATE, blocks=(BLOCKS[0], replace(BLOCKS[1], slot=5))), id="one slot"
        ),
        pytest.param(
            replace(ESTATE, blocks=tuple(Bequest(key(n), None, n, n) for n in range(SLOTS + 1))),
            id="more blocks than slots",
        ),
    ],
)
def test_estate_that_cannot_be_is_not_taken(left: Left, estate: Estate) -> None:
    assert pass_on(replace(left, legacy=replace(left.legacy, estate=estate))) == []


def test_memory_that_is_smaller_than_it_should_be_is_not_taken(left: Left) -> None:
    os.ftruncate(left.legacy.fd, (SLOTS - 1) * PAGE_BYTES)
    assert pass_on(left) == []


def test_will_of_another_version_is_not_read(monkeypatch: pytest.MonkeyPatch, left: Left) -> None:
    monkeypatch.setattr(handover, "WILL_VERSION", 2)
    sent = recorded(left)
    monkeypatch.undo()
    assert given_to(lambda heir: replay(heir, sent)) == []


def test_node_that_hangs_up_or_refuses_is_told_apart() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.close()
        with pytest.raises(NodeAwayError):
            handover.receive(theirs, deadline_s=WAIT_S)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(encode(m.Refused("never heard of it", True)))
        with pytest.raises(NodeRefusedError, match="never heard"):
            handover.receive(theirs, deadline_s=WAIT_S)


def test_node_that_says_nothing_more_is_waited_for_no_longer_than_told() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(REPORT)
        assert handover.receive(theirs, deadline_s=0.1) == []


Sent = list[tuple[bytes, tuple[int, ...]]]


def recorded(left: Left) -> Sent:
    """The pieces in which a keyspace is sent, and the descriptors that come with each."""
    sent: Sent = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        handover.bequeath(ours, [left], deadline_s=WAIT_S)
        ours.shutdown(socket.SHUT_WR)
        while True:
            data, fds, _, _ = socket.recv_fds(theirs, 1 << 16, 8)
            if not data:
                return sent
            sent.append((data, tuple(fds)))


def replay(heir: socket.socket, sent: Sent, most_bytes: int | None = None) -> None:
    """Sends the pieces, the first `most_bytes` bytes of them."""
    for data, fds in sent:
        part = data if most_bytes is None else data[: max(0, most_bytes)]
        if part:
            socket.send_fds(heir, [part], list(fds))
        most_bytes = None if most_bytes is None else most_bytes - len(data)


@pytest.fixture
def sent(left: Left) -> Iterator[Sent]:
    pieces = recorded(left)
    yield pieces
    for _, fds in pieces:
        for fd in fds:
            os.close(fd)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_whatever_is_cut_off_counts_for_nothing_and_leaves_nothing_open(sent: Sent) -> None:
    size = sum(len(data) for data, _ in sent)
    before = open_fds()
    for most_bytes in range(size):
        assert given_to(lambda heir, n=most_bytes: replay(heir, sent, n)) == []
    assert open_fds() == before
    (whole,) = given_to(lambda heir: replay(heir, sent))
    whole.close()


def test_message_without_its_descriptor_counts_for_nothing(sent: Sent) -> None:
    for missing, (_, fds) in enumerate(sent):
        if fds:
            less = [(data, () if i == missing else f) for i, (data, f) in enumerate(sent)]
            assert given_to(lambda heir, pieces=less: replay(heir, pieces)) == []


@given(at=st.integers(min_value=0), bit=st.integers(0, 7))
def test_flipped_bit_counts_for_nothing(at: int, bit: int) -> None:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, SLOTS * PAGE_BYTES)
    legacy = Legacy(
        fd, SLOTS * PAGE_BYTES, PAGE_BYTES, replace(ESTATE, fenced=frozenset()), LifeFences({})
    )
    pieces = recorded(Left(attach(1), legacy))
    at %= sum(len(data) for data, _ in pieces)
    flipped: Sent = []
    for data, fds in pieces:
        if 0 <= at < len(data):
            data = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
        at -= len(data)
        flipped.append((data, fds))
    try:
        assert given_to(lambda heir: replay(heir, flipped)) == []
    finally:
        for held in (fd, *(held for _, fds in pieces for held in fds)):
            os.close(held)


# -- until somebody asks for it ----------------------------------------------------------------


def test_only_who_has_the_same_blocks_gets_the_arena(left: Left) -> None:
    def copy() -> Left:
        memory = os.dup(left.legacy.fd)
        return replace(left, legacy=replace(left.legacy, fd=memory, fences=LifeFences({})))

    size, wanted = SLOTS * PAGE_BYTES, left.attach
    for who, slot_bytes, most_bytes in (
        (replace(wanted, layout="other"), PAGE_BYTES, size),
        (replace(wanted, block_bytes=wanted.block_bytes - 1), PAGE_BYTES, size),
        (wanted, 2 * PAGE_BYTES, size),
        (wanted, PAGE_BYTES, size - 1),
    ):
        before = open_fds()
        estates = Estates([copy()])
        assert estates.claim(who, slot_bytes=slot_bytes, most_bytes=most_bytes) is None
        assert open_fds() == before
    estates = Estates([copy()])
    assert estates.claim(attach(2), slot_bytes=PAGE_BYTES, most_bytes=size) is None
    got = estates.claim(wanted, slot_bytes=PAGE_BYTES, most_bytes=2 * size)
    assert got is not None
    os.close(got.fd)
    assert estates.claim(wanted, slot_bytes=PAGE_BYTES, most_bytes=2 * size) is None


def test_what_nobody_asks_for_gives_way(left: Left) -> None:
    def copy(n: int) -> Left:
        memory = os.dup(left.legacy.fd)
        legacy = replace(left.legacy, fd=memory, fences=LifeFences({}))
        return Left(attach(n), legacy)

    before = open_fds()
    estates = Estates([copy(n) for n in range(4)])
    estates.keep(2, but=attach(3).fingerprint)
    assert [one.attach for one in estates] == [attach(n) for n in (1, 2, 3)]
    estates.keep(0, but=attach(3).fingerprint)
    assert [one.attach for one in estates] == [attach(3)]
    estates.close()
    assert open_fds() == before
