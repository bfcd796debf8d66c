"""A vLLM engine as a child process that takes requests as JSON lines; run as a script.

It imports nothing of Kvist, so it also runs in another environment (that of a peer). Requests come
on stdin, one JSON object a line; each is answered by one line on the stdout that the process was
started with. Whatever vLLM itself prints goes to stderr. The end of stdin ends the process.

    {"op": "ask", "prompts": [[token, ...], ...], "max_tokens": 1}
        → {"took_s": 0.5, "cached_tokens": [0], "tokens": [[42]]}
    {"op": "forget"}      → {"done": true}   the engine's own prefix cache is empty
    {"op": "rest", "rest_s": 0.5} → {}       lets background work (saves) finish
    {"op": "metric", "name": "kvist_…"} → {"value": 0.1}   null if there is none
    {"op": "stop"}        → {}               after the engine was shut down
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any, TextIO

_FORGET_S = 20.0
_POLL_S = 0.05


def main() -> None:
    """Starts the engine that the first argument (JSON, arguments of `LLM`) describes and serves."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from vllm import LLM

    began = time.perf_counter()
    engine = LLM(**json.loads(sys.argv[1]))
    _send(replies, {"ready": True, "start_s": time.perf_counter() - began})
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "stop":
            break
        _send(replies, _answer(engine, request))
    engine.llm_engine.engine_core.shutdown()
    _send(replies, {})


def _send(replies: TextIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def _answer(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    if request["op"] == "ask":
        return _ask(engine, request["prompts"], request["max_tokens"])
    if request["op"] == "forget":
        return {"done": _forget(engine)}
    if request["op"] == "rest":
        _pause(request["rest_s"])
        return {}
    if request["op"] == "metric":
        return {"value": _metric(request["name"])}
    raise ValueError(f"unknown request {request['op']!r}")


def _ask(engine: Any, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    began = time.perf_counter()
    outputs = engine.generate(inputs, params, use_tqdm=False)
    took_s = time.perf_counter() - began
    return {
        "took_s": took_s,
        "cached_tokens": [o.num_cached_tokens or 0 for o in outputs],
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
    }


def _forget(engine: Any) -> bool:
    """Pages that a connector still saves cannot be forgotten, so this is tried for a while."""
    give_up = time.perf_counter() + _FORGET_S
    while not engine.reset_prefix_cache():
        if time.perf_counter() > give_up:
            return False
        _pause(_POLL_S)
    return True


def _metric(name: str) -> float | None:
    from prometheus_client import REGISTRY  # `LLM.get_metrics` shows vLLM's own only

    samples = (sample for family in REGISTRY.collect() for sample in family.samples)
    return next((sample.value for sample in samples if sample.name == name), None)


def _pause(pause_s: float) -> None:
    threading.Event().wait(pause_s)


if __name__ == "__main__":
    main()
