"""What an owner holds for a reader, whatever its blocks are like."""

from __future__ import annotations

import pytest
from peer_thread import LIMIT_S, RawPeer, owner, until

from kvist.native.answer import BLOCK, HIT
from kvist.node.peers import messages as m
from kvist.testing.store_suite import content, key, put


@pytest.mark.parametrize(
    ("block_bytes", "blocks", "held"), [(1 << 20, 40, 32), (20 << 20, 4, 2), (100_000, 40, 32)]
)
def test_owner_leases_a_bounded_part_of_what_a_reader_asks_for(
    block_bytes: int, blocks: int, held: int
) -> None:
    """32 MiB and 32 blocks, or two blocks where those are larger; less when it has sent some."""
    numbers = range(blocks)
    with owner(block_bytes=block_bytes, slots=blocks) as (server, store), RawPeer(server) as raw:
        assert all(put(store, numbers[4:]))
        assert store.flush(LIMIT_S)
        assert raw.greet(block_bytes=block_bytes) == m.Welcome(True)
        most = 0
        raw.say(m.Read(b"".join(key(n) for n in numbers), LIMIT_S))
        for _ in numbers:
            header = raw.take(BLOCK.size)
            assert header is not None
            most = max(most, blocks - store.room_blocks())
            _, status, size_bytes, _, of = BLOCK.unpack(header)
            assert (status, size_bytes) == (HIT, block_bytes)
            assert raw.take(block_bytes) == content(of, block_bytes)
        assert 0 < most <= held
        until(lambda: store.room_blocks() == blocks)
