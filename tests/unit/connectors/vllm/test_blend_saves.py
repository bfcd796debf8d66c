"""Blended KV, and what is computed on top of it, is never saved; what was computed whole is."""

from __future__ import annotations

import pytest
from blend_fakes import (
    PASSAGE,
    PERMUTED,
    ask,
    blending_side,
    counted,
    end,
    pages,
    promised,
    saved_keys,
    start,
    text,
)
from vllm_fakes import BLOCK, Side

from kvist.connectors.vllm.messages import BlendNote, StepReport


@pytest.fixture
def side() -> Side:
    return blending_side()


def test_blended_blocks_and_what_follows_them_are_never_saved(side: Side) -> None:
    req = ask("new", PERMUTED)
    before = saved_keys(side)
    job = start(side, req)
    end(side, req, job)
    req.num_computed_tokens = len(job.tokens)
    plan = side.run(req, len(PERMUTED) - len(job.tokens), pages(PERMUTED))
    assert plan.saves == []  # its prefix was there before
    req.tokens += text("answer", 40)
    assert side.run(req, 40, pages(req.tokens)).saves == []
    assert side.side.finish(req, pages(req.tokens)) is False
    assert saved_keys(side) == before


def test_a_request_that_hits_blended_pages_of_the_engine_saves_nothing_on_top(side: Side) -> None:
    """vLLM keeps blended pages for whoever begins with the same tokens."""
    first = ask("new", PERMUTED)
    end(side, first, start(side, first))
    follower = ask("next", PERMUTED[: 3 * PASSAGE] + text("follow", 40))
    promised(side, follower, computed=2 * PASSAGE)
    follower.num_computed_tokens = 2 * PASSAGE
    rest = len(follower.tokens) - 2 * PASSAGE
    assert side.run(follower, rest, pages(follower.tokens)).saves == []


def test_a_request_that_hits_only_pages_before_the_blended_ones_is_saved_whole(side: Side) -> None:
    first = ask("new", PERMUTED)
    end(side, first, start(side, first))
    follower = ask("next", text("c") + text("else", 40))
    promised(side, follower, computed=PASSAGE)
    follower.num_computed_tokens = PASSAGE
    (save,) = side.run(follower, 40, pages(follower.tokens)).saves
    assert len(save.slots) == 40 // BLOCK


def test_a_preempted_blend_that_is_computed_whole_is_saved(side: Side) -> None:
    req = ask("new", PERMUTED)
    end(side, req, start(side, req))
    req.num_preemptions = 1
    side.store.full = True  # no lease: this time it is computed
    assert side.side.matched(req, 0) == (0, False)
    side.store.full = False
    plan = side.run(req, len(PERMUTED), pages(PERMUTED))
    (save,) = plan.saves
    assert len(save.slots) == 2 * PASSAGE // BLOCK + 10 // BLOCK


def test_what_the_worker_failed_at_is_computed_and_saved(side: Side) -> None:
    req = ask("new", PERMUTED)
    end(side, req, start(side, req), None)
    assert counted(side, "failed") == 1
    assert side.store.open_leases == 0
    assert side.side.matched(req, 0) == (PASSAGE, True)  # not once more; the prefix is still there
    side.side.allocated(req, pages(PERMUTED), 0, PASSAGE)
    (load,) = side.idle().loads
    side.side.heard(StepReport({load.job_id: 1}), {"new"})
    req.num_computed_tokens = PASSAGE
    (save,) = side.run(req, len(PERMUTED) - PASSAGE, pages(PERMUTED)).saves
    assert len(save.slots) == 2 * PASSAGE // BLOCK + 10 // BLOCK


def test_what_deviates_was_computed_whole_by_the_worker_and_is_saved(side: Side) -> None:
    req = ask("new", PERMUTED)
    job = start(side, req)
    note = BlendNote(blended=False, repaired_tokens=9, deviation_ratio=2.0, seconds=1.0)
    end(side, req, job, note)
    assert counted(side, "deviates") == 1
    req.num_computed_tokens = len(job.tokens)
    (save,) = side.run(req, 10, pages(PERMUTED)).saves
    assert len(save.slots) == 2 * PASSAGE // BLOCK + 10 // BLOCK


def test_an_engine_that_names_parts_of_pages_is_not_blended_for(side: Side) -> None:
    """Which page of it is blended could not be told from its hashes."""
    req = ask("new", PERMUTED)
    req.block_hashes = [bytes([i % 251]) for i in range(2 * len(req.block_hashes))]
    assert promised(side, req) == (PASSAGE, True)
    assert side.idle().blends == []


def test_an_engine_without_a_cache_of_its_own_is_blended_for(side: Side) -> None:
    req = ask("new", PERMUTED)
    req.block_hashes = []
    end(side, req, start(side, req))
    req.num_computed_tokens = 3 * PASSAGE
    assert side.run(req, 10, pages(PERMUTED)).saves == []


def test_blended_pages_of_a_running_request_are_not_forgotten_for_newer_ones(side: Side) -> None:
    """They are in use, so vLLM keeps them however many others come and go."""
    first = ask("new", PERMUTED)
    end(side, first, start(side, first))
    for i in range(99):
        side.taint.add(b"newer %d" % i)
    first.num_computed_tokens = 3 * PASSAGE
    side.run(first, 10, pages(PERMUTED))
    for i in range(99):
        side.taint.add(b"newest %d" % i)
    follower = ask("next", PERMUTED[: 3 * PASSAGE] + text("follow", 40))
    promised(side, follower, computed=3 * PASSAGE)
    follower.num_computed_tokens = 3 * PASSAGE
    assert side.run(follower, 40, pages(follower.tokens)).saves == []
