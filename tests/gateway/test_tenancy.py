"""Tenants are kept apart inside the engines, whatever their requests say of themselves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_thread import HASTY, Running, configured, serving, stats

from kvist.gateway.ask import Endpoint, read_body, written
from kvist.gateway.settings import Settings
from kvist.gateway.tenancy import of_tenant, own_name
from kvist.node.http.tokens import Tokens
from kvist.testing.stub_engine import CacheSpec, StubEngine

OPERATOR, ALICE, BOB = "operator-0123456789", "alice-0123456789abc", "bob-0123456789abcde"
TOKENS = Tokens(OPERATOR, {"alice": ALICE, "bob": BOB}, section="$.gateway")
PATHS = {
    "/v1/completions": {"model": "stub", "prompt": "of tenants", "max_tokens": 2},
    "/v1/chat/completions": {
        "model": "stub",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
    },
    "/v1/embeddings": {"model": "stub", "input": "text"},
}


@pytest.fixture(scope="module")
def gateway(engine: StubEngine) -> Iterator[Running]:
    settings = Settings(timeouts=HASTY, passes_keys=False)
    with serving(engine, tokens=TOKENS, settings=settings) as running:
        yield running


def seen(
    gateway: Running, engine: StubEngine, key: str, body: dict[str, Any], path: str
) -> dict[str, Any]:
    """What the engine gets of a request."""
    status, *_ = gateway.ask(path, body, headers={"Authorization": f"Bearer {key}"})
    assert status == 200
    found: dict[str, Any] = stats(engine)["last_body"]
    return found


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_each_tenant_has_a_salt_and_a_name_of_its_own(
    gateway: Running, engine: StubEngine, path: str, *, stream: bool
) -> None:
    body = PATHS[path] | ({"stream": True} if stream and "embed" not in path else {})
    alice, bob = (seen(gateway, engine, key, body, path) for key in (ALICE, BOB))
    assert (alice["cache_salt"], bob["cache_salt"]) == ("alice:", "bob:")
    assert alice["kv_transfer_params"] == {"kvist.tenant": "alice"}
    assert alice.items() >= body.items()


def test_operator_is_believed_what_it_says(gateway: Running, engine: StubEngine) -> None:
    body = PATHS["/v1/completions"] | {"cache_salt": "alice:", "kv_transfer_params": {"x": 1}}
    assert seen(gateway, engine, OPERATOR, body, "/v1/completions") == body


def test_nobody_takes_anothers_salt_name_or_pages(gateway: Running, engine: StubEngine) -> None:
    """Of NIXL's fields, the engine would have sent whosever pages they name."""
    foreign = {
        "do_remote_prefill": True,
        "remote_engine_id": "e",
        "remote_block_ids": [1],
        "remote_host": "10.0.0.1",
        "kvist.tenant": "alice",
        "kvist.computed": 1 << 20,
        "kvist.save": True,
        "kvist.finish": "tool_use",
    }
    body = PATHS["/v1/completions"] | {"cache_salt": "alice:", "kv_transfer_params": foreign}
    found = seen(gateway, engine, BOB, body, "/v1/completions")
    assert found["cache_salt"] == "bob:alice:"
    assert found["kv_transfer_params"] == {"kvist.tenant": "bob", "kvist.finish": "tool_use"}
    odd = seen(gateway, engine, BOB, body | {"kv_transfer_params": [1]}, "/v1/completions")
    assert odd["kv_transfer_params"] == {"kvist.tenant": "bob"}


def test_no_two_tenants_can_have_one_name() -> None:
    tenants, names = ("a", "b", "a:", ":", "a:b", "a%3A", "a b", "å"), ("", ":", "b:", "a", "%3A")
    made = [own_name(t, n) for t, n in itertools.product(tenants, names)]
    assert len(set(made)) == len(made)


def test_tenants_that_share_keep_their_own_salts() -> None:
    for salt in ("", "own"):
        said = {"prompt": "p"} | ({"cache_salt": salt} if salt else {})
        found = of_tenant(
            read_body(Endpoint.COMPLETIONS, written(said)), "alice", shares=True
        ).payload
        assert found == said | {"kv_transfer_params": {"kvist.tenant": "alice"}}


@pytest.mark.parametrize("shares", [False, True])
def test_prompt_of_another_tenant_is_no_hit_unless_tenants_share(
    bytes_folder: Path, tmp_path: Path, *, shares: bool
) -> None:
    """The router, too, takes it to be new: else it would follow the other tenant's blocks."""
    files = {}
    for name, key in (("operator", OPERATOR), ("alice", ALICE), ("bob", BOB)):
        files[name] = tmp_path / name
        files[name].write_text(key)
        files[name].chmod(0o600)
    (tmp_path / "kvist.yaml").write_text(
        f"gateway: {{operator_file: {files['operator']}, tenants_share: {str(shares).lower()}, "
        f"tenants: {{alice: {files['alice']}, bob: {files['bob']}}}}}\n"
    )
    prompt = "x" * 64
    with (
        StubEngine(cache=CacheSpec(block_tokens=16)) as engine,
        configured([engine], bytes_folder, file=tmp_path / "kvist.yaml") as gateway,
    ):
        body = PATHS["/v1/completions"] | {"prompt": prompt}
        seen(gateway, engine, ALICE, body, "/v1/completions")
        salts = [""] * 2 if shares else [own_name("alice", ""), own_name("bob", "")]
        assert [bool(gateway.holders(prompt, salt)) for salt in salts] == [True, shares]
        assert bool(gateway.holders(prompt)) is shares
