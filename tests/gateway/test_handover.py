"""What a prefill engine is asked, and what the engine that goes on is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvist.gateway.ask import Endpoint, read_body
from kvist.gateway.handover import for_decode, for_prefill, is_divisible

CHAT = {"messages": [{"role": "user", "content": "x"}]}
TEXT = {"prompt": "x"}


def asked_of_prefill(body: dict[str, Any], transport: Any = "kvist") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(for_prefill(json.dumps(body).encode(), transport))
    return found


def test_prefill_is_the_request_with_one_token_and_nothing_of_its_answer() -> None:
    body = CHAT | {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 3,
        "max_tokens": 900,
        "max_completion_tokens": 900,
        "min_tokens": 4,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
        "stop": ["."],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
        "cache_salt": "s",
        "chat_template_kwargs": {"thinking": True},
    }
    assert asked_of_prefill(body) == CHAT | {
        "model": "m",
        "max_tokens": 1,
        "ignore_eos": True,
        "tools": body["tools"],
        "tool_choice": "none",
        "cache_salt": "s",
        "chat_template_kwargs": {"thinking": True},
        "kv_transfer_params": {"kvist.save": True},
    }


def test_what_the_client_says_to_the_connector_stays() -> None:
    body = TEXT | {"kv_transfer_params": {"kvist.tenant": "t"}}
    params = asked_of_prefill(body)["kv_transfer_params"]
    assert params == {"kvist.tenant": "t", "kvist.save": True}
    raw = json.dumps(body).encode()
    told = for_decode(raw, json.dumps({"usage": {"prompt_tokens": 99}}).encode(), "kvist")
    assert told is not None
    assert json.loads(told) == TEXT | {
        "kv_transfer_params": {"kvist.tenant": "t", "kvist.computed": 99}
    }


def test_nixl_carries_what_the_prefill_engine_answered() -> None:
    params = asked_of_prefill(TEXT, "nixl")["kv_transfer_params"]
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    answered = {"do_remote_prefill": True, "remote_block_ids": [1, 2], "remote_engine_id": "e"}
    raw = json.dumps(TEXT).encode()
    told = for_decode(raw, json.dumps({"kv_transfer_params": answered}).encode(), "nixl")
    assert told is not None
    assert json.loads(told)["kv_transfer_params"] == answered
    assert for_decode(raw, json.dumps({"kv_transfer_params": None}).encode(), "nixl") is None


@pytest.mark.parametrize("answer", [b"", b"[]", b'{"usage": 7}', b"\xff", b'{"usage": {"prompt_'])
def test_an_answer_that_is_none_tells_nothing(answer: bytes) -> None:
    assert for_decode(b"{}", answer, "kvist") is None


@pytest.mark.parametrize(
    ("endpoint", "body", "divisible"),
    [
        pytest.param(Endpoint.CHAT, CHAT, True, id="chat"),
        pytest.param(Endpoint.CHAT, CHAT | {"n": 4}, True, id="choices"),
        pytest.param(Endpoint.COMPLETIONS, TEXT, True, id="text"),
        pytest.param(Endpoint.COMPLETIONS, {"prompt": ["x"]}, True, id="one"),
        pytest.param(Endpoint.COMPLETIONS, {"prompt": [1, 2, 3]}, True, id="tokens"),
        pytest.param(Endpoint.COMPLETIONS, {"prompt": ["x", "y"]}, False, id="two"),
        pytest.param(Endpoint.COMPLETIONS, {"prompt": [[1], [2]]}, False, id="two of tokens"),
        pytest.param(Endpoint.COMPLETIONS, TEXT | {"echo": True}, True, id="echo"),
        pytest.param(Endpoint.COMPLETIONS, TEXT | {"echo": True, "logprobs": 0}, False, id="all"),
        pytest.param(Endpoint.CHAT, CHAT | {"prompt_logprobs": 0}, False, id="prompt logprobs"),
        pytest.param(Endpoint.CHAT, CHAT | {"use_beam_search": True}, False, id="beams"),
        pytest.param(Endpoint.EMBEDDINGS, {"input": "x"}, False, id="embeddings"),
    ],
)
def test_what_can_be_split(endpoint: Endpoint, body: dict[str, Any], divisible: bool) -> None:
    assert is_divisible(read_body(endpoint, json.dumps(body).encode())) is divisible
