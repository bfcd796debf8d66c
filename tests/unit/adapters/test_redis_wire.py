"""The part of Redis's protocol that we speak: replies in pieces, drips, errors, a lost server."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.adapters.protocol import Fetched, Got, Put, Wanted
from kvist.adapters.redis_wire import Wire, wire
from kvist.core.errors import TierError, TierFullError, TierTimeout

WAIT_S = 20.0


class Pool:
    """One connection, to a server that does as it is told."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._sock, theirs = socket.socketpair()
        self.disconnected = 0
        self.released = 0

        def run() -> None:
            with theirs:
                try:
                    serve(theirs)
                except OSError:
                    return  # we hung up

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def get_connection(self) -> Pool:
        return self

    def disconnect(self) -> None:
        self.disconnected += 1
        self._sock.close()

    def release(self, _: Pool) -> None:
        self.released += 1

    def end(self) -> None:
        self._sock.close()
        self.thread.join(WAIT_S)


def replying(*pieces: bytes) -> Callable[[socket.socket], None]:
    def serve(sock: socket.socket) -> None:
        for piece in pieces:
            sock.sendall(piece)
        sock.recv(1)  # until we hang up

    return serve


def bulk(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)


@pytest.fixture
def pools() -> Iterator[list[Pool]]:
    made: list[Pool] = []
    yield made
    for pool in made:
        pool.end()


@given(
    values=st.lists(st.one_of(st.none(), st.binary(max_size=9000)), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 5000), max_size=12),
)
def test_replies_are_read_however_they_are_cut(values: list[bytes | None], cuts: list[int]) -> None:
    stream = b"".join(b"$-1\r\n" if v is None else bulk(v) for v in values)
    pieces, at = [], 0
    for cut in cuts:
        pieces.append(stream[at : at + cut])
        at += cut
    pool = Pool(replying(*pieces, stream[at:]))
    with wire(pool, WAIT_S) as line:
        for value in values:
            outs = [bytearray(3), bytearray(max(0, len(value or b"") - 3))]
            found = line.read_value(Wanted("a", tuple(map(memoryview, outs))))
            if value is None:
                assert found == Fetched(Got.ABSENT)
            elif len(value) < 3:
                assert found == Fetched(Got.SIZE, len(value))
            else:
                assert found == Fetched(Got.HIT, len(value))
                assert b"".join(outs) == value
    assert (pool.disconnected, pool.released) == (0, 1)
    pool.end()


def test_server_that_drips_is_left_at_the_deadline(pools: list[Pool]) -> None:
    """Each byte comes well within any timeout of a single read; the value never ends."""
    stop = threading.Event()

    def drip(sock: socket.socket) -> None:
        sock.sendall(b"$1000000\r\n")
        while not stop.wait(0.02):
            sock.sendall(b"x")

    pools.append(pool := Pool(drip))
    began_s = time.monotonic()
    with pytest.raises(TierTimeout), wire(pool, 0.3) as line:
        line.read_value(Wanted("a", (memoryview(bytearray(1_000_000)),)))
    assert time.monotonic() - began_s < WAIT_S
    assert (pool.disconnected, pool.released) == (1, 1)
    stop.set()


def test_server_that_takes_nothing_is_left_at_the_deadline(pools: list[Pool]) -> None:
    stop = threading.Event()
    pools.append(pool := Pool(lambda _: idle(stop)))
    with pytest.raises(TierTimeout), wire(pool, 0.2) as line:
        line.send([((b"SET",), (b"a",), (memoryview(bytes(50_000_000)),), (b"NX",))])
    stop.set()
    assert pool.disconnected == 1


def idle(stop: threading.Event) -> None:
    stop.wait(WAIT_S)


def hang_up(data: bytes) -> Callable[[socket.socket], None]:
    return lambda sock: sock.sendall(data)


@pytest.mark.parametrize("data", [b"", b"$100", b"$100\r\n", b"$100\r\nhalf"])
def test_server_that_hangs_up_is_an_error_and_the_connection_is_closed(
    data: bytes, pools: list[Pool]
) -> None:
    pools.append(pool := Pool(hang_up(data)))
    with pytest.raises(TierError), wire(pool, WAIT_S) as line:
        line.read_value(Wanted("a", (memoryview(bytearray(100)),)))
    assert (pool.disconnected, pool.released) == (1, 1)


@pytest.mark.parametrize(
    "data", [b":1\r\n", b"*2\r\n", b"+OK\r\n", b"$a\r\n", b"$-7\r\n", b"x" * 9000]
)
def test_what_is_no_reply_to_a_get_closes_the_connection(data: bytes, pools: list[Pool]) -> None:
    pools.append(pool := Pool(replying(data)))
    with pytest.raises(TierError), wire(pool, WAIT_S) as line:
        line.read_value(Wanted("a", (memoryview(bytearray(1)),)))
    assert pool.disconnected == 1


def test_error_replies_are_errors_after_all_replies_were_read(pools: list[Pool]) -> None:
    data = b"+OK\r\n-OOM command not allowed\r\n$-1\r\n-ERR other\r\n" + bulk(b"next")
    pools.append(pool := Pool(replying(data)))
    puts: list[Put] = []
    used: list[Wire] = []

    def call() -> None:
        with wire(pool, WAIT_S) as line:
            used.append(line)
            puts.extend(line.read_stored() for _ in range(4))

    with pytest.raises(TierFullError, match="OOM"):
        call()
    assert puts == [Put.STORED] + [Put.PRESENT] * 3
    assert pool.disconnected == 0
    out = bytearray(4)
    assert used[0].read_value(Wanted("a", (memoryview(out),))).got is Got.HIT
    assert out == b"next"


def test_words_are_sent_as_the_protocol_wants_them(pools: list[Pool]) -> None:
    large = bytes(range(256)) * 1000
    got = bytearray()
    done = threading.Event()
    expected = b"*4\r\n$3\r\nSET\r\n$1\r\na\r\n" + bulk(b"head" + large + b"end") + bulk(b"NX")

    def collect(sock: socket.socket) -> None:
        while len(got) < len(expected):
            got.extend(sock.recv(1 << 16))
        done.set()
        sock.recv(1)

    pools.append(pool := Pool(collect))
    with wire(pool, WAIT_S) as line:
        line.send([((b"SET",), (b"a",), (b"head", memoryview(large), b"end"), (b"NX",))])
    assert done.wait(WAIT_S)
    assert bytes(got) == expected
