"""What the store learns of a vLLM request: its tenant, and how it ended."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm_fakes import BLOCK, TABLE, Side, load, request, warm_side

from kvist.connectors.vllm.sequences import hints_of, tenant_of
from kvist.core.hints import Finish, Hints

STOPPED = SimpleNamespace(name="FINISHED_STOPPED")
CAPPED = SimpleNamespace(name="FINISHED_LENGTH_CAPPED")


@pytest.mark.parametrize(
    ("fields", "tenant"),
    [
        ({}, ""),
        ({"cache_salt": "salt"}, "salt"),
        ({"cache_salt": "salt", "kv_transfer_params": {"kvist.tenant": "acme"}}, "acme"),
        ({"cache_salt": "salt", "kv_transfer_params": {"kvist.tenant": 7}}, "salt"),
        ({"cache_salt": "salt", "kv_transfer_params": {"kvist.tenant": ""}}, ""),
        ({"kv_transfer_params": {"other": 1}}, ""),
    ],
)
def test_a_tenant_is_named_by_the_client_or_else_the_salt(
    fields: dict[str, object], tenant: str
) -> None:
    assert tenant_of(request("a", 4, **fields)) == tenant


def test_a_long_tenant_name_is_bounded_and_still_its_own() -> None:
    names = [tenant_of(request("a", 4, cache_salt="x" * n)) for n in (64, 65, 10_000)]
    assert [len(name) for name in names] == [64, 64, 64]
    assert len(set(names)) == 3


@pytest.mark.parametrize(
    ("status", "told", "finish"),
    [
        (STOPPED, None, Finish.END_TURN),
        (CAPPED, None, Finish.UNKNOWN),
        (None, None, Finish.UNKNOWN),
        (STOPPED, "tool_use", Finish.TOOL_USE),
        (CAPPED, "sub_agent", Finish.SUB_AGENT),
        (STOPPED, "nonsense", Finish.END_TURN),
        (STOPPED, 3, Finish.END_TURN),
    ],
)
def test_the_finish_is_what_the_client_tells_or_else_the_engine(
    status: object, told: object, finish: Finish
) -> None:
    params = None if told is None else {"kvist.finish": told}
    req = request("a", 4, status=status, kv_transfer_params=params)
    req.tokens += [1, 2, 3]
    assert hints_of(req) == Hints(finish, 3)


def test_blocks_are_written_and_read_for_the_requests_tenant() -> None:
    side = warm_side()
    side.store.tenants.clear()
    req = request("a", 3 * BLOCK, kv_transfer_params={"kvist.tenant": "acme"})
    load(side, req)
    assert side.store.tenants == ["acme"]
    writer = request("b", BLOCK, first=500, kv_transfer_params={"kvist.tenant": "acme"})
    side.save_all(writer, TABLE)
    assert side.store.tenants == ["acme", "acme"]


def test_a_tenant_changes_no_key() -> None:
    side = warm_side()
    req = request("b", 3 * BLOCK, kv_transfer_params={"kvist.tenant": "acme"})
    side.side.arrive(req)
    assert side.side.matched(req, 0) == (3 * BLOCK, True)


def test_the_end_is_told_once_the_last_blocks_are_there() -> None:
    side = Side()
    req = request("a", 2 * BLOCK, status=STOPPED)
    side.side.arrive(req)
    (job,) = side.run(req, 2 * BLOCK, TABLE).saves
    assert side.side.finish(req, TABLE)
    side.idle()
    assert side.store.ends == []
    side.done(job.job_id)
    side.idle()
    assert side.store.ends == [(list(side.store.blocks), Hints(Finish.END_TURN, 0))]
    side.idle()
    assert len(side.store.ends) == 1


def test_a_request_without_saves_under_way_is_told_at_its_end() -> None:
    side = warm_side()
    side.store.ends.clear()
    req = request("b", 3 * BLOCK)
    side.side.arrive(req)
    side.run(req, 3 * BLOCK, TABLE)
    assert not side.side.finish(req, TABLE)
    ((keys, _),) = side.store.ends
    assert keys == list(side.store.blocks)


def test_a_store_that_cannot_hear_the_end_costs_nothing() -> None:
    side = warm_side()
    side.store.deaf = True
    req = request("b", 3 * BLOCK)
    side.side.arrive(req)
    side.run(req, 3 * BLOCK, TABLE)
    assert not side.side.finish(req, TABLE)
    assert side.side.fallback.take() == {"NoSpaceError": 1}
