"""Blocks out of a socket: C++ and its twin fill, hash, and give up alike."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import numpy as np
import pytest
import xxhash

from kvist.native import answers_twin
from kvist.native.answer import BLOCK, DAMAGED, HIT, KEY_BYTES, MISS, POSITION

LONG_S = 60.0
SHORT_S = 0.05
MIB = 1 << 20
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture(scope="session")
def native_answers(native: ModuleType) -> ModuleType:
    return native if hasattr(native, "Answers") else answers_twin


@pytest.fixture(params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    if request.param == "unix":
        reader, writer = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            writer = socket.create_connection(listener.getsockname())
            reader, _ = listener.accept()
    with reader, writer:
        yield reader, writer


def bytes_of(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


def key(n: int) -> bytes:
    return bytes([n]) * KEY_BYTES


def block(n: int, data: bytes, *, of: int | None = None) -> bytes:
    """The answer that `data` is block n; `of`: with the key of another."""
    named = key(n if of is None else of)
    return BLOCK.pack(n, HIT, len(data), xxhash.xxh3_64_intdigest(data), named) + data


def miss(n: int, at: tuple[int, int] | None = None) -> bytes:
    """The answer that there is no block n."""
    if at is None:
        return BLOCK.pack(n, MISS, 0, 0, key(n))
    return BLOCK.pack(n, MISS, POSITION.size, 0, key(n)) + POSITION.pack(*at)


def in_background(do: Callable[[], object]) -> threading.Thread:
    """On a thread of its own: a socket holds less than a block."""
    thread = threading.Thread(target=do)
    thread.start()
    return thread


def send_in_parts(link: socket.socket, data: bytes, parts: int) -> threading.Thread:
    def send() -> None:
        step = max(1, -(-len(data) // parts))
        for start in range(0, len(data), step):
            link.sendall(data[start : start + step])

    return in_background(send)


def asked(
    native_answers: ModuleType, sizes: Sequence[int]
) -> tuple[answers_twin.Answers, list[bytearray]]:
    outs = [bytearray(size) for size in sizes]
    return native_answers.Answers([key(n) for n in range(len(sizes))], outs), outs


def take_all(answers: answers_twin.Answers, reader: socket.socket) -> list[answers_twin.Taken]:
    taken = []
    while answers.left:
        taken += answers.take(reader.fileno(), LONG_S, LONG_S, LONG_S)
    return taken


@pytest.mark.parametrize("parts", [1, 7])
@pytest.mark.parametrize(
    "size", [0, 1, 16, 240, 241, 1024, 1025, 262_144, 262_145, 2_097_152, 3_000_001]
)
def test_block_comes_whole_and_proven_and_nothing_after_it_is_taken(
    native_answers: ModuleType, pair: Pair, size: int, parts: int
) -> None:
    reader, writer = pair
    data = bytes_of(size)
    out = bytearray(size + 1)
    sender = send_in_parts(writer, block(0, data) + b"next", parts)
    with memoryview(out)[:size] as view:
        answers = native_answers.Answers([key(0)], [view])
        assert take_all(answers, reader) == [(0, HIT, None)]
        del answers  # which holds the buffer
    sender.join()
    assert bytes(out) == data + b"\0"
    assert reader.recv(10) == b"next"


def test_answers_come_in_any_order_with_misses_and_positions(
    native_answers: ModuleType, pair: Pair
) -> None:
    reader, writer = pair
    sizes = [300_000, 5, 70_000, 0, 200]
    data = [bytes_of(size) for size in sizes]
    answers, outs = asked(native_answers, sizes)
    said = [block(2, data[2]), miss(4), block(0, data[0]), miss(1, (7, 1 << 63)), block(3, b"")]
    sender = send_in_parts(writer, b"".join(said), 1)
    taken = take_all(answers, reader)
    sender.join()
    assert taken == [
        (2, HIT, None),
        (4, MISS, None),
        (0, HIT, None),
        (1, MISS, (7, 1 << 63)),
        (3, HIT, None),
    ]
    assert [bytes(outs[n]) for n in (0, 2)] == [data[0], data[2]]
    assert answers.left == 0
    assert answers.take(reader.fileno(), LONG_S, LONG_S, LONG_S) == []


def test_one_call_takes_what_comes_soon_and_waits_no_longer(
    native_answers: ModuleType, pair: Pair
) -> None:
    reader, writer = pair
    answers, _ = asked(native_answers, [10] * 4)
    writer.sendall(block(0, bytes_of(10)) + block(1, bytes_of(10)))
    begin_s = time.monotonic()
    taken = answers.take(reader.fileno(), LONG_S, LONG_S, SHORT_S)
    assert time.monotonic() - begin_s >= SHORT_S
    assert taken == [(0, HIT, None), (1, HIT, None)]
    writer.sendall(miss(3) + block(2, bytes_of(10)))
    assert len(answers.take(reader.fileno(), LONG_S, LONG_S, 0.0)) == 1  # time to tell
    assert answers.left == 1
    assert take_all(answers, reader) == [(2, HIT, None)]


def test_next_call_goes_on_in_the_middle_of_an_answer(
    native_answers: ModuleType, pair: Pair
) -> None:
    reader, writer = pair
    answers, outs = asked(native_answers, [3000, 300, 5])
    said = block(1, bytes_of(300)) + miss(2, (3, 4)) + block(0, bytes_of(3000))
    taken = []
    for start in range(0, len(said), 41):
        writer.sendall(said[start : start + 41])
        taken += answers.take(reader.fileno(), LONG_S, LONG_S, 0.0)
    assert taken == [(1, HIT, None), (2, MISS, (3, 4)), (0, HIT, None)]
    assert [bytes(outs[n]) for n in (0, 1)] == [bytes_of(3000), bytes_of(300)]


def test_time_that_calls_wait_for_one_answer_adds_up(
    native_answers: ModuleType, pair: Pair
) -> None:
    reader, writer = pair
    answers, _ = asked(native_answers, [5, 5])
    writer.sendall(block(0, bytes_of(5)) + block(1, bytes_of(5))[:-1])
    assert answers.take(reader.fileno(), LONG_S, LONG_S, 0.0) == [(0, HIT, None)]
    calls = 0

    def take_in_parts() -> None:
        nonlocal calls
        while calls < 100:
            calls += 1
            assert answers.take(reader.fileno(), LONG_S, 10 * SHORT_S, SHORT_S) == []

    with pytest.raises(TimeoutError):
        take_in_parts()
    assert calls > 1


def test_damaged_block_is_told_and_the_next_is_taken(
    native_answers: ModuleType, pair: Pair
) -> None:
    reader, writer = pair
    answers, outs = asked(native_answers, [3000, 3000])
    data = bytes_of(3000)
    spoiled = bytearray(block(1, data))
    spoiled[-1] ^= 1
    writer.sendall(bytes(spoiled) + block(0, data))
    assert take_all(answers, reader) == [(1, DAMAGED, None), (0, HIT, None)]
    assert bytes(outs[0]) == data


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (block(0, b"x" * 10, of=1), "block 0 was not asked for"),
        (block(9, b"x" * 10), "block 9 was not asked for"),
        (block(1, b"x" * 11), "a block of 11 bytes in place of 10"),
        (block(1, b"x" * 9), "a block of 9 bytes in place of 10"),
        (BLOCK.pack(1, MISS, 10, 0, key(1)), "a block of 10 bytes in place of 10"),
        (BLOCK.pack(1, DAMAGED, 0, 0, key(1)), "a block of 0 bytes in place of 10"),
        (BLOCK.pack(2**32 - 1, HIT, 2**64 - 1, 0, key(1)), "block 4294967295 was not asked for"),
        (BLOCK.pack(1, HIT, 2**64 - 1, 0, key(1)), "bytes in place of 10"),
        (miss(0), "came before"),
    ],
)
def test_what_came_before_a_broken_rule_counts_and_the_rule_is_told_next(
    native_answers: ModuleType, pair: Pair, wrong: bytes, why: str
) -> None:
    reader, writer = pair
    answers, outs = asked(native_answers, [10, 10])
    writer.sendall(block(0, bytes_of(10)) + wrong)
    first = answers.take(reader.fileno(), LONG_S, LONG_S, LONG_S)
    assert first == [(0, HIT, None)]
    for _ in range(2):
        with pytest.raises(ValueError, match=why):
            answers.take(reader.fileno(), LONG_S, LONG_S, LONG_S)
    assert answers.left == 1
    assert bytes(outs[0]) == bytes_of(10)


@pytest.mark.parametrize("sent", [0, 1, BLOCK.size, BLOCK.size + 300_000])
def test_hang_up_is_an_error_after_what_came(
    native_answers: ModuleType, pair: Pair, sent: int
) -> None:
    reader, writer = pair
    answers, outs = asked(native_answers, [5, 400_000])
    data = bytes_of(5)

    def say() -> None:
        writer.sendall(block(0, data) + block(1, bytes_of(400_000))[:sent])
        writer.shutdown(socket.SHUT_WR)

    saying = in_background(say)
    assert answers.take(reader.fileno(), LONG_S, LONG_S, LONG_S) == [(0, HIT, None)]
    with pytest.raises(ConnectionResetError):
        answers.take(reader.fileno(), LONG_S, LONG_S, LONG_S)
    saying.join()
    assert bytes(outs[0]) == data


@pytest.mark.parametrize("which", ["left_s", "each_s"])
def test_bytes_that_drip_do_not_move_the_deadline(
    native_answers: ModuleType, pair: Pair, which: str
) -> None:
    reader, writer = pair
    answers, _ = asked(native_answers, [MIB])
    stop = threading.Event()

    def drip() -> None:
        writer.sendall(block(0, bytes(MIB))[: BLOCK.size])
        while not stop.wait(SHORT_S / 10):
            writer.sendall(b"x")

    dripping = in_background(drip)
    begin_s = time.monotonic()
    times = {"left_s": LONG_S, "each_s": LONG_S, which: SHORT_S}
    try:
        with pytest.raises(TimeoutError):
            answers.take(reader.fileno(), tell_s=LONG_S, **times)
    finally:
        stop.set()
        dripping.join()
    assert time.monotonic() - begin_s >= SHORT_S


@pytest.mark.parametrize("left_s", [0.0, -1.0])
def test_no_time_left_is_a_timeout(native_answers: ModuleType, pair: Pair, left_s: float) -> None:
    reader, writer = pair
    answers, _ = asked(native_answers, [5])
    writer.sendall(b"there")
    with pytest.raises(TimeoutError):
        answers.take(reader.fileno(), left_s, LONG_S, LONG_S)


def test_what_is_no_socket_is_an_error(native_answers: ModuleType) -> None:
    reading, writing = os.pipe()
    answers, _ = asked(native_answers, [5])
    try:
        with pytest.raises(OSError, match="ocket") as caught:
            answers.take(reading, LONG_S, LONG_S, LONG_S)
        assert caught.value.errno == errno.ENOTSOCK
    finally:
        os.close(reading)
        os.close(writing)


def test_only_writable_memory_of_keys_with_32_bytes_is_filled(native_answers: ModuleType) -> None:
    with pytest.raises((TypeError, BufferError)):
        native_answers.Answers([key(0)], [bytes(5)])
    with pytest.raises(ValueError, match="32 bytes"):
        native_answers.Answers([b"short"], [bytearray(5)])
    with pytest.raises(ValueError, match="as many"):
        native_answers.Answers([key(0)], [])
