"""Whatever happens to objects in a remote: a miss, never a wrong byte."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.adapters.layers import Blow, ChaosLayer, RetryLayer
from kvist.adapters.memory import MemoryAdapter, MemoryMedium
from kvist.adapters.protocol import Fetched, NewObject, StorageAdapter, Wanted
from kvist.codec.chain import Chain
from kvist.codec.frame import PAGE_BYTES, FrameHeader, FrameKind
from kvist.codec.registry import CodecRegistry
from kvist.core.errors import FormatError, TierError
from kvist.core.outcome import Outcome
from kvist.native import checksum
from kvist.testing.tier_suite import BLOCK_BYTES, read_block, suite_block, suite_key, suite_payload
from kvist.tiers.protocol import Payload
from kvist.tiers.remote import LearnLimits, MissCause, RemoteTier
from kvist.tiers.remote.frames import Names

KEYSPACE = bytes(range(32))
WAIT_S = 20.0


def open_tier(
    adapter: StorageAdapter,
    *,
    limits: LearnLimits | None = None,
    codecs: CodecRegistry | None = None,
    available: Callable[[], bool] = lambda: True,
    keyspace: bytes = KEYSPACE,
) -> RemoteTier:
    return RemoteTier(adapter, keyspace=keyspace, limits=limits, codecs=codecs, available=available)


def until(condition: Callable[[], bool]) -> None:
    """Waits for what another thread will do."""
    give_up = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up, "it never happens"
        time.sleep(0.002)


def damage(data: bytes, how: str) -> bytes:
    """What may become of an object."""
    swapped = FrameHeader.unpack(data)
    if how == "cut":
        return data[:-PAGE_BYTES]
    if how == "cut in a page":
        return data[:-5]
    if how == "header only":
        return data[:100]
    if how == "longer":
        return data + bytes(PAGE_BYTES)
    if how == "payload bit":
        return data[:5000] + bytes([data[5000] ^ 4]) + data[5001:]
    if how == "header bit":
        return data[:60] + bytes([data[60] ^ 1]) + data[61:]
    if how == "garbage":
        return bytes(len(data))
    fields = {
        "kind": swapped.kind,
        "sequence": 0,
        "keyspace": swapped.keyspace,
        "key": swapped.key,
        "parent": None,
        "raw_bytes": swapped.raw_bytes,
        "stored_bytes": swapped.stored_bytes,
        "payload_checksum": swapped.payload_checksum,
        "codec": swapped.codec,
    }
    fields |= {
        "another key": {"key": suite_key(77)},
        "another keyspace": {"keyspace": bytes(32)},
        "tombstone": {"kind": FrameKind.TOMBSTONE},
        "wrong sum": {"payload_checksum": 1},
    }[how]
    return FrameHeader(**fields).pack() + data[PAGE_BYTES:]


@pytest.mark.parametrize(
    "how",
    [
        "cut",
        "cut in a page",
        "header only",
        "longer",
        "payload bit",
        "header bit",
        "garbage",
        "another key",
        "another keyspace",
        "tombstone",
        "wrong sum",
    ],
)
def test_damaged_object_is_a_miss_and_makes_way_for_a_good_one(how: str) -> None:
    medium = MemoryMedium()
    tier = open_tier(MemoryAdapter(medium))
    tier.put([suite_payload(1), suite_payload(2)])
    name = Names(KEYSPACE).name(suite_key(1))
    medium.objects[name] = damage(medium.objects[name], how)
    assert read_block(tier, 1) is None
    assert read_block(tier, 2) == suite_block(2)
    assert tier.stats().misses_by_cause == {MissCause.DAMAGED: 1}
    until(lambda: name not in medium.objects)
    assert not tier.contains(suite_key(1))
    tier.put([suite_payload(1)])
    assert read_block(tier, 1) == suite_block(1)
    tier.close()


class FlipsOnce(MemoryAdapter):
    """The first object that is read arrives with a bit turned over."""

    flipped = 0

    def get(self, wanted: Sequence[Wanted]) -> list[Fetched]:
        answers = super().get(wanted)
        if wanted and wanted[0].into and not self.flipped:
            self.flipped += 1
            wanted[0].into[1][7] ^= 1
        return answers


def test_host_that_flips_bits_does_not_delete_what_is_whole() -> None:
    medium = MemoryMedium()
    tier = open_tier(FlipsOnce(medium))
    tier.put([suite_payload(1)])
    assert read_block(tier, 1) is None
    assert tier.stats().misses_by_cause == {MissCause.DAMAGED: 1}
    until(lambda: not tier._learner._prober._errands)
    tier.close()
    assert tier.stats().learned.discarded == 0
    assert Names(KEYSPACE).name(suite_key(1)) in medium.objects


def test_frame_of_a_newer_kvist_is_a_miss_and_stays() -> None:
    medium = MemoryMedium()
    tier = open_tier(MemoryAdapter(medium))
    tier.put([suite_payload(1)])
    name = Names(KEYSPACE).name(suite_key(1))
    page = bytearray(medium.objects[name][:PAGE_BYTES])
    page[8] = 2
    page[-8:] = checksum(bytes(page[:-8])).to_bytes(8, "little")
    medium.objects[name] = bytes(page) + medium.objects[name][PAGE_BYTES:]
    assert read_block(tier, 1) is None
    assert tier.stats().misses_by_cause == {MissCause.VERSION: 1}
    tier.close()
    assert name in medium.objects


class Doubling:
    """A codec that stores every byte of the first half; the second is its complement."""

    name = "half"

    def encode(self, block: memoryview) -> bytes:
        return bytes(block[: len(block) // 2])

    def decode(self, stored: memoryview, out: memoryview) -> None:
        if 2 * len(stored) != len(out):
            raise FormatError("not half of it")
        out[: len(stored)] = stored
        out[len(stored) :] = bytes(255 - b for b in stored)


def doubled(size_bytes: int) -> tuple[bytes, Payload]:
    half = suite_block(5, size_bytes // 2)
    block = half + bytes(255 - b for b in half)
    return block, Payload(suite_key(5), None, memoryview(half), "half", len(block))


@pytest.mark.parametrize("size_bytes", [BLOCK_BYTES, 100, 2 * PAGE_BYTES])
def test_encoded_blocks_are_decoded_on_arrival(size_bytes: int) -> None:
    """100 bytes: the encoded block's object is as large as the raw one's would be."""
    medium = MemoryMedium()
    block, payload = doubled(size_bytes)
    codecs = CodecRegistry([Chain("half", Doubling())])
    tier = open_tier(MemoryAdapter(medium), codecs=codecs)
    tier.put([payload])
    out = bytearray(size_bytes)
    assert tier.read_into(suite_key(5), memoryview(out)) is Outcome.HIT
    assert bytes(out) == block
    assert [o for _, o in tier.read_many([(suite_key(5), memoryview(out))])] == [Outcome.HIT]
    stranger = open_tier(MemoryAdapter(medium))
    assert stranger.read_into(suite_key(5), memoryview(out)) is Outcome.MISS
    assert stranger.stats().misses_by_cause == {MissCause.CODEC: 1}
    assert tier.read_into(suite_key(5), memoryview(bytearray(size_bytes + 2))) is Outcome.MISS
    tier.close()
    stranger.close()
    assert medium.objects


class CountsReads(MemoryAdapter):
    """Counts objects that were asked for with buffers."""

    reads = 0

    def get(self, wanted: Sequence[Wanted]) -> list[Fetched]:
        self.reads += sum(bool(w.into) for w in wanted)
        return super().get(wanted)


def test_object_whose_size_is_known_is_fetched_once() -> None:
    medium = MemoryMedium()
    codecs = CodecRegistry([Chain("half", Doubling())])
    block, payload = doubled(4 * BLOCK_BYTES)
    writer = open_tier(MemoryAdapter(medium), codecs=codecs)
    writer.put([payload])
    writer.close()
    adapter = CountsReads(medium)
    tier = open_tier(adapter, codecs=codecs)
    assert tier.wait_listed(WAIT_S)
    out = bytearray(4 * BLOCK_BYTES)
    for n in (1, 2):
        assert tier.read_into(suite_key(5), memoryview(out)) is Outcome.HIT
        assert bytes(out) == block
        assert adapter.reads == n
    tier.close()


def test_belief_in_a_wrong_size_costs_one_call_more_and_no_block() -> None:
    """Another host has written the block anew, encoded otherwise."""
    medium = MemoryMedium()
    codecs = CodecRegistry([Chain("half", Doubling())])
    block, payload = doubled(4 * BLOCK_BYTES)
    raw = Payload(payload.key, None, memoryview(block))
    adapter = CountsReads(medium)
    tier = open_tier(adapter, codecs=codecs)
    out = bytearray(4 * BLOCK_BYTES)
    for new in (raw, payload, raw):
        medium.objects.clear()
        writer = open_tier(MemoryAdapter(medium), codecs=codecs)
        writer.put([new])
        writer.close()
        assert tier.read_into(suite_key(5), memoryview(out)) is Outcome.HIT
        assert bytes(out) == block
    assert adapter.reads == 5
    assert tier.stats().misses_by_cause == {}
    tier.close()


@given(
    seed=st.integers(0, 2**32),
    chances=st.dictionaries(st.sampled_from(list(Blow)), st.floats(0.05, 0.6)),
    actions=st.lists(st.tuples(st.sampled_from("prsx"), st.integers(0, 11)), max_size=60),
)
def test_chaos_never_makes_a_wrong_byte(
    seed: int, chances: dict[Blow, float], actions: list[tuple[str, int]]
) -> None:
    medium = MemoryMedium()
    chaos = ChaosLayer(MemoryAdapter(medium), seed=seed, chances=chances, rest=lambda _: None)
    layered = RetryLayer(chaos, retries=1, rest=lambda _: None)
    tier = open_tier(layered, limits=LearnLimits(probe_s=0.01, refresh_s=0.01))
    for action, n in actions:
        try:
            if action == "p":
                tier.put([suite_payload(i, 500) for i in range(n, n + 3)])
            elif action == "r":
                assert read_block(tier, n, 500) in (None, suite_block(n, 500))
            elif action == "x":
                tier.remove([suite_key(n)])
            else:
                run = tier.contains_run([suite_key(i) for i in range(n)])
                outs = [bytearray(500) for _ in range(run)]
                items = [(suite_key(i), memoryview(o)) for i, o in enumerate(outs)]
                for i, outcome in tier.read_many(items):
                    assert outcome is not Outcome.HIT or outs[i] == suite_block(i, 500)
        except TierError:
            continue
    chaos.heal()
    tier.clear()

    def works() -> bool:  # what was found damaged may be removed just when a good one has come
        tier.put([suite_payload(1, 500)])
        return read_block(tier, 1, 500) == suite_block(1, 500)

    until(works)
    tier.close()


def test_objects_are_plain_frames() -> None:
    """The bytes are a promise: header page, payload, zeros up to a whole page."""
    medium = MemoryMedium()
    tier = open_tier(MemoryAdapter(medium))
    tier.put([suite_payload(1, 5000)])
    tier.close()
    ((name, data),) = medium.objects.items()
    assert name == f"{KEYSPACE.hex()}/{suite_key(1).hex()}"
    header = FrameHeader.unpack(data)
    assert (header.keyspace, header.key, header.parent) == (KEYSPACE, suite_key(1), suite_key(0))
    assert data[PAGE_BYTES : PAGE_BYTES + 5000] == suite_block(1, 5000)
    assert not any(data[PAGE_BYTES + 5000 :])
    assert len(data) == header.total_bytes
    assert NewObject(name, (memoryview(data),)).size_bytes == len(data)
