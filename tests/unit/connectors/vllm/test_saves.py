"""Saves and preemption: what the scheduler side orders, holds, fences and commits."""

from __future__ import annotations

import pytest
from vllm_fakes import BLOCK, TABLE, Side, promise, request, scheduled, warm_side

from kvist.connectors.vllm.messages import StepReport


@pytest.fixture
def warm() -> Side:
    """A side whose store holds blocks 0 to 2 of the tokens 0, 1, 2 …"""
    return warm_side()


def test_blocks_are_saved_as_steps_fill_them() -> None:
    side = Side()
    req = request("a", 3 * BLOCK + 1)
    side.side.arrive(req)
    assert side.run(req, BLOCK - 1, TABLE).saves == []
    (first,) = side.run(req, BLOCK + 1, TABLE).saves
    assert first.pages == ((10,), (11,))
    (second,) = side.run(req, BLOCK + 1, TABLE).saves
    assert second.pages == ((12,),)


def test_block_is_visible_only_when_every_rank_has_copied_it() -> None:
    side = Side(ranks=2)
    req = request("a", BLOCK)
    side.side.arrive(req)
    (job,) = side.run(req, BLOCK, TABLE).saves
    side.done(job.job_id)
    assert side.store.blocks == {}
    side.done(job.job_id)
    assert len(side.store.blocks) == 1
    assert side.store.open_leases == 0


def test_a_block_is_committed_with_the_checksum_that_its_copy_took() -> None:
    side = Side()
    req = request("a", 2 * BLOCK)
    side.side.arrive(req)
    (job,) = side.run(req, 2 * BLOCK, TABLE).saves
    report = StepReport({job.job_id: 1}, checksums={job.slots[0]: 77})
    side.side.heard(report, set())
    assert sorted(map(str, side.store.checksums.values())) == ["77", "None"]


def test_two_ranks_in_one_report_count_as_two() -> None:
    side = Side(ranks=2)
    req = request("a", BLOCK)
    side.side.arrive(req)
    (job,) = side.run(req, BLOCK, TABLE).saves
    one, two = StepReport({job.job_id: 1}), StepReport({job.job_id: 1})
    side.side.heard(one.aggregate(two), set())  # type: ignore[arg-type]
    assert len(side.store.blocks) == 1


def test_save_that_failed_on_one_rank_is_never_committed() -> None:
    side = Side(ranks=2)
    req = request("a", BLOCK)
    side.side.arrive(req)
    (job,) = side.run(req, BLOCK, TABLE).saves
    side.done(job.job_id, failed=[job.job_id])
    side.done(job.job_id)
    assert side.store.blocks == {}
    assert side.store.writes[0].committed == []
    assert side.store.open_leases == 0


def test_finished_request_keeps_its_pages_until_its_saves_are_done() -> None:
    side = Side()
    req = request("a", BLOCK)
    side.side.arrive(req)
    (job,) = side.run(req, BLOCK, TABLE).saves
    assert side.side.finish(req, TABLE) is True
    assert side.idle().release == []
    assert side.side.busy()
    side.done(job.job_id)
    assert side.idle().release == ["a"]
    assert not side.side.busy()


def test_finished_request_without_saves_keeps_nothing() -> None:
    side = Side()
    req = request("a", BLOCK - 1)
    side.side.arrive(req)
    side.run(req, BLOCK - 1, TABLE)
    assert side.side.finish(req, TABLE) is False


def test_last_block_is_saved_when_the_request_ends() -> None:
    """Its last token was sampled by the step that ended it; no later step would offer it."""
    side = Side()
    req = request("a", BLOCK - 1)
    side.side.arrive(req)
    side.run(req, BLOCK - 1, TABLE)
    req.tokens += [50, 51]
    req.num_computed_tokens = BLOCK
    assert side.side.finish(req, TABLE) is True
    (job,) = side.idle().saves
    assert job.pages == ((10,),)


def test_no_space_is_tried_again_in_the_next_step() -> None:
    side = Side()
    req = request("a", 2 * BLOCK + 1)
    side.side.arrive(req)
    side.store.full = True
    assert side.run(req, 2 * BLOCK, TABLE).saves == []
    assert side.side.tally.take()["kvist_no_space_total"] == 1
    side.store.full = False
    (job,) = side.run(req, 1, TABLE).saves
    assert job.pages == ((10,), (11,))


def test_a_save_for_which_there_is_no_room_is_counted_and_offered_again() -> None:
    side = Side()
    side.store.room = 0
    req = request("a", 2 * BLOCK)
    side.side.arrive(req)
    assert side.run(req, BLOCK, TABLE).saves == []
    assert side.side.tally.take()["kvist_no_space_total"] == 1
    side.store.room = 1 << 30
    (job,) = side.run(req, BLOCK, TABLE).saves
    assert len(job.pages) == 2
    assert "kvist_no_space_total" not in side.side.tally.take()


def test_save_takes_the_head_of_what_there_is_room_for() -> None:
    side = Side()
    side.store.room = 1
    req = request("a", 2 * BLOCK + 1)
    side.side.arrive(req)
    (first,) = side.run(req, 2 * BLOCK, TABLE).saves
    assert first.pages == ((10,),)
    (second,) = side.run(req, 1, TABLE).saves
    assert second.pages == ((11,),)


def test_blocks_that_are_there_are_not_copied_again(warm: Side) -> None:
    req = request("b", 4 * BLOCK)
    warm.side.arrive(req)
    (job,) = warm.run(req, 4 * BLOCK, TABLE).saves
    assert job.pages == ((13,),)


def test_generated_tokens_are_saved_unless_switched_off() -> None:
    for save_decode, want in ((True, 1), (False, 0)):
        side = Side(save_decode=save_decode)
        req = request("a", BLOCK - 1)
        side.side.arrive(req)
        side.run(req, BLOCK - 1, TABLE)
        req.tokens.append(99)
        plan = side.run(req, 1, TABLE)
        assert len(plan.saves) == want


def test_draft_tokens_are_not_saved_before_they_are_accepted() -> None:
    side = Side()
    req = request("a", BLOCK - 1)
    side.side.arrive(req)
    side.run(req, BLOCK - 1, TABLE)
    req.tokens.append(99)
    plan = side.side.plan_step(scheduled(cached=[(req, BLOCK + 1, TABLE)]))  # one and four drafts
    assert [job.pages for job in plan.saves] == [((10,),)]


def test_switched_off_saving_orders_nothing() -> None:
    side = Side(save=False)
    req = request("a", 2 * BLOCK)
    side.side.arrive(req)
    assert side.run(req, 2 * BLOCK, TABLE).saves == []
    assert side.side.finish(req, TABLE) is False


def test_preemption_during_a_save_fences_the_next_step() -> None:
    side = Side()
    req, other = request("a", BLOCK), request("b", BLOCK, first=100)
    for r in (req, other):
        side.side.arrive(r)
    (job,) = side.run(req, BLOCK, TABLE).saves
    assert side.run(other, 1, [20]).fence is False
    req.num_preemptions, req.num_computed_tokens = 1, 0
    assert side.idle().fence is True
    side.done(job.job_id)
    assert side.idle().fence is False


def test_preempted_request_asks_for_its_blocks_again() -> None:
    side = Side()
    req = request("a", 2 * BLOCK)
    side.side.arrive(req)
    assert promise(side, req) == (0, False)
    (job,) = side.run(req, 2 * BLOCK, TABLE).saves
    side.done(job.job_id)
    req.num_preemptions, req.num_computed_tokens = 1, 0
    assert promise(side, req) == (2 * BLOCK, True)


# -- where nothing is asked for again ----------------------------------------------------------


def _serve(side: Side, name: str, first: int, blocks: int = 8) -> int:
    """Serves a prompt of its own; how many of its blocks were ordered to be saved."""
    table = list(range(100, 100 + blocks))
    req = request(name, blocks * BLOCK, first=first)
    side.side.arrive(req)
    tokens, _ = promise(side, req)
    if tokens:
        side.side.allocated(req, table, 0, tokens)
        for job in side.idle().loads:
            side.side.heard(StepReport({job.job_id: 1}), {name})
        req.num_computed_tokens = tokens
    plan = side.run(req, len(req.tokens) - req.num_computed_tokens, table)
    side.done(*[job.job_id for job in plan.saves])
    side.side.finish(req, table)
    return sum(len(job.slots) for job in plan.saves)


def _costly() -> Side:
    """A side where a save costs 5 % of what its reuse spares."""
    side = Side(save_unseen=False)
    side.side._saves.save_ratio = lambda: 0.05
    side.store.room = 1 << 30
    return side


def test_traffic_that_repeats_nothing_is_no_longer_saved() -> None:
    side = _costly()
    saved = [_serve(side, f"r{i}", 1_000 * i) for i in range(400)]
    assert saved[:100] == [8] * 100  # an empty cache proves nothing
    assert not any(saved[-100:])
    assert side.side.tally.take()["kvist_saves_skipped_total"] > 0


def test_what_is_asked_for_a_second_time_is_saved_even_then() -> None:
    side = _costly()
    for i in range(400):
        _serve(side, f"r{i}", 1_000 * i)
    assert _serve(side, "again", 1_000 * 399) == 8


def test_saving_begins_again_when_prompts_repeat() -> None:
    side = _costly()
    for i in range(400):
        _serve(side, f"r{i}", 1_000 * i)
    for i in range(100):
        _serve(side, f"again{i}", 1_000 * (300 + i))
    assert _serve(side, "new", 10_000_000) == 8


def test_a_cheap_save_is_never_left_out() -> None:
    side = _costly()
    side.side._saves.save_ratio = lambda: 0.001
    assert all(_serve(side, f"r{i}", 1_000 * i) == 8 for i in range(400))
