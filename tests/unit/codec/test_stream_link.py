"""A context over a link: on time or text, decoded while the next chunk comes, never wrong."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvist.codec.stream_link import MAX_LEVELS, End, Received, Receiver, read_offer, serve
from kvist.codec.streaming import Bandwidth, Why
from kvist.core.errors import FormatError
from kvist.testing.virtual_link import VirtualLink

LIMIT_S = 30.0
SIZES = (64_000, 16_000, 4_000)
CHUNKS = 6


class Source:
    """Chunks whose bytes say which they are."""

    tokens = [1500] * CHUNKS
    levels = len(SIZES)

    def payload(self, chunk: int, level: int) -> bytes:
        return bytes([chunk, level]) * (SIZES[level] // 2)


def received(link: VirtualLink, deadline_s: float, **kwargs: object) -> tuple[Received, list[int]]:
    decoded: list[int] = []

    def decode(chunk: int, level: int, payload: bytes) -> None:
        assert payload == link.source.payload(chunk, level)
        decoded.append(chunk)

    receiver = Receiver(
        link,
        decode,
        deadline_s,
        max(SIZES),
        clock=link.clock,
        **kwargs,  # type: ignore[arg-type]
    )
    return receiver.run(), decoded


@pytest.mark.parametrize("rate", [2_000.0, 20_000.0, 60_000.0, 150_000.0, 2_000_000.0])
@pytest.mark.parametrize("known", [True, False])
def test_the_deadline_is_met_or_text_is_chosen(rate: float, known: bool) -> None:
    link = VirtualLink(Source(), lambda _now: rate)
    got, decoded = received(link, 1.5, bandwidth=Bandwidth(rate if known else None))
    assert decoded == list(range(len(got.levels)))
    if got.end is End.WHOLE:
        assert len(got.levels) == CHUNKS
        assert link.now_s <= 1.5 + 1e-9
    else:
        assert got.end is End.DEADLINE
        assert link.now_s <= 1.5 + 1e-9, "a chunk under way is given up at the deadline"
    if rate == 2_000:
        assert got.end is End.DEADLINE
    if rate == 2_000_000:
        assert got.levels[1:] == (0,) * (CHUNKS - 1)
        assert got.levels[0] == (0 if known else 2)


def test_more_bandwidth_never_gives_coarser_chunks() -> None:
    means = []
    for rate in (20_000.0, 60_000.0, 150_000.0, 2_000_000.0):
        got, _ = received(VirtualLink(Source(), lambda _now, r=rate: r), 1.5)
        assert got.end is End.WHOLE
        means.append(sum(got.levels))
    assert means == sorted(means, reverse=True)
    assert means[0] > means[-1]


def test_a_link_that_slows_down_gets_coarser_chunks_and_still_arrives() -> None:
    link = VirtualLink(Source(), lambda now: 400_000.0 if now < 0.4 else 100_000.0)
    got, _ = received(link, 1.5, bandwidth=Bandwidth(400_000.0))
    assert got.end is End.WHOLE
    assert got.levels[0] == 0
    assert got.levels[-1] > 0
    assert link.now_s <= 1.5


def test_late_bytes_are_waited_for_where_computing_takes_longer() -> None:
    link = VirtualLink(Source(), lambda _now: 2_000.0)
    got, _ = received(
        link, 1.5, bandwidth=Bandwidth(2_000.0), recompute_s=lambda chunk: 100.0 - chunk
    )
    assert got.end is End.WHOLE
    assert set(got.why) == {Why.LATE}


def test_a_cut_connection_makes_the_rest_text() -> None:
    link = VirtualLink(Source(), lambda _now: 1e6, cut_after_bytes=3 * SIZES[0] + 1000)
    got, decoded = received(link, 9.0, bandwidth=Bandwidth(1e6))
    assert got.end is End.CUT
    assert decoded == list(range(len(got.levels)))
    assert len(got.levels) == 3


def test_a_damaged_chunk_makes_the_rest_text() -> None:
    got, decoded = received(VirtualLink(Source(), lambda _now: 1e6, damage=2), 9.0)
    assert got.end is End.DAMAGED
    assert decoded == [0, 1]


def test_a_chunk_that_cannot_be_decoded_makes_the_rest_text() -> None:
    link = VirtualLink(Source(), lambda _now: 1e6)

    def decode(chunk: int, _level: int, _payload: bytes) -> None:
        if chunk == 3:
            raise FormatError("not mine")

    got = Receiver(link, decode, 9.0, max(SIZES), clock=link.clock).run()
    assert got.end is End.DAMAGED
    assert len(got.levels) == 3


def test_an_offer_beyond_the_limits_is_refused() -> None:
    link = VirtualLink(Source(), lambda _now: 1e9)
    got = Receiver(link, lambda *_: None, 9.0, max(SIZES) - 1, clock=link.clock).run()
    assert got == Received((), (), End.DAMAGED, None)
    for head in (
        struct.pack("<4sHHI", b"KVSX", 1, 3, 1),
        struct.pack("<4sHHI", b"KVST", 2, 3, 1),
        struct.pack("<4sHHI", b"KVST", 1, MAX_LEVELS + 1, 1),
        struct.pack("<4sHHI", b"KVST", 1, 3, 1 << 30),
    ):
        bad = VirtualLink(Source(), lambda _now: 1e9)
        bad.ready[:] = head
        with pytest.raises(FormatError):
            read_offer(bad, lambda: 1.0)


class SocketLink:
    """A socket whose sender is throttled by a token bucket."""

    def __init__(self, end: socket.socket, bytes_per_s: float = 1e9) -> None:
        self.end, self.rate = end, bytes_per_s
        self.bucket, self.filled_s = 0.0, time.monotonic()

    def send(self, data: bytes) -> None:
        for at in range(0, len(data), 2048):
            part = data[at : at + 2048]
            while self.bucket < len(part):
                now_s = time.monotonic()
                self.bucket = min(8192.0, self.bucket + (now_s - self.filled_s) * self.rate)
                self.filled_s = now_s
                threading.Event().wait(0.001)
            self.bucket -= len(part)
            self.end.sendall(part)

    def receive(self, size_bytes: int, timeout_s: float) -> bytes:
        self.end.settimeout(timeout_s)
        return self.end.recv(size_bytes)


@contextmanager
def served(source: object, bytes_per_s: float = 1e9) -> Iterator[SocketLink]:
    ours, theirs = socket.socketpair()

    def run() -> None:
        try:
            serve(SocketLink(theirs, bytes_per_s), source, timeout_s=LIMIT_S)  # type: ignore[arg-type]
        except OSError:
            pass
        finally:
            theirs.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield SocketLink(ours)
    finally:
        ours.close()
        thread.join(LIMIT_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("rate", [5e4, 2e5, 8e5, 3e6, 1e9])
def test_over_a_throttled_socket_each_chunk_is_whole_or_text(rate: float) -> None:
    got_chunks: list[int] = []

    def decode(chunk: int, level: int, payload: bytes) -> None:
        assert payload == Source().payload(chunk, level)
        got_chunks.append(chunk)

    with served(Source(), rate) as link:
        got = Receiver(link, decode, 0.6, max(SIZES)).run()
    assert got_chunks == list(range(len(got.levels)))
    assert (got.end is End.WHOLE) == (len(got.levels) == CHUNKS)


def test_a_chunk_is_decoded_while_the_next_is_on_its_way() -> None:
    """By events, not by time: decoding chunk i waits until the sender was asked for chunk i + 1,
    and the sender holds chunk i + 1 back until the decoding of chunk i began.
    """
    asked = [threading.Event() for _ in range(CHUNKS)]
    decoding = [threading.Event() for _ in range(CHUNKS)]

    class Watched(Source):
        offered = False

        def payload(self, chunk: int, level: int) -> bytes:
            if self.offered:
                asked[chunk].set()
                assert chunk == 0 or decoding[chunk - 1].wait(LIMIT_S)
            self.offered |= (chunk, level) == (CHUNKS - 1, len(SIZES) - 1)
            return super().payload(chunk, level)

    def decode(chunk: int, _level: int, _payload: bytes) -> None:
        decoding[chunk].set()
        assert chunk + 1 == CHUNKS or asked[chunk + 1].wait(LIMIT_S)

    with served(Watched()) as link:
        got = Receiver(link, decode, LIMIT_S, max(SIZES)).run()
    assert got.end is End.WHOLE


def test_a_deadline_that_never_comes_is_no_error() -> None:
    with served(Source()) as link:
        receiver = Receiver(
            link, lambda *_: None, float("inf"), max(SIZES), recompute_s=lambda _: float("inf")
        )
        assert receiver.run().end is End.WHOLE


def test_a_request_for_what_was_not_offered_is_refused() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(struct.pack("<II", CHUNKS, 0))
        with pytest.raises(FormatError):
            serve(SocketLink(theirs), Source(), timeout_s=LIMIT_S)


def test_a_side_that_goes_away_ends_the_other() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        got = Receiver(SocketLink(ours), lambda *_: None, LIMIT_S, max(SIZES)).run()
    assert (got.levels, got.end) == ((), End.CUT)
