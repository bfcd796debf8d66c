"""What a prefill engine is asked, and what the engine that goes on is told of it. No I/O.

A prefill is the request itself with one token of output, of which nothing is delivered: the engine
that goes on computes its first token from the prompt's KV, so an answer is the one that it gives
alone. Two ways for the KV:

* `kvist`: the engines share a store. The first is told to save every block (`kvist.save`), the
  second how many tokens were computed (`kvist.computed`): it waits a moment for blocks that are
  still being saved. What does not come it computes.
* `nixl`: as in vLLM's own example of a proxy. The first answers where its pages are
  (`kv_transfer_params`), and the second gets that as it came.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvist.gateway.ask import Asked, Endpoint
from kvist.gateway.delivered import Usage
from kvist.gateway.settings import Transport

# What shapes the answer and not the prompt, and could be at odds with one token of output.
_OF_THE_ANSWER = (
    *("stream", "stream_options", "n", "best_of", "min_tokens", "return_token_ids"),
    *("logprobs", "top_logprobs", "echo", "max_completion_tokens", "stop", "stop_token_ids"),
)
_ALONE = ("prompt_logprobs", "use_beam_search", "prompt_embeds")
_NIXL: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_PARAMS = "kv_transfer_params"


class Prefilled(msgspec.Struct):
    """Of a prefill engine's answer."""

    usage: Usage | None = None
    kv_transfer_params: dict[str, Any] | None = None


def is_divisible(asked: Asked) -> bool:
    """Whether another engine may compute the prompt: for one prompt whose KV is then asked for."""
    if asked.endpoint is Endpoint.EMBEDDINGS:
        return False
    prompt = asked.fields.prompt
    if isinstance(prompt, list) and len(prompt) != 1 and not isinstance(prompt[0], int):
        return False
    payload = asked.payload
    if payload.get("echo") and payload.get("logprobs") is not None:
        return False  # these are of the prompt's tokens, so that all of them are computed
    values = (payload.get(name) for name in _ALONE)
    return all(value is None or value is False for value in values)  # 0 logprobs are some


def for_prefill(body: bytes, transport: Transport) -> bytes:
    """The body that has an engine compute the prompt of `body`, an object in JSON."""
    asked: dict[str, Any] = msgspec.json.decode(body)
    payload = {name: value for name, value in asked.items() if name not in _OF_THE_ANSWER}
    if payload.get("tool_choice") not in (None, "auto", "none"):
        payload["tool_choice"] = "none"  # a call cannot be one token long
    payload |= {"max_tokens": 1, "ignore_eos": True}  # NIXL keeps what ended by its length alone
    told = {"kvist.save": True} if transport == "kvist" else _NIXL
    payload[_PARAMS] = _params(payload) | told
    return msgspec.json.encode(payload)


def for_decode(body: bytes, answer: bytes, transport: Transport) -> bytes | None:
    """`body` for the engine that goes on, with what the prefill engine answered.

    None: the answer says nothing of where the KV is.
    """
    try:
        found = msgspec.json.decode(answer, type=Prefilled)
    except msgspec.MsgspecError:
        return None
    payload: dict[str, Any] = msgspec.json.decode(body)
    if transport == "nixl":
        if not found.kv_transfer_params:
            return None
        told = found.kv_transfer_params
    else:
        computed = found.usage.prompt_tokens if found.usage is not None else None
        told = {"kvist.computed": computed or 0}
    payload[_PARAMS] = _params(payload) | told
    return msgspec.json.encode(payload)


def _params(payload: dict[str, Any]) -> dict[str, Any]:
    """What the client itself says there, such as its tenant's name."""
    said = payload.get(_PARAMS)
    return said if isinstance(said, dict) else {}
