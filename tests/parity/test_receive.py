"""Blocks out of a socket: C++ and its twin fill, hash, and give up alike."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import xxhash

from kvist.native import receive_twin

LONG_S = 60.0
SHORT_S = 0.05


@pytest.fixture(scope="session")
def receiving(native: ModuleType) -> ModuleType:
    return native if hasattr(native, "receive_checksum") else receive_twin


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    reader, writer = socket.socketpair()
    with reader, writer:
        yield reader, writer


def bytes_of(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


def send_in_parts(link: socket.socket, data: bytes, parts: int) -> threading.Thread:
    """From a thread of its own: a socket holds less than a block."""

    def send() -> None:
        step = max(1, -(-len(data) // parts))
        for start in range(0, len(data), step):
            link.sendall(data[start : start + step])

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize("parts", [1, 7])
@pytest.mark.parametrize(
    "size", [0, 1, 16, 240, 241, 1024, 1025, 262_144, 262_145, 524_288, 2_097_152, 3_000_001]
)
def test_block_comes_whole_with_its_checksum(
    receiving: ModuleType, pair: tuple[socket.socket, socket.socket], size: int, parts: int
) -> None:
    reader, writer = pair
    data = bytes_of(size)
    out = bytearray(size + 1)
    sender = send_in_parts(writer, data + b"next", parts)
    with memoryview(out)[:size] as view:
        got = receiving.receive_checksum(reader.fileno(), view, LONG_S)
    sender.join()
    assert got == (size, xxhash.xxh3_64_intdigest(data))
    assert bytes(out) == data + b"\0"
    assert reader.recv(10) == b"next"  # nothing that follows was taken


@pytest.mark.parametrize("sent", [0, 1, 300, 300_000])
def test_hang_up_says_how_much_came(
    receiving: ModuleType, pair: tuple[socket.socket, socket.socket], sent: int
) -> None:
    reader, writer = pair
    data = bytes_of(sent)
    sender = send_in_parts(writer, data, 1)
    out = bytearray(400_000)

    def hang_up() -> None:
        sender.join()
        writer.shutdown(socket.SHUT_WR)

    closer = threading.Thread(target=hang_up)
    closer.start()
    assert receiving.receive_checksum(reader.fileno(), out, LONG_S) == (sent, 0)
    closer.join()
    assert bytes(out[:sent]) == data


def test_bytes_that_drip_do_not_move_the_deadline(
    receiving: ModuleType, pair: tuple[socket.socket, socket.socket]
) -> None:
    reader, writer = pair
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(SHORT_S / 10):
            writer.sendall(b"x")

    dripping = threading.Thread(target=drip)
    dripping.start()
    begin_s = time.monotonic()
    try:
        with pytest.raises(TimeoutError):
            receiving.receive_checksum(reader.fileno(), bytearray(1 << 20), SHORT_S)
    finally:
        stop.set()
        dripping.join()
    assert time.monotonic() - begin_s >= SHORT_S


@pytest.mark.parametrize("left_s", [0.0, -1.0])
def test_no_time_left_is_a_timeout(
    receiving: ModuleType, pair: tuple[socket.socket, socket.socket], left_s: float
) -> None:
    reader, writer = pair
    writer.sendall(b"there")
    with pytest.raises(TimeoutError):
        receiving.receive_checksum(reader.fileno(), bytearray(5), left_s)
    assert reader.recv(10) == b"there"


def test_what_is_no_socket_is_an_error(receiving: ModuleType) -> None:
    reading, writing = os.pipe()
    try:
        with pytest.raises(OSError, match="ocket") as caught:
            receiving.receive_checksum(reading, bytearray(5), LONG_S)
        assert caught.value.errno == errno.ENOTSOCK
    finally:
        os.close(reading)
        os.close(writing)


def test_only_writable_memory_is_filled(
    receiving: ModuleType, pair: tuple[socket.socket, socket.socket]
) -> None:
    with pytest.raises((TypeError, BufferError)):
        receiving.receive_checksum(pair[0].fileno(), bytes(5), LONG_S)
