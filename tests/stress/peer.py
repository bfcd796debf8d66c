"""The other process of the stress: maps the arena and moves bytes for the threads of the first.

It plays the engine's worker. Each of its threads serves one socket: an order names slots by their
offset, under a lease that the sender holds until the answer. FILL writes the right bytes of blocks,
SPOIL writes half a block of garbage, CHECK looks twice whether blocks are right.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from enum import Enum

from kvist.testing.store_suite import content, key
from kvist.tiers.dram import Arena, ArenaMap

BLOCK_BYTES = 8192
UNIVERSE = 160  # blocks that exist
SOCKET_TIMEOUT_S = 60.0
_HEAD = struct.Struct("<BI")  # order, number of items
_ITEM = struct.Struct("<QI")  # offset in the arena, number of the block
_ANSWER = struct.Struct("<I")  # items that were wrong

CONTENTS = [content(key(n), BLOCK_BYTES) for n in range(UNIVERSE)]


class Order(Enum):
    """What a thread of the peer is asked to do."""

    FILL = 1
    SPOIL = 2
    CHECK = 3


def receive(link: socket.socket, size_bytes: int) -> bytes:
    """Exactly so many bytes, or none at the end."""
    data = b""
    while len(data) < size_bytes:
        part = link.recv(size_bytes - len(data))
        if not part:
            return b""
        data += part
    return data


def ask(link: socket.socket, order: Order, items: Sequence[tuple[int, int]]) -> int:
    """Sends an order and waits for its end; returns how many blocks were wrong."""
    head = _HEAD.pack(order.value, len(items))
    link.sendall(head + b"".join(_ITEM.pack(offset, n) for offset, n in items))
    answer = receive(link, _ANSWER.size)
    assert answer, "the other process is gone"
    return int(_ANSWER.unpack(answer)[0])


def carry_out(arena: ArenaMap, order: Order, items: Sequence[tuple[int, int]]) -> int:
    """Does one order; returns how many blocks were wrong."""
    wrong = 0
    for offset, n in items:
        view = arena.view(offset // arena.slot_bytes)[:BLOCK_BYTES]
        if order is Order.FILL:
            for start in range(0, BLOCK_BYTES, 1024):  # in pieces: others look meanwhile
                view[start : start + 1024] = CONTENTS[n][start : start + 1024]
        elif order is Order.SPOIL:
            view[: BLOCK_BYTES // 2] = b"\xee" * (BLOCK_BYTES // 2)
        else:
            first = view == CONTENTS[n]
            time.sleep(0)  # lets another thread take a slot that is not held
            wrong += not (first and view == CONTENTS[n])
    return wrong


def serve(arena: ArenaMap, link: socket.socket) -> None:
    """Carries out orders until the other side ends."""
    with link:
        link.settimeout(SOCKET_TIMEOUT_S)
        while head := receive(link, _HEAD.size):
            order, count = _HEAD.unpack(head)
            body = receive(link, count * _ITEM.size)
            items = list(_ITEM.iter_unpack(body))
            link.sendall(_ANSWER.pack(carry_out(arena, Order(order), items)))


def main() -> None:
    """Arguments: path, size and slot size of the arena, then a socket's descriptor a thread."""
    path, size_bytes, slot_bytes, *links = sys.argv[1:]
    arena = Arena.attach(path, int(size_bytes), slot_bytes=int(slot_bytes))
    threads = [
        threading.Thread(target=serve, args=(arena, socket.socket(fileno=int(fd)))) for fd in links
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3600)


if __name__ == "__main__":
    main()
