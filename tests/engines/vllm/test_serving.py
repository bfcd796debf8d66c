"""One engine with Kvist: every answer equals the reference, and hits are really loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import zmq
from vllm_engine import (
    CHAT,
    CHAT_TOKENS,
    EDGES,
    EXACT,
    FEW,
    LONG,
    MEDIUM,
    REPLY_TEXT,
    SHORT,
    TREE,
    Reference,
    VllmEngine,
    kvist,
)

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1200)]

BLOCK = 32


@dataclass
class Serving:
    """The engine and the socket on which it publishes KV events."""

    engine: VllmEngine
    events: zmq.Socket[bytes]

    def loaded_by(self, prompts: list[list[int]], reference: Reference, salt: str) -> float:
        """Serves the prompts, proves the answers, and says how many tokens Kvist loaded."""
        before = self.engine.loaded_tokens()
        answer = self.engine.generate(prompts, salt=salt)
        assert answer.tokens == reference.of(prompts)
        assert set(answer.finish) == {"length"}
        return self.engine.loaded_tokens() - before


@pytest.fixture(scope="module")
def serving(start_engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("serving")
    endpoint = f"ipc://{folder}/events"
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.subscribe(b"")
    socket.connect(endpoint)
    engine = start_engine(
        kv_transfer_config=kvist(folder / "ssd"),
        kv_events_config={
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": endpoint,
        },
    )
    yield Serving(engine, socket)
    socket.close()
    context.term()


def test_cold_answers_are_right_and_load_nothing(serving: Serving, reference: Reference) -> None:
    assert serving.loaded_by([*EDGES, *FEW], reference, "cold") == 0


def test_warm_answers_are_right_and_loaded_from_dram(
    serving: Serving, reference: Reference
) -> None:
    serving.loaded_by([*FEW], reference, "warm")
    serving.engine.reset()
    before = serving.engine.loaded_tokens("dram")
    assert serving.loaded_by([*FEW], reference, "warm") > 0
    whole_blocks = sum(len(p) // BLOCK * BLOCK for p in FEW)
    assert serving.engine.loaded_tokens("dram") - before == whole_blocks


def test_engines_own_hits_are_not_loaded_again(serving: Serving, reference: Reference) -> None:
    serving.loaded_by([LONG], reference, "own")
    assert serving.loaded_by([LONG], reference, "own") == 0


def test_prompt_shorter_than_a_block_is_right_and_never_loaded(
    serving: Serving, reference: Reference
) -> None:
    serving.loaded_by([SHORT], reference, "short")
    serving.engine.reset()
    assert serving.loaded_by([SHORT], reference, "short") == 0


def test_prompt_of_whole_blocks_is_right_when_all_of_it_is_loaded(
    serving: Serving, reference: Reference
) -> None:
    """Nothing is left to compute but the logits of the last token."""
    serving.loaded_by([EXACT], reference, "exact")
    serving.engine.reset()
    assert serving.loaded_by([EXACT], reference, "exact") == len(EXACT)


def test_sixteen_requests_that_share_and_branch_are_right_cold_and_warm(
    serving: Serving, reference: Reference
) -> None:
    serving.loaded_by(TREE, reference, "tree")
    serving.engine.reset()
    loaded = serving.loaded_by(TREE, reference, "tree")
    # they run together: whoever comes first loads the shared blocks, and others may as well
    assert loaded >= (4 + 4 * 3 + 16 * 1) * BLOCK


def test_second_turn_of_a_chat_loads_blocks_of_generated_tokens(
    serving: Serving, reference: Reference
) -> None:
    engine = serving.engine
    first = engine.generate([CHAT], max_tokens=CHAT_TOKENS, salt="chat")
    assert first.tokens == reference.of([CHAT], CHAT_TOKENS)
    engine.reset()
    second = CHAT + first.tokens[0] + REPLY_TEXT
    loaded = serving.loaded_by([second], reference, "chat")
    # the last generated token was never computed; 139 tokens make four blocks, three of them prompt
    assert loaded == (len(CHAT) + CHAT_TOKENS - 1) // BLOCK * BLOCK
    assert loaded > len(CHAT)


def test_another_salt_sees_no_block(serving: Serving, reference: Reference) -> None:
    prompts = MEDIUM[3:5]
    serving.loaded_by(prompts, reference, "alice")
    serving.engine.reset()
    before = serving.engine.loaded_tokens()
    stranger = serving.engine.generate(prompts, salt="mallory")
    assert stranger.cached == [0, 0]
    assert serving.engine.loaded_tokens() == before
    assert stranger.tokens == reference.of(prompts)
    serving.engine.reset()
    assert serving.loaded_by(prompts, reference, "alice") > 0


def test_metrics_are_on_vllms_own_page(serving: Serving, reference: Reference) -> None:
    serving.loaded_by([EXACT], reference, "metrics")
    serving.engine.reset()
    serving.loaded_by([EXACT], reference, "metrics")
    found = serving.engine.metrics()
    for name in ("blocks_queried", "blocks_matched", "blocks_saved", "tokens_saved"):
        assert found[f"kvist_{name}"] > 0, name
    assert found["kvist_tokens_loaded.dram"] > 0
    assert found["kvist_bytes_copied"] > 0
    assert found["kvist_tier_blocks.dram"] > 0
    assert found["vllm:external_prefix_cache_hits"] > 0
    assert not [name for name in found if name.startswith("kvist_fallbacks")]


def test_events_name_our_blocks_in_dram_and_on_disk(serving: Serving, reference: Reference) -> None:
    """vLLM's own publisher carries what the store says, in vLLM's own format."""
    seen: dict[str, list[dict[str, Any]]] = {"CPU": [], "STORAGE": []}
    for turn in range(20):  # events leave with a step: take steps until both have come
        serving.loaded_by([EXACT], reference, f"events-{turn}")
        while serving.events.poll(500):
            _, _, payload = serving.events.recv_multipart()
            for event in msgspec.msgpack.decode(payload)[1]:
                if event.get("type") == "BlockStored" and event.get("medium") in seen:
                    seen[event["medium"]].append(event)
        if all(seen.values()):
            break
    assert all(
        isinstance(h, bytes) and len(h) == 32 for e in seen["CPU"] for h in e["block_hashes"]
    )
    assert {e["block_size"] for e in seen["CPU"]} == {BLOCK}
    assert any(e["token_ids"] == EXACT for e in seen["CPU"])
    stored = {h for e in seen["STORAGE"] for h in e["block_hashes"]}
    assert stored & {h for e in seen["CPU"] for h in e["block_hashes"]}
