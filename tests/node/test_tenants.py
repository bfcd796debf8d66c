"""What keeps two tenants of one engine, or of two, apart on the socket: the salt in every key."""

from __future__ import annotations

from node_process import NodeProcess, attach

from kvist.core.keys import RequestScope, seed_bytes
from kvist.core.outcome import BlockRef, Outcome
from kvist.native import chain_keys, digest
from kvist.node.cache import messages as m
from kvist.node.cache.client import CacheClient
from kvist.node.client import NodeStore
from kvist.testing.store_suite import WAIT_S, content

PROMPT = list(range(48))


def names(salt: str) -> list[bytes]:
    """Keys of the prompt, as connectors make them (`connectors/vllm/sequences.py`)."""
    seed = digest(seed_bytes(attach(1).fingerprint, RequestScope(salt=salt)))
    return chain_keys(seed, PROMPT, 16)


def write(store: NodeStore, tenant: str) -> None:
    keys = names(tenant)
    with store.write([BlockRef(key, None, tenant) for key in keys]) as lease:
        for i, key in enumerate(keys):
            lease.buffer(i)[:] = content(key)
            assert lease.commit(i)


def test_a_salt_keeps_the_same_prompt_of_two_tenants_apart(node: NodeProcess) -> None:
    """Looked up, read, wished for, evicted: another salt's keys find nothing of the first."""
    with node.client() as one, node.client() as two:
        write(one, "a")
        theirs = names("b")
        assert not set(theirs) & set(names("a"))
        assert len(two.match(theirs)) == 0
        with two.read(theirs, deadline_s=WAIT_S, tenant="b") as lease:
            assert {lease.outcome(i) for i in range(len(theirs))} == {Outcome.MISS}
        assert two.prefetch(theirs, deadline_s=WAIT_S, tenant="b") == 0
        assert two.evict(theirs) == 0
        write(two, "b")
        assert len(one.match(names("a"))) == len(two.match(theirs)) == 3
        with two.read(theirs, deadline_s=WAIT_S, tenant="b") as lease:
            assert bytes(lease.buffer(0)) == content(theirs[0])


def test_blocks_count_as_those_of_the_tenant_that_wrote_them(node: NodeProcess) -> None:
    with node.client() as engine, CacheClient(node.path) as client:
        write(engine, "a")
        write(engine, "b")
        usage = client.ask(m.ShowUsage(), m.Usage).usage
        assert {(u.tenant, u.blocks) for u in usage} == {("a", 3), ("b", 3)}
        assert client.ask(m.ClearBlocks(tenant="a"), m.Cleared).blocks == 3
        assert len(engine.match(names("a"))) == 0
        assert len(engine.match(names("b"))) == 3
