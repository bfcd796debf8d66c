"""A client of an OpenAI-compatible vLLM server: one streamed completion, and its counters."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from typing import Any

from kvist.core.errors import KvistError

_REQUEST_TIMEOUT_S = 300.0
_METRICS_TIMEOUT_S = 10.0
_SAMPLE = re.compile(r"^(\w[\w:]*)(?:\{([^}]*)\})? ([-+.\deE]+)$")
_TIER = re.compile(r'tier="(\w+)"')


class RequestFailed(KvistError):
    """The server refused a request, or broke off its answer."""


def complete(
    url: str, model: str, prompt: tuple[int, ...], *, max_tokens: int
) -> tuple[float, list[int]]:
    """A greedy completion of `prompt`: seconds to the first streamed token, and all token ids.

    Raises:
        RequestFailed: no whole answer came.
    """
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    began = time.perf_counter()
    first_s = 0.0
    tokens: list[int] = []
    try:
        with urllib.request.urlopen(request, timeout=_REQUEST_TIMEOUT_S) as answer:
            for line in answer:
                new = _tokens(line)
                if new and not tokens:
                    first_s = time.perf_counter() - began
                tokens += new
    except urllib.error.HTTPError as e:
        raise RequestFailed(f"the server answered {e.code}: {e.read(500)!r}") from e
    except OSError as e:
        raise RequestFailed(f"the server broke off: {e}") from e
    if not tokens:
        raise RequestFailed("the server streamed no token")
    return first_s, tokens


def _tokens(line: bytes) -> list[int]:
    """Token ids in one line of a server-sent event stream."""
    text = line.decode().strip()
    if not text.startswith("data: ") or text == "data: [DONE]":
        return []
    event: dict[str, Any] = json.loads(text.removeprefix("data: "))
    if "error" in event:
        raise RequestFailed(f"the server said: {event['error']}")
    return [int(token) for c in event.get("choices", ()) for token in c.get("token_ids") or ()]


def reused_tokens(url: str) -> dict[str, int]:
    """Prompt tokens that the server has not computed since it started, by tier.

    Raises:
        RequestFailed: the server does not answer.
    """
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=_METRICS_TIMEOUT_S) as answer:
            return parse_reused(answer.read().decode())
    except OSError as e:
        raise RequestFailed(f"{url}/metrics cannot be read: {e}") from e


def parse_reused(page: str) -> dict[str, int]:
    """As `reused_tokens`, from the text of a Prometheus page."""
    found: dict[str, int] = {}
    for line in page.splitlines():
        sample = _SAMPLE.match(line)
        if sample is None:
            continue
        name, labels, value = sample[1], sample[2] or "", int(float(sample[3]))
        tier = _TIER.search(labels)
        if name == "vllm:prefix_cache_hits_total":
            found["hbm"] = found.get("hbm", 0) + value
        elif name == "kvist_tokens_loaded_total" and tier:
            found[tier[1]] = found.get(tier[1], 0) + value
    return found
