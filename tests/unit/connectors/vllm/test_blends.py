"""Blends on the scheduler's side: what is found, promised, ordered, and never saved."""

from __future__ import annotations

import random

import pytest
from vllm_fakes import BLOCK, SLOT_BYTES, FakeRequest, Side, learn_prefill

from kvist.connectors.vllm.blend_plan import BlendLimits
from kvist.connectors.vllm.blends import BlendKnobs
from kvist.connectors.vllm.messages import BlendJob, BlendNote, StepReport
from kvist.core.events import Cleared, Removed
from kvist.core.outcome import Tier

PASSAGE = 20 * BLOCK
KNOBS = BlendKnobs(0.5, BlendLimits(min_tokens=8, max_tokens=10_000), deadline_s=1.0)
GOOD = BlendNote(blended=True, repaired_tokens=12, deviation_ratio=0.1, seconds=0.5)


def text(name: str, tokens: int = PASSAGE) -> list[int]:
    chosen = random.Random(name)
    return [chosen.randrange(1000) for _ in range(tokens)]


def ask(name: str, tokens: list[int], **fields: object) -> FakeRequest:
    """A request as vLLM names its pages: by all the tokens before their end."""
    hashes = [repr(tokens[: i + BLOCK]).encode() for i in range(0, len(tokens) - BLOCK + 1, BLOCK)]
    return FakeRequest(name, list(tokens), len(tokens), block_hashes=hashes, **fields)  # type: ignore[arg-type]


def pages(tokens: list[int]) -> list[int]:
    return list(range(100, 100 + -(-len(tokens) // BLOCK)))


def serve(side: Side, name: str, tokens: list[int]) -> FakeRequest:
    """A request is computed to its end and all its blocks are saved."""
    req = ask(name, tokens)
    side.save_all(req, pages(tokens))
    return req


@pytest.fixture
def side() -> Side:
    """The worker can blend; passages a, b and c were each served alone."""
    side = Side(blend=KNOBS)
    side.side.heard(StepReport(can_blend=True), set())
    for name in "abc":
        serve(side, name, text(name))
    return side


def promised(side: Side, req: FakeRequest, computed: int = 0) -> tuple[int | None, bool]:
    side.side.arrive(req)
    return side.side.matched(req, computed)


def start(side: Side, req: FakeRequest, computed: int = 0) -> BlendJob:
    """Promised, given pages, ordered."""
    tokens, waits = promised(side, req, computed)
    assert tokens
    assert waits
    side.side.allocated(req, pages(req.tokens), computed, tokens)
    plan = side.idle()
    assert plan.loads == []
    (job,) = plan.blends
    return job


def end(side: Side, req: FakeRequest, job: BlendJob, note: BlendNote | None = GOOD) -> None:
    """The worker reports; without a note, that it failed."""
    blends = {job.job_id: note} if note is not None else {}
    failed = {job.job_id} if note is None else set()
    side.side.heard(StepReport({job.job_id: 1}, failed, blends=blends), {req.request_id})


def counted(side: Side, outcome: str) -> float:
    return side.side.tally.take().get(f"kvist_blend_requests_total.{outcome}", 0)


def saved_keys(side: Side) -> int:
    return len(side.store.blocks)


PERMUTED = text("c") + text("a") + text("b") + text("question", 10)


def test_permuted_passages_are_promised_up_to_the_last_page_of_the_last_span(side: Side) -> None:
    job = start(side, ask("new", PERMUTED))
    assert job.tokens == tuple(PERMUTED[: 3 * PASSAGE])
    assert job.exact_tokens == PASSAGE
    assert job.computed_tokens == 0
    prefix, *spans = job.runs
    assert (prefix.start, prefix.stop, prefix.source_start) == (0, PASSAGE, 0)
    assert [(s.start, s.stop) for s in spans] == [
        (PASSAGE, 2 * PASSAGE),
        (2 * PASSAGE, 3 * PASSAGE),
    ]
    assert [s.source_start for s in spans] == [0, 0]
    assert len(job.pages) == 3 * PASSAGE // BLOCK
    assert (job.ratio, job.most_deviation_ratio) == (0.15, 0.5)


def test_rows_are_those_of_the_blocks_that_hold_them(side: Side) -> None:
    """Behind a few new tokens a passage stands at no block's edge, here nor there."""
    serve(side, "shifted", text("lead", 6) + text("d"))
    prompt = text("other", 9) + text("d") + text("question", 10)
    job = start(side, ask("new", prompt))
    (run,) = job.runs
    stored = (6 + PASSAGE) // BLOCK * BLOCK - 6  # of the passage, in whole blocks
    assert (run.start, run.source_start, run.first_row) == (9, 6, 6 % BLOCK)
    assert run.stop == (9 + stored) // BLOCK * BLOCK
    first = run.slots[0]
    assert [slot - first for slot in run.slots] == [i * SLOT_BYTES for i in range(len(run.slots))]


def test_engines_own_pages_are_not_asked_for_again(side: Side) -> None:
    job = start(side, ask("new", PERMUTED), computed=PASSAGE)
    assert (job.computed_tokens, job.exact_tokens) == (PASSAGE, PASSAGE)
    assert [run.start for run in job.runs] == [PASSAGE, 2 * PASSAGE]
    assert job.lost() == job.pages[PASSAGE // BLOCK :]


def test_nothing_is_blended_before_the_worker_has_said_that_it_can() -> None:
    side = Side(blend=KNOBS)
    for name in "abc":
        serve(side, name, text(name))
    assert promised(side, ask("new", PERMUTED)) == (PASSAGE, True)  # the ordinary prefix
    assert side.side._blends is not None
    assert side.side._blends.busy() is False


def test_new_text_is_left_to_an_ordinary_load(side: Side) -> None:
    prompt = text("c") + text("new", 50)
    assert promised(side, ask("new", prompt)) == (PASSAGE, True)
    assert side.idle().blends == []


def test_too_few_reusable_tokens_are_not_worth_it(side: Side) -> None:
    few = BlendKnobs(0.5, BlendLimits(3 * PASSAGE, 10_000), deadline_s=1.0)
    other = Side(blend=few)
    other.side.heard(StepReport(can_blend=True), set())
    for name in "abc":
        serve(other, name, text(name))
    assert promised(other, ask("new", PERMUTED)) == (PASSAGE, True)
    assert other.idle().blends == []


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


def test_a_load_that_takes_longer_than_computing_is_cut_off(side: Side) -> None:
    """What has arrived by then is used."""
    learn_prefill(side)
    side.store.slow = True
    req = ask("new", PERMUTED)
    assert promised(side, req) == (None, False)
    for lease in side.store.reads[:-1]:
        lease.arrived = 1000
    side.now_s = 0.01
    assert side.side.matched(req, 0) == (None, False)
    side.now_s = 10.0
    assert side.side.matched(req, 0) == (2 * PASSAGE, True)


def test_blends_that_are_slower_than_computing_are_left_and_tried_again_later(side: Side) -> None:
    learn_prefill(side)
    slow = BlendNote(blended=True, repaired_tokens=12, deviation_ratio=0.1, seconds=60.0)
    asked, order = 0, text("b") + text("a") + text("c")

    def declines() -> bool:
        nonlocal asked
        asked += 1
        req = ask(f"r{asked}", order + text("q", 9))
        tokens, _ = promised(side, req)
        if tokens == PASSAGE:  # what a prefix gives
            side.side.finish(req, pages(req.tokens))
            return True
        side.side.allocated(req, pages(req.tokens), 0, tokens or 0)
        (job,) = side.idle().blends
        end(side, req, job, slow)
        side.side.finish(req, pages(req.tokens))
        return False

    while not declines():
        assert asked < 20
    assert counted(side, "recompute_faster") == 1
    while declines():
        assert asked < 500


def test_a_good_blend_is_counted_and_lets_go_of_its_blocks(side: Side) -> None:
    req = ask("new", PERMUTED)
    job = start(side, req)
    assert side.store.open_leases > 0
    end(side, req, job)
    assert side.store.open_leases == 0
    found = side.side.tally.take()
    assert found["kvist_blend_requests_total.blended"] == 1
    assert found["kvist_blended_tokens_total"] == 2 * PASSAGE
    assert found["kvist_repaired_tokens_total"] == 12


def test_nothing_is_promised_before_all_blocks_are_in_dram(side: Side) -> None:
    side.store.slow = True
    req = ask("new", PERMUTED)
    assert promised(side, req) == (None, False)
    assert side.idle().idle
    assert side.store.waited
    for lease in side.store.reads:
        lease.arrived = 1000
    assert side.side.matched(req, 0) == (3 * PASSAGE, True)


def test_blocks_lost_between_match_and_load_shrink_the_blend(side: Side) -> None:
    """Each lease reads its first five blocks only: their text is used, the rest is computed."""
    side.store.lost = 5
    job = start(side, ask("new", PERMUTED))
    assert job.exact_tokens == 5 * BLOCK
    assert [run.stop - run.start for run in job.runs] == [5 * BLOCK] * 3
    assert len(job.tokens) == 2 * PASSAGE + 5 * BLOCK


def test_all_blocks_lost_is_an_ordinary_prompt(side: Side) -> None:
    side.store.lost = 0
    assert promised(side, ask("new", PERMUTED)) == (0, False)
    assert counted(side, "unread") == 1
    assert side.store.open_leases == 0


def test_spans_whose_blocks_were_evicted_are_not_found(side: Side) -> None:
    """DRAM dropped passage b; on the disk it would still be there."""
    gone = [key for key, slot in side.store._slots.items() if slot // SLOT_BYTES >= 20]
    gone = gone[:20]
    for key in gone:
        del side.store.blocks[key]
    side.departures.store_event(Removed(tuple(gone), Tier.DRAM))
    job = start(side, ask("new", PERMUTED))
    assert [(run.start, run.stop) for run in job.runs] == [(0, PASSAGE), (PASSAGE, 2 * PASSAGE)]
    assert side.index.stats().blocks == 40


def test_blocks_that_left_dram_for_the_disk_are_still_found(side: Side) -> None:
    keys = tuple(side.store.blocks)
    for key in keys:
        side.store.blocks[key] = Tier.SSD
    side.departures.store_event(Removed(keys, Tier.DRAM))
    assert len(start(side, ask("new", PERMUTED)).runs) == 3
    assert side.index.stats().blocks == 60


def test_a_cleared_store_is_a_cleared_index(side: Side) -> None:
    side.store.blocks.clear()
    side.departures.store_event(Cleared())
    assert promised(side, ask("new", PERMUTED)) == (0, False)
    assert side.index.stats().blocks == 0


def test_another_salt_finds_nothing(side: Side) -> None:
    assert promised(side, ask("new", PERMUTED, cache_salt="mallory")) == (0, False)


def test_images_are_neither_found_nor_registered(side: Side) -> None:
    class Feature:
        identifier = "cat"

        class mm_position:
            offset, length = 2 * PASSAGE, 5

    before = side.index.stats().blocks
    req = ask("new", PERMUTED, mm_features=(Feature(),))
    assert promised(side, req) == (PASSAGE, True)
    side.run(req, len(PERMUTED), pages(PERMUTED))
    assert side.index.stats().blocks == before


def test_an_aborted_request_lets_go_once_the_worker_has_reported(side: Side) -> None:
    req = ask("new", PERMUTED)
    job = start(side, req)
    assert side.side.finish(req, pages(PERMUTED)) is False
    assert side.side.busy()
    end(side, req, job)
    assert side.store.open_leases == 0
    assert not side.side.busy()


def test_a_request_aborted_before_it_got_pages_lets_go_at_once(side: Side) -> None:
    req = ask("new", PERMUTED)
    promised(side, req)
    side.side.finish(req, [])
    assert side.store.open_leases == 0
    assert not side.side.busy()


def test_pages_for_another_promise_are_refused_and_reported(side: Side) -> None:
    """The connector then has the worker report them, or the request would wait for ever."""
    req = ask("new", PERMUTED)
    tokens, _ = promised(side, req)
    assert tokens
    with pytest.raises(Exception, match="another region"):
        side.side.allocated(req, pages(PERMUTED), 0, tokens - BLOCK)
    side.side.refuse(req, pages(PERMUTED), 0, tokens - BLOCK)
    plan = side.idle()
    assert plan.blends == []
    assert plan.loads[0].lost == tuple(pages(PERMUTED)[: (tokens - BLOCK) // BLOCK])
    assert side.store.open_leases == 0


def test_an_index_that_fails_leaves_the_ordinary_load(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> list[object]:
        raise OverflowError("a token is no u32")

    monkeypatch.setattr(side.index, "find", broken)
    assert promised(side, ask("new", PERMUTED)) == (PASSAGE, True)
    assert side.side.fallback.take() == {"OverflowError": 1}


def test_full_dram_means_no_blend(side: Side) -> None:
    side.store.full = True
    assert promised(side, ask("new", PERMUTED)) == (0, False)
    assert side.store.open_leases == 0


def test_at_least_one_token_is_left_to_the_engine(side: Side) -> None:
    prompt = text("c") + text("a")
    job = start(side, ask("new", prompt))
    assert len(job.tokens) == 2 * PASSAGE - BLOCK
