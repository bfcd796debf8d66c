"""Two hosts: a node on each, an engine beside it, and blocks that cross over TCP.

Between them is a proxy that stalls, is cut, or flips a bit while blocks are on their way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from node_process import NodeProcess, eventually
from peer_nodes import Proxy, free_port, peer_node
from vllm_engine import EDGES, FEW, MEDIUM, Reference, VllmEngine, kvist

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1200)]

BLOCK = 32
DRAM_MIB = 256
BACK_S = 60.0
MIDWAY_BYTES = 3 << 20  # of some 1.5 MB a block


@dataclass(frozen=True, slots=True)
class Hosts:
    """`first` computes on the owner's host; `second` is beside the node that reads from it."""

    owner: NodeProcess
    link: Proxy
    reader: NodeProcess
    first: VllmEngine
    second: VllmEngine

    def settled(self) -> None:
        """No engine and no peer holds anything, and nothing leaked."""
        for node in (self.owner, self.reader):
            eventually(lambda node=node: node.store_stats()["leases"] == 0, BACK_S)
            node.assert_sound()


def _on(node: NodeProcess) -> dict[str, Any]:
    config = kvist(None)
    config["kv_connector_extra_config"]["store"]["where"] = "node"
    config["kv_connector_extra_config"]["node"] = {"socket": str(node.path)}
    return config


@pytest.fixture(scope="module")
def hosts(start_engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder: Path = tmp_path_factory.mktemp("h")
    folder.chmod(0o700)
    port = free_port()
    with (
        peer_node(folder / "a.sock", listen=port, blocks=DRAM_MIB) as owner,
        Proxy(port) as link,
        peer_node(folder / "b.sock", members=[link.port], blocks=DRAM_MIB) as reader,
    ):
        yield Hosts(
            owner,
            link,
            reader,
            start_engine(kv_transfer_config=_on(owner), cores="0"),
            start_engine(kv_transfer_config=_on(reader), cores="1"),
        )


def _whole_blocks(prompts: list[list[int]]) -> int:
    return sum(len(prompt) // BLOCK * BLOCK for prompt in prompts)


def test_an_engine_serves_what_another_host_computed(hosts: Hosts, reference: Reference) -> None:
    prompts = [*FEW, *EDGES]
    assert hosts.first.generate(prompts).tokens == reference.of(prompts)
    hosts.settled()
    for prompt in prompts:
        answer = hosts.second.generate([prompt])
        assert answer.tokens == reference.of([prompt])
        assert answer.cached == [len(prompt) // BLOCK * BLOCK]
    assert hosts.second.loaded_tokens("peer") > 0
    hosts.settled()


def test_what_was_fetched_once_is_kept(hosts: Hosts, reference: Reference) -> None:
    hosts.first.generate(MEDIUM, salt="kept")
    hosts.settled()
    assert hosts.second.generate(MEDIUM, salt="kept").tokens == reference.of(MEDIUM)
    hosts.settled()
    from_peer = hosts.second.loaded_tokens("peer")
    assert from_peer > 0
    hosts.second.reset()
    before = hosts.second.loaded_tokens("dram")
    assert hosts.second.generate(MEDIUM, salt="kept").tokens == reference.of(MEDIUM)
    assert hosts.second.loaded_tokens("peer") == from_peer
    assert hosts.second.loaded_tokens("dram") - before == _whole_blocks(MEDIUM)


@pytest.mark.parametrize("how", ["stall", "cut", "flip"])
def test_a_link_that_fails_midway_costs_recomputing_only(
    hosts: Hosts, reference: Reference, how: str
) -> None:
    assert hosts.first.generate(MEDIUM, salt=how).tokens == reference.of(MEDIUM)
    hosts.settled()
    hosts.link.spoil_after(MIDWAY_BYTES, how)
    answer = hosts.second.generate(MEDIUM, salt=how)  # a stall lasts longer than this
    assert hosts.link.spoiled.is_set()
    assert answer.tokens == reference.of(MEDIUM)
    hosts.link.heal()
    hosts.settled()
    _is_well_again(hosts, reference, f"after {how}")


def test_the_owner_killed_midway_costs_recomputing_only(hosts: Hosts, reference: Reference) -> None:
    assert hosts.first.generate(MEDIUM, salt="kill").tokens == reference.of(MEDIUM)
    hosts.settled()
    hosts.link.spoil_after(MIDWAY_BYTES, "stall")
    hosts.second.send("generate", prompts=MEDIUM, max_tokens=6, salt="kill", lora=None)
    assert hosts.link.spoiled.wait(BACK_S)
    hosts.owner.kill()
    hosts.link.heal()
    assert hosts.second._reply(240.0)["tokens"] == reference.of(MEDIUM)
    hosts.owner.start_again()
    eventually(lambda: hosts.owner.status()["clients"] == 1, BACK_S)
    hosts.settled()
    _is_well_again(hosts, reference, "after kill")


def test_the_engine_that_computed_may_be_gone(hosts: Hosts, reference: Reference) -> None:
    """Last in the file: the first engine does not come back."""
    assert hosts.first.generate(FEW, salt="gone").tokens == reference.of(FEW)
    hosts.settled()
    hosts.first.kill()
    eventually(lambda: hosts.owner.status()["lingering"] == 0, BACK_S)
    before = hosts.second.loaded_tokens("peer")
    assert hosts.second.generate(FEW, salt="gone").tokens == reference.of(FEW)
    assert hosts.second.loaded_tokens("peer") > before
    hosts.settled()


def _is_well_again(hosts: Hosts, reference: Reference, name: str) -> None:
    """New blocks cross the link, once the reader tries it again."""
    attempts = itertools.count()

    def crosses() -> bool:
        salt = f"{name} {next(attempts)}"  # what was computed in vain is then in its own DRAM
        assert hosts.first.generate(FEW, salt=salt).tokens == reference.of(FEW)
        hosts.settled()
        before = hosts.second.loaded_tokens("peer")
        assert hosts.second.generate(FEW, salt=salt).tokens == reference.of(FEW)
        return hosts.second.loaded_tokens("peer") > before

    eventually(crosses, BACK_S)
