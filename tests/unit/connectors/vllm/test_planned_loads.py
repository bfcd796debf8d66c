"""Loads that are planned: only what pays is started, and what falls behind is cut off."""

from __future__ import annotations

import pytest
from vllm_fakes import (
    BLOCK,
    TABLE,
    Side,
    end_load,
    learn_prefill,
    load,
    promise,
    request,
    slow_disk,
    warm_side,
)

from kvist.core.outcome import ReadTotals, Tier


@pytest.fixture
def warm() -> Side:
    """A side whose store holds blocks 0 to 2 of the tokens 0, 1, 2 …"""
    return warm_side()


@pytest.fixture
def on_disk(warm: Side) -> Side:
    """As `warm`, its blocks on disk, with prefill times learned: a block takes 4 ms."""
    warm.store.blocks = dict.fromkeys(warm.store.blocks, Tier.SSD)
    learn_prefill(warm)
    warm.side.tally.take()
    return warm


def test_before_anything_was_learned_whatever_matched_is_loaded(warm: Side) -> None:
    warm.store.blocks = dict.fromkeys(warm.store.blocks, Tier.SSD)
    slow_disk(warm, 1.0)
    req = request("a", 3 * BLOCK)
    warm.side.arrive(req)
    assert promise(warm, req) == (3 * BLOCK, True)
    assert warm.side.tally.take()["kvist_load_decisions_total.unmeasured"] == 1


def test_a_disk_that_is_faster_than_computing_is_read(on_disk: Side) -> None:
    slow_disk(on_disk, 1e-4)
    req = request("a", 3 * BLOCK)
    on_disk.side.arrive(req)
    assert promise(on_disk, req) == (3 * BLOCK, True)
    assert on_disk.side.tally.take()["kvist_load_decisions_total.load_all"] == 1


def test_a_disk_that_is_slower_than_computing_is_left_alone(on_disk: Side) -> None:
    slow_disk(on_disk, 1.0)
    req = request("a", 3 * BLOCK)
    on_disk.side.arrive(req)
    for _ in range(3):
        assert promise(on_disk, req) == (0, False)
    assert on_disk.store.reads == []
    assert on_disk.side.tally.take()["kvist_load_decisions_total.recompute_faster"] == 1


def test_a_disk_that_was_too_slow_is_probed_now_and_then_and_used_again(on_disk: Side) -> None:
    slow_disk(on_disk, 1.0)
    for i in range(5):
        req = request(f"a{i}", 3 * BLOCK)
        on_disk.side.arrive(req)
        assert promise(on_disk, req) == (0, False)
        on_disk.side.finish(req, TABLE)
    assert [len(wish) for wish in on_disk.store.wishes] == [2]
    size = on_disk.block_bytes
    for probes in range(1, 31):  # of some minutes
        now = ReadTotals((29 + 2 * probes) * size, 29.0 + 2 * probes * 1.1e-3)
        on_disk.side.appraiser.read({Tier.SSD: now})
        on_disk.store.totals = {Tier.SSD: now}
    req = request("b", 3 * BLOCK)
    on_disk.side.arrive(req)
    assert promise(on_disk, req) == (3 * BLOCK, True)


def test_blocks_in_dram_that_do_not_pay_are_probed_with_a_real_load(on_disk: Side) -> None:
    """The copy to the engine's pages once stalled; only a copy can show that it is fast again."""
    on_disk.store.blocks = dict.fromkeys(on_disk.store.blocks, Tier.DRAM)
    for _ in range(8):
        on_disk.side.appraiser.copied(on_disk.block_bytes, 5.0)
    gained = []
    for i in range(4):
        req = request(f"a{i}", 3 * BLOCK)
        on_disk.side.arrive(req)
        gained.append(promise(on_disk, req)[0])
        on_disk.side.finish(req, TABLE)
    assert gained == [2 * BLOCK, 0, 0, 0]  # the next one comes after some seconds
    assert on_disk.store.wishes == []
    assert on_disk.side.tally.take()["kvist_load_decisions_total.probe"] == 1
    assert on_disk.store.open_leases == 0


def test_blocks_in_dram_are_loaded_although_those_behind_them_on_disk_are_not(
    on_disk: Side,
) -> None:
    slow_disk(on_disk, 1.0)
    first = next(iter(on_disk.store.blocks))
    on_disk.store.blocks[first] = Tier.DRAM
    req = request("a", 3 * BLOCK)
    on_disk.side.arrive(req)
    assert promise(on_disk, req) == (BLOCK, True)
    assert on_disk.side.tally.take()["kvist_load_decisions_total.load_head"] == 1


def test_a_load_that_falls_behind_is_cut_off_and_what_arrived_is_used(on_disk: Side) -> None:
    clock = [100.0]
    on_disk.side._loads.clock = lambda: clock[0]
    on_disk.store.slow = True
    req = request("a", 3 * BLOCK)
    on_disk.side.arrive(req)
    assert promise(on_disk, req) == (None, False)
    (lease,) = on_disk.store.reads
    lease.arrived = 1
    clock[0] += 0.0015
    assert promise(on_disk, req) == (None, False)  # within what was predicted for it
    clock[0] += 0.5  # computing all of it would have taken 13 ms
    assert promise(on_disk, req) == (BLOCK, True)
    assert on_disk.side.tally.take()["kvist_loads_cut_off_total"] == 1
    on_disk.side.allocated(req, TABLE, 0, BLOCK)
    (job,) = on_disk.idle().loads
    assert job.pages == ((10,),)
    end_load(on_disk, req, job.job_id)
    assert on_disk.store.open_leases == 0


def test_a_load_of_which_nothing_arrived_at_its_cut_off_is_computed(on_disk: Side) -> None:
    clock = [100.0]
    on_disk.side._loads.clock = lambda: clock[0]
    on_disk.store.slow = True
    req = request("a", 3 * BLOCK)
    on_disk.side.arrive(req)
    assert promise(on_disk, req) == (None, False)
    on_disk.store.reads[0].arrived = 0
    clock[0] += 1.0
    assert promise(on_disk, req) == (0, False)
    assert on_disk.store.open_leases == 0


def test_what_a_load_costs_beside_its_copy_is_learned_when_the_engine_was_idle(warm: Side) -> None:
    clock = [100.0]
    warm.side._loads.clock = lambda: clock[0]
    overhead = warm.side.appraiser.overhead
    before = overhead.overhead_s(3)
    for i in range(2):
        req = request(f"a{i}", 3 * BLOCK)
        (job,) = load(warm, req).loads
        if i:
            other = request("b", BLOCK, first=700)
            warm.side.arrive(other)
            warm.run(other, 1, TABLE)
        clock[0] += 0.05
        end_load(warm, req, job.job_id)
        if not i:
            learned = overhead.overhead_s(3)
            assert learned > before
    assert overhead.overhead_s(3) == learned
