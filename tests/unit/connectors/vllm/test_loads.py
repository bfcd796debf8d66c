"""Loads and aborts: what the scheduler side promises, hands over and lets go."""

from __future__ import annotations

import pytest
from vllm_fakes import (
    ARENA,
    BLOCK,
    SLOT_BYTES,
    TABLE,
    Side,
    end_load,
    load,
    promise,
    request,
    warm_side,
)

from kvist.connectors.plan import SKIP_PAGE
from kvist.core.errors import LeaseError
from kvist.core.outcome import Tier


@pytest.fixture
def warm() -> Side:
    """A side whose store holds blocks 0 to 2 of the tokens 0, 1, 2 …"""
    return warm_side()


def test_nothing_stored_means_no_promise_and_no_lease() -> None:
    side = Side()
    req = request("a", 12)
    side.side.arrive(req)
    assert promise(side, req) == (0, False)
    assert side.store.reads == []


def test_promise_is_for_whole_blocks_that_are_in_dram(warm: Side) -> None:
    req = request("a", 3 * BLOCK + 2)
    plan = load(warm, req)
    (job,) = plan.loads
    assert job.req_id == "a"
    assert job.slots == (0, SLOT_BYTES, 2 * SLOT_BYTES)
    assert job.pages == ((10,), (11,), (12,))
    assert plan.arena == ARENA
    assert warm.store.open_leases == 1
    end_load(warm, req, job.job_id)
    assert warm.store.open_leases == 0


def test_prompt_of_whole_blocks_may_be_loaded_whole(warm: Side) -> None:
    req = request("a", 3 * BLOCK)
    warm.side.arrive(req)
    assert promise(warm, req) == (3 * BLOCK, True)


def test_nothing_is_promised_before_all_of_it_is_in_dram(warm: Side) -> None:
    """What is promised cannot fail any more: a slow disk costs time, a broken one a recompute."""
    warm.store.slow = True
    req = request("a", 3 * BLOCK)
    warm.side.arrive(req)
    assert promise(warm, req) == (None, False)
    (lease,) = warm.store.reads
    lease.arrived = 2
    assert promise(warm, req) == (None, False)
    lease.arrived = 3
    assert promise(warm, req) == (3 * BLOCK, True)
    assert len(warm.store.reads) == 1


def test_idle_step_waits_a_moment_for_the_last_block_and_a_busy_one_does_not(warm: Side) -> None:
    warm.store.slow = True
    req = request("a", 3 * BLOCK)
    warm.side.arrive(req)
    promise(warm, req)
    warm.idle()
    ((block, limit_s),) = warm.store.waited
    assert block == 2
    assert limit_s is not None
    assert 0 < limit_s < 0.1
    other = request("b", BLOCK, first=500)
    warm.side.arrive(other)
    warm.run(other, 1, [20])
    assert len(warm.store.waited) == 1


def test_block_that_does_not_arrive_ends_the_promise_before_it(warm: Side) -> None:
    warm.store.lost = 1
    req = request("a", 3 * BLOCK)
    (job,) = load(warm, req).loads
    assert job.pages == ((10,),)
    end_load(warm, req, job.job_id)
    tally = warm.side.tally.take()
    assert tally["kvist_misses_total.unread"] == 2
    assert tally["kvist_tokens_loaded_total.dram"] == BLOCK
    assert warm.store.open_leases == 0


def test_load_of_which_nothing_arrives_is_recomputed_and_not_tried_again(warm: Side) -> None:
    """Else a request that finds no pages would wait for the same dead disk at every attempt."""
    warm.store.lost = 0
    req = request("a", 3 * BLOCK)
    warm.side.arrive(req)
    assert promise(warm, req) == (0, False)
    assert promise(warm, req) == (0, False)
    assert len(warm.store.reads) == 1
    assert warm.store.open_leases == 0
    warm.run(req, 1, TABLE)  # it runs; when it is preempted it may load again
    warm.store.lost = -1
    assert promise(warm, req) == (3 * BLOCK, True)


def test_asking_again_takes_no_second_lease(warm: Side) -> None:
    """The engine asks at every attempt to schedule, for instance while it has no free page."""
    req = request("a", 3 * BLOCK)
    warm.side.arrive(req)
    for _ in range(3):
        assert promise(warm, req) == (3 * BLOCK, True)
    assert len(warm.store.reads) == 1
    assert warm.idle().loads == []  # nothing is copied before pages were given


def test_load_whose_lease_breaks_is_refused_with_every_page(
    warm: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    req = request("a", 3 * BLOCK)
    warm.side.arrive(req)
    tokens, _ = promise(warm, req)
    assert tokens

    def broken(_i: int) -> int:
        raise LeaseError("a bug of ours")

    monkeypatch.setattr(warm.store.reads[0], "slot", broken)
    with pytest.raises(LeaseError):
        warm.side.allocated(req, TABLE, 0, tokens)
    warm.side.refuse(req, TABLE, 0, tokens)
    (job,) = warm.idle().loads
    assert (job.slots, job.lost) == ((), (10, 11, 12))
    assert warm.store.open_leases == 0
    end_load(warm, req, job.job_id)
    assert not warm.side.busy()


def test_tokens_the_engine_has_are_not_promised_again(warm: Side) -> None:
    req = request("a", 3 * BLOCK)
    warm.side.arrive(req)
    assert promise(warm, req, computed=2 * BLOCK) == (BLOCK, True)
    warm.side.allocated(req, TABLE, 2 * BLOCK, BLOCK)
    (job,) = warm.idle().loads
    assert job.pages == ((12,),)
    assert job.slots == (2 * SLOT_BYTES,)


def test_page_that_the_engine_has_is_skipped_in_a_larger_block() -> None:
    side = Side(page_tokens=BLOCK, block_tokens=2 * BLOCK)
    side.save_all(request("writer", 4 * BLOCK), TABLE)
    req = request("a", 4 * BLOCK)
    side.side.arrive(req)
    assert promise(side, req, computed=BLOCK) == (3 * BLOCK, True)
    side.side.allocated(req, TABLE, BLOCK, 3 * BLOCK)
    (job,) = side.idle().loads
    assert job.pages == ((SKIP_PAGE, 11), (12, 13))


def test_lease_that_does_not_cover_what_the_engine_lost_is_replaced(warm: Side) -> None:
    """Between two askings the engine's own blocks were evicted."""
    req = request("a", 3 * BLOCK)
    warm.side.arrive(req)
    assert promise(warm, req, computed=2 * BLOCK) == (BLOCK, True)
    assert promise(warm, req, computed=0) == (3 * BLOCK, True)
    assert warm.store.reads[0].released
    assert warm.store.open_leases == 1


def test_short_match_is_recomputed_when_the_user_says_so() -> None:
    side = Side(min_load_tokens=2 * BLOCK)
    side.save_all(request("writer", BLOCK), TABLE)
    req = request("a", 3 * BLOCK)
    side.side.arrive(req)
    assert promise(side, req) == (0, False)
    assert side.store.open_leases == 0


def test_promise_that_the_engine_outgrew_is_withdrawn(warm: Side) -> None:
    req = request("a", 3 * BLOCK)
    warm.side.arrive(req)
    assert promise(warm, req) == (3 * BLOCK, True)
    assert promise(warm, req, computed=3 * BLOCK) == (0, False)
    assert warm.store.open_leases == 0


def test_no_room_in_dram_is_a_miss_that_is_counted(warm: Side) -> None:
    warm.store.full = True
    req = request("a", 3 * BLOCK)
    warm.side.arrive(req)
    assert promise(warm, req) == (0, False)
    assert warm.side.tally.take()["kvist_no_space_total"] >= 1
    assert warm.store.open_leases == 0


def test_load_is_no_longer_than_dram_has_room_for(warm: Side) -> None:
    for key in warm.store.blocks:
        warm.store.blocks[key] = Tier.SSD
    warm.store.room = 2
    req = request("a", 3 * BLOCK)
    warm.side.arrive(req)
    assert promise(warm, req) == (2 * BLOCK, True)


@pytest.mark.parametrize("knob", ["load", "skip", "unknown"])
def test_request_that_must_not_load_is_left_alone(knob: str) -> None:
    side = Side(load=knob != "load")
    side.save_all(request("writer", 2 * BLOCK), TABLE)
    req = request("a", 2 * BLOCK, skip_reading_prefix_cache=knob == "skip")
    if knob != "unknown":
        side.side.arrive(req)
    assert promise(side, req) == (0, False)


def test_another_salt_is_another_chain(warm: Side) -> None:
    for name, salt, want in (("a", "x", 0), ("b", None, 3 * BLOCK)):
        req = request(name, 3 * BLOCK, cache_salt=salt)
        warm.side.arrive(req)
        assert promise(warm, req)[0] == want


def test_embeddings_without_tokens_are_never_named(warm: Side) -> None:
    req = request("a", 3 * BLOCK, prompt_embeds=object())
    warm.side.arrive(req)
    assert promise(warm, req) == (0, False)
    assert warm.run(req, 3 * BLOCK, TABLE).saves == []


def test_promise_that_cannot_be_kept_is_refused_page_by_page(warm: Side) -> None:
    """Without a report vLLM would wait for ever: the workers name the pages as not loaded."""
    req = request("a", 3 * BLOCK)
    warm.side.arrive(req)
    with pytest.raises(LeaseError):
        warm.side.allocated(req, TABLE, BLOCK, 2 * BLOCK)
    warm.side.refuse(req, TABLE, BLOCK, 2 * BLOCK)
    (job,) = warm.idle().loads
    assert (job.slots, job.pages, job.lost) == ((), (), (11, 12))


def test_tokens_are_counted_by_the_tier_they_came_from(warm: Side) -> None:
    key = list(warm.store.blocks)[1]
    warm.store.blocks[key] = Tier.SSD
    req = request("a", 3 * BLOCK)
    (job,) = load(warm, req).loads
    assert warm.side.sources(req) == {Tier.DRAM: 2 * BLOCK, Tier.SSD: BLOCK}
    end_load(warm, req, job.job_id)
    tally = warm.side.tally.take()
    assert tally["kvist_tokens_loaded_total.dram"] == 2 * BLOCK
    assert tally["kvist_tokens_loaded_total.ssd"] == BLOCK


def test_abort_before_pages_were_given_lets_the_lease_go(warm: Side) -> None:
    req = request("a", 3 * BLOCK)
    warm.side.arrive(req)
    promise(warm, req)
    assert warm.side.finish(req, []) is False
    assert warm.store.open_leases == 0


def test_abort_while_pages_are_copied_keeps_the_lease_until_the_workers_report(
    warm: Side,
) -> None:
    req = request("a", 3 * BLOCK)
    (job,) = load(warm, req).loads
    assert warm.side.finish(req, TABLE) is False  # vLLM itself keeps the pages of such a load
    assert warm.store.open_leases == 1
    assert warm.side.busy()
    end_load(warm, req, job.job_id)
    assert warm.store.open_leases == 0
    assert not warm.side.busy()


def test_load_is_over_when_every_rank_has_copied() -> None:
    side = Side(ranks=2)
    writer = request("writer", BLOCK)
    side.side.arrive(writer)
    plan = side.run(writer, BLOCK, TABLE)
    side.done(*[job.job_id for job in plan.saves], ranks=2)
    side.side.finish(writer, TABLE)
    req = request("a", BLOCK)
    (job,) = load(side, req).loads
    side.done(job.job_id)
    assert side.store.open_leases == 1
    side.done(job.job_id)
    assert side.store.open_leases == 0


def test_load_that_a_worker_could_not_copy_is_not_counted_as_loaded(warm: Side) -> None:
    req = request("a", 3 * BLOCK)
    (job,) = load(warm, req).loads
    warm.done(job.job_id, failed=[job.job_id])
    tally = warm.side.tally.take()
    assert tally["kvist_misses_total.copy"] == 3
    assert "kvist_tokens_loaded_total.dram" not in tally


def test_abort_while_blocks_are_on_their_way_lets_them_go_at_once(warm: Side) -> None:
    warm.store.slow = True
    req = request("a", 3 * BLOCK)
    warm.side.arrive(req)
    assert promise(warm, req) == (None, False)
    assert warm.side.finish(req, []) is False
    assert warm.store.open_leases == 0
    assert not warm.side.busy()


def test_abort_of_a_request_that_never_came_is_harmless() -> None:
    assert Side().side.finish(request("ghost", 5), TABLE) is False
