"""`carried_owner.py KIND BLOCK_BYTES BLOCKS`: an owner whose blocks are carried.

Prints its address, and ends with its input. `carriers` in a line prints their processes, `spoil N`
changes a byte of block N, `leases` prints how many are open.
"""

from __future__ import annotations

import sys
from pathlib import Path

if (folder := str(Path(__file__).parent)) not in sys.path:
    sys.path.insert(0, folder)

from peer_thread import attach, owner

from kvist.node.peers.carrying.showcase import Showcase
from kvist.testing.store_suite import key, put


def main(kind: str, block_bytes: int, blocks: int) -> None:
    """Serves keyspace 1, which holds so many blocks; block 3 is below DRAM."""
    showcase = Showcase(kind)
    wanted = attach(1, block_bytes=block_bytes)
    with owner(showcase=showcase, wanted=wanted, block_bytes=block_bytes, slots=blocks) as (
        server,
        store,
    ):
        assert all(put(store, range(4, blocks)))
        print(server.address, flush=True)
        for line in sys.stdin:
            order, *numbers = line.split()
            if order == "carriers":
                print(*showcase.pids(), flush=True)
            elif order == "leases":
                print(store.stats().leases, flush=True)
            else:
                with store.own.read([key(int(numbers[0]))], deadline_s=1.0) as lease:
                    lease.checksum(0)  # as its writer said it, from here on
                    store.arena.view(lease.slot(0) // store.arena.slot_bytes)[block_bytes // 2] ^= 1
                print("done", flush=True)
    showcase.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
