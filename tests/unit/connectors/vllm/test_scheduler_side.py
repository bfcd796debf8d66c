"""The scheduler side as a whole: nothing that fails in one part stops another."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm_fakes import BLOCK, TABLE, Side, promise, request, scheduled, warm_side


@pytest.fixture
def warm() -> Side:
    """A side whose store holds blocks 0 to 2 of the tokens 0, 1, 2 …"""
    return warm_side()


def test_loads_go_out_though_planning_the_saves_fails(warm: Side) -> None:
    req = request("a", 3 * BLOCK)
    warm.side.arrive(req)
    tokens, _ = promise(warm, req)
    warm.side.allocated(req, TABLE, 0, tokens)
    other = request("b", BLOCK, first=500)
    warm.side.arrive(other)
    broken = scheduled(new=[(other, BLOCK, [20])])
    broken.kv_connector_block_state = SimpleNamespace()  # not what it was in vLLM 0.32
    plan = warm.side.plan_step(broken)
    assert [job.req_id for job in plan.loads] == ["a"]
    assert warm.side.fallback.take() == {"AttributeError": 1}


def test_report_of_an_unknown_job_is_ignored() -> None:
    side = Side()
    side.done(77, failed=[77])
    assert not side.side.busy()


def test_events_of_saved_blocks_carry_their_tokens_and_parent(warm: Side) -> None:
    (event,) = warm.feed.take()
    assert event.token_ids == list(range(3 * BLOCK))
    assert event.block_hashes == list(warm.store.blocks)
    assert event.parent_block_hash is None
    assert event.medium == "CPU"
