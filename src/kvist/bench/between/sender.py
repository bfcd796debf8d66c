"""`python -m kvist.bench.between.sender FILE COUNT BYTES`: the least that can send blocks over TCP.

It prints its port. A connection says 16 bytes: the first block and the step; it gets that block and
each that comes a step later, one after the other, as often as it asks.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading

from kvist.tiers.mapping import map_shared

ASK = struct.Struct("<QQ")
_BACKLOG = 16


def main() -> None:
    """Serves until it is killed."""
    path, count, block_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    fd = os.open(path, os.O_RDWR)
    memory, _ = map_shared(fd, count * block_bytes)
    blocks = [memory[i * block_bytes : (i + 1) * block_bytes] for i in range(count)]
    with socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            link, _ = listener.accept()
            threading.Thread(target=_serve, args=(link, blocks), daemon=True).start()


def _serve(link: socket.socket, blocks: list[memoryview]) -> None:
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    asked = bytearray(ASK.size)
    with contextlib.suppress(OSError):
        while link.recv_into(asked, ASK.size, socket.MSG_WAITALL) == ASK.size:
            first, step = ASK.unpack(asked)
            for block in blocks[first::step]:
                link.sendall(block)


if __name__ == "__main__":
    main()
