"""The remote tier: how it learns what is there, what it believes, what a read may do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest

from kvist.adapters.layers import Blow, BreakerLayer, ChaosLayer
from kvist.adapters.memory import MemoryAdapter, MemoryMedium
from kvist.adapters.protocol import Fetched, Page, StorageAdapter, Wanted
from kvist.codec.frame import frame_bytes
from kvist.codec.registry import CodecRegistry
from kvist.core.errors import ConfigError, TierError
from kvist.core.outcome import Outcome
from kvist.testing.tier_suite import BLOCK_BYTES, read_block, suite_block, suite_key, suite_payload
from kvist.tiers.remote import LearnLimits, MissCause, RemoteTier
from kvist.tiers.remote.frames import Names
from kvist.tiers.remote.knowledge import Knowledge

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


class Watched(MemoryAdapter):
    """Counts probes; `gate` holds them back."""

    def __init__(self, medium: MemoryMedium) -> None:
        super().__init__(medium)
        self.probed: list[int] = []
        self.gate: threading.Event | None = None
        self.lists = True

    def get(self, wanted: Sequence[Wanted]) -> list[Fetched]:
        if wanted and not wanted[0].into:
            if self.gate is not None:
                self.gate.wait(WAIT_S)
            self.probed.append(len(wanted))
        return super().get(wanted)

    def list_page(self, prefix: str, *, cursor: str | None = None, limit: int = 1000) -> Page:
        if not self.lists:
            return Page(())
        return super().list_page(prefix, cursor=cursor, limit=limit)


def stored(medium: MemoryMedium, numbers: Sequence[int]) -> None:
    """Another host stores blocks."""
    other = open_tier(MemoryAdapter(medium))
    other.put([suite_payload(i) for i in numbers])
    other.close()


def test_blocks_that_others_stored_before_are_known_after_the_first_listing() -> None:
    medium = MemoryMedium()
    stored(medium, range(1500))
    watched = Watched(medium)
    tier = open_tier(watched)
    assert tier.wait_listed(WAIT_S)
    assert all(tier.contains(suite_key(i)) for i in range(1500))
    assert watched.probed == []
    tier.close()


def test_one_lookup_of_a_prompt_finds_what_others_stored_since() -> None:
    medium = MemoryMedium()
    watched = Watched(medium)
    tier = open_tier(watched, limits=LearnLimits(probe_s=WAIT_S))
    assert tier.wait_listed(WAIT_S)
    stored(medium, range(300))
    keys = [suite_key(i) for i in range(400)]
    assert tier.contains_run(keys) == 300
    assert max(watched.probed) <= 128
    assert tier.contains_run(keys) == 300
    assert len(watched.probed) == 3  # what is absent is not asked for again
    tier.close()


def test_lookup_of_one_key_never_waits_and_is_answered_later() -> None:
    medium = MemoryMedium()
    watched = Watched(medium)
    tier = open_tier(watched)
    assert tier.wait_listed(WAIT_S)
    stored(medium, range(3))
    watched.gate = threading.Event()
    assert not tier.contains(suite_key(1))
    watched.gate.set()
    until(lambda: tier.contains(suite_key(1)))
    tier.close()


def test_remote_that_answers_late_is_not_waited_for_again() -> None:
    watched = Watched(MemoryMedium())
    tier = open_tier(watched, limits=LearnLimits(probe_s=0.05))
    assert tier.wait_listed(WAIT_S)
    watched.gate = threading.Event()
    for n in range(5):
        assert tier.contains_run([suite_key(100 * n + i) for i in range(9)]) == 0
    learned = tier.stats().learned
    assert (learned.waited, learned.late) == (1, 1)
    watched.gate.set()
    until(
        lambda: (
            tier.contains_run([suite_key(7777 + tier.stats().learned.probed)]) == 0
            and tier.stats().learned.waited > 1
        )
    )
    tier.close()


def test_without_a_probe_time_lookups_ask_nothing() -> None:
    medium = MemoryMedium()
    watched = Watched(medium)
    tier = open_tier(watched, limits=LearnLimits(probe_s=0.0))
    assert tier.wait_listed(WAIT_S)
    stored(medium, range(3))
    assert tier.contains_run([suite_key(i) for i in range(3)]) == 0
    assert watched.probed == []
    tier.close()


def test_listing_again_learns_what_came_and_what_went() -> None:
    medium = MemoryMedium()
    stored(medium, range(10))
    tier = open_tier(MemoryAdapter(medium), limits=LearnLimits(refresh_s=0.05, absent_s=1e6))
    assert tier.wait_listed(WAIT_S)
    stored(medium, range(10, 20))
    names = Names(KEYSPACE)
    MemoryAdapter(medium).delete([names.name(suite_key(i)) for i in range(5)])
    until(lambda: [tier.contains(suite_key(i)) for i in range(20)] == [False] * 5 + [True] * 15)
    tier.close()


def test_block_evicted_by_the_medium_between_look_and_read_is_a_miss() -> None:
    medium = MemoryMedium()
    tier = open_tier(MemoryAdapter(medium))
    tier.put([suite_payload(1)])
    assert tier.contains(suite_key(1))
    medium.objects.clear()
    assert read_block(tier, 1) is None
    assert not tier.contains(suite_key(1))
    assert tier.stats().misses_by_cause == {MissCause.ABSENT: 1}
    tier.put([suite_payload(1)])
    assert read_block(tier, 1) == suite_block(1)
    tier.close()


def test_blocks_of_another_keyspace_are_neither_seen_nor_deleted() -> None:
    medium = MemoryMedium()
    other = open_tier(MemoryAdapter(medium), keyspace=bytes(32))
    other.put([suite_payload(i) for i in range(5)])
    tier = open_tier(MemoryAdapter(medium), limits=LearnLimits(probe_s=WAIT_S))
    assert tier.wait_listed(WAIT_S)
    assert tier.contains_run([suite_key(i) for i in range(5)]) == 0
    assert read_block(tier, 1) is None
    tier.put([suite_payload(9)])
    tier.clear()
    assert read_block(tier, 9) is None
    assert [read_block(other, i) for i in range(5)] == [suite_block(i) for i in range(5)]
    tier.close()
    other.close()


def test_while_the_medium_rests_nothing_is_present_and_nothing_is_asked() -> None:
    medium = MemoryMedium()
    chaos = ChaosLayer(MemoryAdapter(medium), seed=1, chances={})
    breaker = BreakerLayer(chaos, failures=2, open_s=1000.0)
    tier = open_tier(breaker, limits=LearnLimits(probe_s=WAIT_S), available=breaker.passes)
    tier.put([suite_payload(1)])
    assert tier.contains(suite_key(1))
    chaos._chances[Blow.ERROR] = 1.0
    for _ in range(2):
        with pytest.raises(TierError):
            read_block(tier, 1)
    assert not tier.contains(suite_key(1))
    assert tier.contains_run([suite_key(1), suite_key(2)]) == 0
    assert not tier.stats().available
    tier.close()


def test_reads_that_are_abandoned_do_not_write_to_buffers_afterwards() -> None:
    medium = MemoryMedium()
    stored(medium, range(16))
    tier = open_tier(MemoryAdapter(medium))
    outs = [bytearray(BLOCK_BYTES) for _ in range(16)]
    reads = tier.read_many([(suite_key(i), memoryview(o)) for i, o in enumerate(outs)])
    del reads  # before its first step
    for out in outs:
        out[:] = b"\xee" * BLOCK_BYTES
    time.sleep(0.05)
    assert all(out == b"\xee" * BLOCK_BYTES for out in outs)
    tier.close()


def test_failed_call_costs_its_own_blocks_only() -> None:
    medium = MemoryMedium()
    stored(medium, range(64))

    class OneBad(MemoryAdapter):
        def get(self, wanted: Sequence[Wanted]) -> list[Fetched]:
            if any(w.into and w.name.endswith(suite_key(3).hex()) for w in wanted):
                raise TierError(5, "that one")
            return super().get(wanted)

    tier = open_tier(OneBad(medium))
    outs = [bytearray(BLOCK_BYTES) for _ in range(64)]
    found = dict(tier.read_many([(suite_key(i), memoryview(o)) for i, o in enumerate(outs)]))
    failed = [i for i, outcome in found.items() if isinstance(outcome, TierError)]
    assert 3 in failed
    assert len(failed) < 64
    for i in set(range(64)).difference(failed):
        assert found[i] is Outcome.HIT
        assert outs[i] == suite_block(i)
    tier.close()


def test_evictions_that_a_put_causes_are_told() -> None:
    told: list[bytes] = []
    medium = MemoryMedium()
    tier = open_tier(MemoryAdapter(medium, capacity_bytes=4 * frame_bytes(BLOCK_BYTES)))
    tier.tell_evictions(told.extend)
    tier.put([suite_payload(i) for i in range(6)])
    assert told == [suite_key(0), suite_key(1)]
    assert [tier.contains(suite_key(i)) for i in range(6)] == [False] * 2 + [True] * 4
    tier.close()


def test_more_blocks_than_the_index_may_know_are_found_by_probes() -> None:
    medium = MemoryMedium()
    stored(medium, range(50))
    tier = open_tier(MemoryAdapter(medium), limits=LearnLimits(most_blocks=20, probe_s=WAIT_S))
    assert tier.wait_listed(WAIT_S)
    assert tier.stats().known_blocks <= 20
    keys = [suite_key(i) for i in range(15)]
    assert tier.contains_run(keys) == 15
    assert tier.stats().known_blocks <= 20
    assert [read_block(tier, i) for i in range(50)] == [suite_block(i) for i in range(50)]
    tier.close()


def test_wrong_fingerprint_or_no_connection_is_refused() -> None:
    with pytest.raises(ConfigError):
        RemoteTier(MemoryAdapter(), keyspace=b"short")
    with pytest.raises(ConfigError):
        RemoteTier(MemoryAdapter(), keyspace=KEYSPACE, connections=0)


def test_answer_that_is_older_than_what_was_learned_since_changes_nothing() -> None:
    knowledge = Knowledge(most_blocks=10, absent_s=100.0, clock=lambda: 0.0)
    mark = knowledge.mark()  # a probe is asked, and answered "absent"
    knowledge.add({b"a": 0})  # meanwhile this host stored it
    knowledge.drop([b"a"], since=mark)
    assert knowledge.is_present(b"a")
    mark = knowledge.mark()  # a listing page names b
    knowledge.drop([b"b"])  # meanwhile b was removed
    knowledge.add({b"b": 0}, since=mark)
    assert not knowledge.is_present(b"b")
    mark = knowledge.mark()
    knowledge.add({b"c": 0})  # stored while a listing was under way that does not name it
    assert knowledge.end_listing(mark) == 1  # a
    assert knowledge.is_present(b"c")
