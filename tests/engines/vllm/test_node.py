"""Real engines on one node: they share blocks, and none of them needs the node to live."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node_process import PAGE_BYTES, NodeProcess, eventually
from vllm_engine import (
    EDGES,
    FEW,
    MEDIUM,
    TREE,
    EngineError,
    Reference,
    VllmEngine,
    kvist,
    random_tokens,
)

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1200)]

BLOCK = 32
DRAM_BYTES = 256 << 20
BACK_S = 60.0


@pytest.fixture(scope="module")
def shared_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    folder: Path = tmp_path_factory.mktemp("n")
    options = ("--set=store.ssd.capacity=512MiB",)
    slots = DRAM_BYTES // PAGE_BYTES
    with NodeProcess(folder / "n.sock", slots=slots, ssd=folder / "ssd", options=options) as node:
        yield node


def on(node: NodeProcess) -> dict[str, Any]:
    """`kv_transfer_config` of an engine on the node; its own DRAM and SSD knobs mean nothing."""
    config = kvist(None)
    config["kv_connector_extra_config"]["store"]["where"] = "node"
    # A killed node hangs up at once; one that is only slow is not to count as away here.
    config["kv_connector_extra_config"]["node"] = {"socket": str(node.path), "answer_s": 30}
    return config


@pytest.fixture(scope="module")
def engines(start_engine: Any, shared_node: NodeProcess) -> tuple[VllmEngine, VllmEngine]:
    """Two engines that run side by side."""
    return (
        start_engine(kv_transfer_config=on(shared_node), cores="0"),
        start_engine(kv_transfer_config=on(shared_node), cores="1"),
    )


def settled(node: NodeProcess) -> None:
    """No engine holds anything of the node, and nothing leaked."""
    eventually(lambda: node.store_stats()["leases"] == 0, BACK_S)
    node.assert_sound()


def test_second_engine_serves_what_the_first_one_computed(
    engines: tuple[VllmEngine, VllmEngine], shared_node: NodeProcess, reference: Reference
) -> None:
    first, second = engines
    assert shared_node.status()["clients"] == 2
    assert first.generate([*FEW, *EDGES]).tokens == reference.of([*FEW, *EDGES])
    settled(shared_node)
    for prompt in [*FEW, *EDGES]:
        answer = second.generate([prompt])
        assert answer.tokens == reference.of([prompt])
        assert answer.cached == [len(prompt) // BLOCK * BLOCK]
    assert second.loaded_tokens("dram") > 0
    settled(shared_node)


def test_engines_that_run_at_once_give_the_right_tokens(
    engines: tuple[VllmEngine, VllmEngine], shared_node: NodeProcess, reference: Reference
) -> None:
    first, second = engines
    for engine in engines:
        engine.reset()
        engine.send("generate", prompts=TREE, max_tokens=6, salt="", lora=None)
    for engine in engines:
        assert engine._reply(240.0)["tokens"] == reference.of(TREE)
    assert first.loaded_tokens() + second.loaded_tokens() > 0
    settled(shared_node)


def test_node_replaced_while_engines_run_keeps_what_is_in_dram(
    engines: tuple[VllmEngine, VllmEngine], shared_node: NodeProcess, reference: Reference
) -> None:
    """Loads and saves are under way. Both engines go on, and find the next node, which has all."""
    first, second = engines
    first.reset()
    assert first.generate(FEW, salt="upgrade").tokens == reference.of(FEW)
    prompts = [*TREE, *MEDIUM]
    for engine in engines:
        engine.reset()
        engine.send("generate", prompts=prompts, max_tokens=6, salt="", lora=None)
    eventually(lambda: shared_node.store_stats()["leases"] > 0, BACK_S)
    shared_node.replace()
    for engine in engines:
        answer = engine._reply(240.0)
        assert answer["tokens"] == reference.of(prompts)
        assert set(answer["finish"]) == {"length"}
    eventually(lambda: shared_node.status()["clients"] == 2, BACK_S)
    eventually(lambda: shared_node.store_stats()["adopted"] > 0, BACK_S)
    second.reset()
    before = second.loaded_tokens("dram")
    assert second.generate(FEW, salt="upgrade").tokens == reference.of(FEW)
    assert second.loaded_tokens("dram") > before
    settled(shared_node)


def test_node_killed_while_engines_run_costs_recomputing_only(
    engines: tuple[VllmEngine, VllmEngine], shared_node: NodeProcess, reference: Reference
) -> None:
    """Loads, saves and waits are under way. Both engines go on, and find the next node."""
    prompts = [*TREE, *MEDIUM]
    for engine in engines:
        engine.reset()
        engine.send("generate", prompts=prompts, max_tokens=6, salt="", lora=None)
    eventually(lambda: shared_node.store_stats()["leases"] > 0, BACK_S)
    shared_node.kill()
    for engine in engines:
        answer = engine._reply(240.0)
        assert answer["tokens"] == reference.of(prompts)
        assert set(answer["finish"]) == {"length"}
    for engine in engines:
        engine.reset()  # succeeds only if no page is held for a copy that never ends
        assert engine.generate(FEW).tokens == reference.of(FEW)
    shared_node.start_again()
    eventually(lambda: shared_node.status()["clients"] == 2, BACK_S)
    first, second = engines
    first.reset()
    assert first.generate(FEW, salt="after").tokens == reference.of(FEW)
    settled(shared_node)
    before = second.loaded_tokens("dram")
    assert second.generate(FEW, salt="after").tokens == reference.of(FEW)
    assert second.loaded_tokens("dram") > before
    settled(shared_node)


def test_killed_engine_leaves_the_node_sound_and_its_blocks_to_others(
    engines: tuple[VllmEngine, VllmEngine], shared_node: NodeProcess, reference: Reference
) -> None:
    first, second = engines
    first.reset()
    first.send("generate", prompts=[*MEDIUM, *TREE], max_tokens=6, salt="kill", lora=None)
    eventually(lambda: shared_node.store_stats()["writing_blocks"] > 0, BACK_S)
    first.kill()
    eventually(lambda: shared_node.status()["clients"] == 1, BACK_S)
    eventually(lambda: shared_node.status()["lingering"] == 0, BACK_S)
    settled(shared_node)
    assert second.generate(MEDIUM, salt="kill").tokens == reference.of(MEDIUM)
    settled(shared_node)


def test_ranks_in_processes_of_their_own_follow_the_node(
    start_engine: Any, small_llama: Path, tmp_path: Path
) -> None:
    """One engine with one rank, one with two: workers map the node's arena, and the next one's."""
    prompts = [random_tokens(200 + i, n, 1000) for i, n in enumerate((100, 300, 64))]
    blocks = sum(len(p) // BLOCK * BLOCK for p in prompts)
    tmp_path.chmod(0o700)
    with NodeProcess(tmp_path / "n.sock", slots=DRAM_BYTES // PAGE_BYTES) as node:
        one = start_engine(model=small_llama, kv_transfer_config=on(node), cores="0")
        cold = one.generate(prompts, max_tokens=12, salt="reference").tokens
        assert one.generate(prompts, max_tokens=12).tokens == cold
        settled(node)
        try:
            two = start_engine(
                model=small_llama,
                kv_transfer_config=on(node),
                cores="0|1",
                tensor_parallel_size=2,
            )
        except EngineError as e:
            if "kvist" in str(e).lower().split("traceback")[-1]:
                raise
            pytest.skip(f"vLLM does not start two ranks here: {str(e).strip().splitlines()[-1]}")
        assert two.generate(prompts, max_tokens=12).tokens == cold
        assert two.loaded_tokens("dram") == blocks
        settled(node)
        node.kill()
        node.start_again()
        eventually(lambda: node.status()["clients"] == 2, BACK_S)
        two.reset()
        assert two.generate(prompts, max_tokens=12).tokens == cold  # computed, and saved anew
        settled(node)
        before = one.loaded_tokens("dram")
        one.reset()
        assert one.generate(prompts, max_tokens=12).tokens == cold
        assert one.loaded_tokens("dram") - before == blocks
        two.kill()
        eventually(lambda: node.status()["lingering"] == 0, BACK_S)
        settled(node)
