"""vLLM's own classes read what Kvist publishes, and the other way round."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path

import msgspec
import pytest

from kvist.cluster.directory import Holder
from kvist.cluster.discovery.static import StaticDiscovery
from kvist.cluster.record import NodeRecord, NodeState
from kvist.cluster.view import ClusterView
from kvist.cluster.wire import decode_message, encode_payload
from kvist.core.events import Cleared, Content, Removed, Stored
from kvist.core.keys import token_bytes
from kvist.core.outcome import Tier
from kvist.native import digest
from kvist.node.events import EventLines

pytestmark = pytest.mark.engines

WAIT_S = 60.0
A, B, C = (digest(name) for name in (b"a", b"b", b"c"))
RECORD = NodeRecord("n1", incarnation=3, version=4, state=NodeState.ACTIVE)


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's imports warn; our own code must not
        import vllm.distributed.kv_events  # noqa: F401


def test_vllm_reads_our_batches_and_ignores_the_record() -> None:
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

    events = (Cleared(), Stored((A, B), C, Tier.DRAM), Removed((A,), Tier.SSD))
    payload = encode_payload(events, ts=12.5, block_tokens=16, record=RECORD)
    batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
    cleared, stored, removed = batch.events
    assert (batch.ts, batch.data_parallel_rank) == (12.5, None)
    assert isinstance(cleared, AllBlocksCleared)
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.parent_block_hash) == ([A, B], C)
    assert (stored.medium, stored.block_size, stored.token_ids) == ("CPU", 16, [])
    assert isinstance(removed, BlockRemoved)
    assert (removed.block_hashes, removed.medium, removed.locality) == ([A], "STORAGE", "LOCAL")


def test_we_read_what_vllm_publishes() -> None:
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

    stored = BlockStored(
        block_hashes=[A, 7],
        parent_block_hash=C,
        token_ids=list(range(32)),
        block_size=16,
        lora_id=3,
        medium="GPU",
        lora_name="lora",
        extra_keys=[("lora", ("image", 5)), None],
        group_idx=0,
        kv_cache_spec_kind="full",
        session_id="s",
    )
    removed = BlockRemoved(block_hashes=[B], medium="CPU", group_idx=1)
    batch = KVEventBatch(ts=1.0, events=[AllBlocksCleared(), stored, removed], data_parallel_rank=2)
    payload = msgspec.msgpack.Encoder().encode(batch)
    heard = decode_message(b"", (9).to_bytes(8, "big"), payload, source="engine")
    seven = (7).to_bytes(8, "big").ljust(16, b"\0")
    assert heard.number == 9
    assert heard.events == (
        Cleared(),
        Stored((A, seven), C, Tier.HBM, Content(token_bytes(range(32)), 16, "lora", "", 0, "full")),
        Removed((B,), Tier.DRAM, 1),
    )


def test_fields_of_our_events_are_those_of_vllm() -> None:
    """A field that vLLM adds or drops is noticed here, before anybody's router is."""
    from vllm.distributed import kv_events as theirs

    from kvist.cluster import wire as ours

    for name in ("BlockStored", "BlockRemoved", "AllBlocksCleared"):
        assert getattr(theirs, name).__struct_fields__ == getattr(ours, name).__struct_fields__, (
            name
        )
    assert theirs.ZmqEventPublisher.END_SEQ == ours.END_NUMBER


def test_golden_bytes_are_what_vllm_writes() -> None:
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

    def stored(*keys: bytes, parent: bytes | None, medium: str, **more: str) -> BlockStored:
        return BlockStored(list(keys), parent, [], 16, None, medium, None, **more)

    theirs = {
        "nothing": [],
        "cleared": [AllBlocksCleared()],
        "stored in dram": [stored(A, B, parent=C, medium="CPU")],
        "stored in ssd, first block": [
            stored(A, parent=None, medium="STORAGE", locality="LOCAL"),
        ],
        "stored in hbm": [stored(A, parent=B, medium="GPU")],
        "removed from remote": [BlockRemoved([A, B], "STORAGE", locality="REMOTE")],
    }
    golden = json.loads((Path(__file__).parents[2] / "golden" / "kv_events_v1.json").read_text())
    for name, events in theirs.items():
        payload = msgspec.msgpack.encode(KVEventBatch(ts=12.5, events=events))
        assert payload.hex() == golden[name], name


@pytest.mark.parametrize("buffer_steps", [1000, 1])
def test_directory_follows_the_publisher_of_a_stock_engine(
    tmp_path: Path, buffer_steps: int
) -> None:
    """What was published before anybody listened comes by vLLM's replay, as far as that goes."""
    from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
    from vllm.distributed.kv_events import ZmqEventPublisher as Publisher

    events, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    publisher = Publisher(
        0,
        endpoint=events,
        replay_endpoint=replay,
        topic="kv@pod@model",
        buffer_steps=buffer_steps,
    )
    lines, view = EventLines(), ClusterView()

    def publish(*happened: BlockStored | BlockRemoved) -> None:
        publisher.publish(KVEventBatch(ts=time.time(), events=list(happened)))

    def listen_until(key: bytes, holders: list[Holder]) -> None:
        give_up = time.monotonic() + WAIT_S
        while view.directory.holders(key) != holders:
            assert time.monotonic() < give_up
            for ask in view.tick(time.monotonic()):
                lines.ask(ask)
            for batch in lines.receive():
                view.hear(batch, time.monotonic())
            for node in lines.answered():
                view.answered(node, time.monotonic())

    try:
        publish(BlockStored([A], None, list(range(16)), 16, None, "GPU", None))
        publish(
            BlockRemoved([A], "GPU"),
            BlockStored([B], A, list(range(16)), 16, None, "GPU", None),
        )
        listed = StaticDiscovery([f"engine={events}?replay={replay}"]).members()
        lines.follow(listed)
        view.discovered(listed, time.monotonic())
        listen_until(B, [Holder("engine", Tier.HBM)])
        assert view.directory.holders(A) == []
        publish(BlockRemoved([B], "GPU"))
        listen_until(B, [])
    finally:
        publisher.shutdown()
        lines.close()
