"""KV event payloads, byte for byte as vLLM 0.32 writes them, and a node's record in discovery.

That vLLM's own classes write these bytes is proven in tests/engines/vllm/test_kv_event_format.py.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from kvist.cluster.record import (
    Holds,
    NodeRecord,
    NodeState,
    TierSpace,
    decode_record,
    encode_record,
)
from kvist.cluster.wire import decode_message, encode_payload, topic_of
from kvist.core.events import Cleared, KvEvent, Removed, Stored
from kvist.core.outcome import Tier
from kvist.native import digest

FILE = Path(__file__).parent / "kv_events_v1.json"
A, B, C = (digest(name) for name in (b"a", b"b", b"c"))
EVENTS: dict[str, tuple[KvEvent, ...]] = {
    "nothing": (),
    "cleared": (Cleared(),),
    "stored in dram": (Stored((A, B), C, Tier.DRAM),),
    "stored in ssd, first block": (Stored((A,), None, Tier.SSD),),
    "stored in hbm": (Stored((A,), B, Tier.HBM),),
    "removed from remote": (Removed((A, B), Tier.REMOTE),),
}
RECORD = NodeRecord(
    "n1",
    incarnation=5,
    version=6,
    state=NodeState.DRAINING,
    domain="rack",
    events="tcp://h:1",
    weight=8,
    free_bytes=9,
    tiers=(TierSpace("dram", 1, 2),),
)
HOLDING = msgspec.structs.replace(RECORD, holds=Holds(16, ("0f" * 32,)))
TS = 12.5


def _made() -> dict[str, str]:
    made = {n: encode_payload(e, ts=TS, block_tokens=16).hex() for n, e in EVENTS.items()}
    made["with a record"] = encode_payload((), ts=TS, block_tokens=16, record=RECORD).hex()
    made["record in discovery"] = encode_record(RECORD).decode()
    made["record that holds"] = encode_record(HOLDING).decode()
    made["topic"] = topic_of("n1", 0x123).decode()
    return made


def _golden() -> dict[str, str]:
    if os.environ.get("KVIST_WRITE_GOLDEN"):
        FILE.write_text(json.dumps(_made(), indent=1) + "\n")
    golden: dict[str, str] = json.loads(FILE.read_text())
    return golden


@pytest.mark.parametrize("name", _made())
def test_bytes_are_those_of_version_1(name: str) -> None:
    assert _made()[name] == _golden()[name]


@pytest.mark.parametrize("name", EVENTS)
def test_golden_payloads_are_read_as_what_they_say(name: str) -> None:
    payload = bytes.fromhex(_golden()[name])
    batch = decode_message(topic_of("n1", 5), bytes(8), payload, source="")
    assert batch.events == EVENTS[name]


def test_golden_records_are_read_as_what_they_say() -> None:
    payload = bytes.fromhex(_golden()["with a record"])
    assert decode_message(topic_of("n1", 5), bytes(8), payload, source="").record == RECORD
    assert decode_record(_golden()["record in discovery"].encode()) == RECORD
    assert decode_record(_golden()["record that holds"].encode()) == HOLDING
