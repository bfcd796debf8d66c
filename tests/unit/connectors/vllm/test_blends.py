"""Blends on the scheduler's side: what is found, promised, ordered and let go."""

from __future__ import annotations

import pytest
from blend_fakes import (
    KNOBS,
    PASSAGE,
    PERMUTED,
    ask,
    blending_side,
    counted,
    end,
    pages,
    promised,
    serve,
    start,
    text,
)
from vllm_fakes import BLOCK, SLOT_BYTES, Side, learn_prefill

from kvist.connectors.vllm.blend_plan import BlendLimits
from kvist.connectors.vllm.blends import BlendKnobs
from kvist.connectors.vllm.messages import BlendNote, StepReport
from kvist.core.events import Cleared, Removed
from kvist.core.outcome import Tier


@pytest.fixture
def side() -> Side:
    return blending_side()


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


def test_a_load_from_before_the_worker_could_blend_is_let_go() -> None:
    side = Side(blend=KNOBS)
    for name in "abc":
        serve(side, name, text(name))
    req = ask("new", PERMUTED)
    side.store.slow = True
    assert promised(side, req) == (None, False)
    side.store.slow = False
    side.side.heard(StepReport(can_blend=True), set())
    tokens, _ = side.side.matched(req, 0)
    assert tokens == 3 * PASSAGE
    side.side.allocated(req, pages(PERMUTED), 0, tokens)
    (job,) = side.idle().blends
    side.side.finish(req, pages(PERMUTED))
    end(side, req, job)
    assert side.store.open_leases == 0


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


def test_blends_that_are_slower_than_computing_are_left_and_not_for_ever(side: Side) -> None:
    learn_prefill(side)
    slow = BlendNote(blended=True, repaired_tokens=12, deviation_ratio=0.1, seconds=60.0)
    for i in range(20):
        prompt = text("c") + text("a") + text("b") + text(f"question {i}", 10)
        req = ask(f"slow-{i}", prompt)
        tokens, _ = promised(side, req)
        assert tokens
        side.side.allocated(req, pages(prompt), 0, tokens)
        plan = side.idle()
        if not plan.blends:
            break
        end(side, req, plan.blends[0], slow)
    assert 0 < i < 19
    assert counted(side, "recompute_faster") == 1
    assert tokens == PASSAGE  # the ordinary prefix
    for j in range(300):
        if promised(side, ask(f"later-{j}", PERMUTED))[0] != PASSAGE:
            return
    raise AssertionError("a stall has ended blending for good")


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


def test_an_order_that_fails_half_way_is_taken_back(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker must not fill pages that it is told to report as lost."""

    def broken(page_hash: bytes) -> None:
        raise MemoryError(page_hash)

    req = ask("new", PERMUTED)
    tokens, _ = promised(side, req)
    assert tokens
    monkeypatch.setattr(side.taint, "add", broken)
    with pytest.raises(MemoryError):
        side.side.allocated(req, pages(PERMUTED), 0, tokens)
    side.side.refuse(req, pages(PERMUTED), 0, tokens)
    monkeypatch.undo()
    plan = side.idle()
    assert plan.blends == []
    assert plan.loads[0].lost == tuple(pages(PERMUTED)[: tokens // BLOCK])
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


def test_a_long_prompt_is_blended_up_to_a_limit() -> None:
    few = BlendKnobs(0.5, BlendLimits(8, 2 * PASSAGE + 5), deadline_s=1.0)
    other = Side(blend=few)
    other.side.heard(StepReport(can_blend=True), set())
    for name in "abc":
        serve(other, name, text(name))
    assert len(start(other, ask("new", PERMUTED)).tokens) == 2 * PASSAGE + BLOCK


def test_at_least_one_token_is_left_to_the_engine(side: Side) -> None:
    prompt = text("c") + text("a")
    job = start(side, ask("new", prompt))
    assert len(job.tokens) == 2 * PASSAGE - BLOCK
