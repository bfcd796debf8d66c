"""A gateway and real nodes: what their DRAM holds decides where a prompt goes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from cluster_nodes import cluster_node, met, token_file
from node_process import NodeProcess, attach, eventually
from peer_nodes import BLOCK_BYTES, LONG_S, client_of

from kvist.assemble.gateway import open_gateway
from kvist.config import load_config
from kvist.core.keys import RequestScope, seed_bytes
from kvist.core.outcome import BlockRef
from kvist.gateway.server import Gateway
from kvist.native import chain_keys, digest
from kvist.router.candidates import Prefix
from kvist.router.protocol import Ask, Choice

pytest.importorskip("zmq")
pytest.importorskip("aiohttp")
WIDTH, BLOCKS = 16, 8
TOKENS = list(range(WIDTH * BLOCKS))
ALL = len(TOKENS)
BESIDE_A, BESIDE_B = "http://127.0.0.1:1", "http://127.0.0.1:2"
ELSEWHERE = "http://192.0.2.1:8000"
MINE = 0xAB
KEYSPACE = attach(MINE).fingerprint

Opened = Callable[..., AbstractContextManager[Gateway]]


def keys_in(fingerprint: bytes) -> list[bytes]:
    """The prompt's blocks, as an engine's connector names them."""
    return chain_keys(digest(seed_bytes(fingerprint, RequestScope())), TOKENS, WIDTH)


def store(node: NodeProcess, keys: Sequence[bytes], n: int = MINE) -> None:
    """An engine of keyspace n saves blocks in a node's DRAM."""
    with client_of(node, n) as engine:
        refs = [BlockRef(key, keys[i - 1] if i else None) for i, key in enumerate(keys)]
        with engine.write(refs) as lease:
            for i in range(len(keys)):
                lease.buffer(i)[:] = bytes(BLOCK_BYTES)
                assert lease.commit(i)


@pytest.fixture
def opened(folder: Path) -> Opened:
    """A gateway that hears the cluster of `folder`; its HTTP side is not needed here."""

    @contextmanager
    def make(token: Path, *sets: str) -> Iterator[Gateway]:
        replicas = f"{BESIDE_A}?node=a&events=,{BESIDE_B}?node=b&events=,{ELSEWHERE}"
        own = [f"gateway.replicas={replicas}", "gateway.listen=127.0.0.1:0"]
        own += [f"block_tokens={WIDTH}", "node.cluster.discovery=files"]
        own += [f"node.cluster.folder={folder / 'found'}", f"node.peers.token_file={token}"]
        own += ["router.kv_token_bytes=1000", "router.prefill_tokens_per_s=1000"]
        gateway, listener = open_gateway(load_config(env={}, sets=[*own, *sets]).config)
        listener.close()
        assert gateway.hearing is not None
        gateway.hearing.start()
        try:
            yield gateway
        finally:
            gateway.hearing.close()
            gateway.prompts.close()

    return make


def believed(gateway: Gateway) -> dict[str, Prefix]:
    """What the gateway knows of the prompt, as it names it itself."""
    assert gateway.prefixes is not None
    return dict(gateway.prefixes.match(gateway.prefixes.keys(TOKENS, "", "")))


def own(gateway: Gateway, replica: str) -> int:
    """Tokens of the prompt that a replica's own node is believed to have."""
    found = believed(gateway).get(replica)
    return 0 if found is None else found.own_tokens


def test_prompt_goes_where_a_node_holds_it(folder: Path, opened: Opened) -> None:
    token = token_file(folder)
    with (
        cluster_node(folder, "a", token=token, options=("block_tokens=16",)) as a,
        cluster_node(folder, "b", token=token, options=("block_tokens=16",)) as b,
        opened(token) as gateway,
    ):
        met(a, b)
        store(a, keys_in(KEYSPACE))
        wanted = {
            BESIDE_A: Prefix(0, ALL, 0, ALL),
            BESIDE_B: Prefix(0, 0, 0, ALL),
            ELSEWHERE: Prefix(0, 0, 0, 0),
        }
        eventually(lambda: believed(gateway) == wanted, LONG_S)
        for replica in wanted:
            gateway.router.add(replica)
        assert gateway.prefixes is not None
        keys = gateway.prefixes.keys(TOKENS, "", "")
        found = gateway.router.choose(Ask("r", keys, ALL + 1), 0.0)
        assert isinstance(found, Choice)
        assert (found.replica, found.hit_tiers) == (BESIDE_A, {"dram": ALL})
        for replica in (BESIDE_A, ELSEWHERE):  # which one is left fetches it from the other host
            gateway.router.set_state(replica, healthy=False)
        found = gateway.router.choose(Ask("s", keys, ALL + 1), 0.0)
        assert isinstance(found, Choice)
        assert (found.replica, found.hit_tiers) == (BESIDE_B, {"peer": ALL})
        a.terminate()  # says goodbye
        eventually(lambda: own(gateway, BESIDE_A) == 0, LONG_S)


def test_nodes_of_another_block_size_play_no_part_and_it_is_said(
    folder: Path, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    token = token_file(folder)
    with (
        caplog.at_level(logging.ERROR, "kvist.gateway.hearing"),
        cluster_node(folder, "a", token=token, options=("block_tokens=32",)) as a,
        client_of(a, MINE),
        opened(token) as gateway,
    ):
        eventually(lambda: bool(caplog.records), LONG_S)
        assert "node a has blocks of 32 tokens" in caplog.text
        assert believed(gateway) == {}


def test_keyspace_is_asked_for_where_nodes_have_several(
    folder: Path, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    token = token_file(folder)
    options = ("block_tokens=16", "node.keyspaces=2")
    with (
        caplog.at_level(logging.ERROR, "kvist.gateway.hearing"),
        cluster_node(folder, "a", token=token, options=options) as a,
    ):
        store(a, keys_in(KEYSPACE))
        with client_of(a, 2):
            with opened(token):
                eventually(lambda: bool(caplog.records), LONG_S)
                assert "gateway.events.keyspace" in caplog.text
            with opened(token, f"gateway.events.keyspace={KEYSPACE.hex()}") as gateway:
                wanted = {BESIDE_A: Prefix(0, ALL, 0, ALL)}
                eventually(lambda: wanted.items() <= believed(gateway).items(), LONG_S)


def test_block_that_another_process_invents_is_no_hit(folder: Path, opened: Opened) -> None:
    """A stranger without the secret is not heard."""
    token, other = token_file(folder), token_file(folder, "other")
    with (
        cluster_node(folder, "a", token=other, options=("block_tokens=16",)) as a,
        cluster_node(folder, "b", token=token, options=("block_tokens=16",)) as b,
        opened(token) as gateway,
    ):
        store(a, keys_in(KEYSPACE))
        store(b, keys_in(KEYSPACE)[:3])
        eventually(lambda: own(gateway, BESIDE_B) == 3 * WIDTH, LONG_S)
        assert own(gateway, BESIDE_A) == 0
