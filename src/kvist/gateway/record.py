"""What is known of a request when it is over: one line of the log, some samples, one span."""

from __future__ import annotations

from typing import Literal

import msgspec

Outcome = Literal["ok", "refused", "invalid", "failed", "cancelled"]
Prefill = Literal["ok", "late", "lost", "refused", "cancelled"]


class Record(msgspec.Struct, kw_only=True):
    """A request's line in the log; seconds, and tokens as the engine counts them where it does.

    `hit_tokens` are those that the router expected in a cache, and `hit_tiers` in which (`hbm`,
    `dram`, `ssd`, `peer`), at the first replica that was chosen; `cached_tokens` those that the
    engine says it found; `reasons` say for each attempt why its replica was chosen, `broke` what
    went wrong with those that failed. `splits` say for each choice where the prompt is computed and
    why, `prefills` which replicas computed it for another, `prefilled` how each of these ended.
    `refused` is why one was refused, in a word (`kvist_gateway_refused_total`), `waited_s` how long
    one waited here before it went to a replica.
    """

    request: str
    endpoint: str
    outcome: Outcome = "failed"
    status: int = 0
    tenant: str = ""
    model: str = ""
    streamed: bool = False
    prompt_tokens: int = 0
    output_tokens: int = 0
    hit_tokens: int = 0
    hit_tiers: dict[str, int] = {}
    cached_tokens: int | None = None
    replicas: list[str] = []
    reasons: list[str] = []
    broke: list[str] = []
    ways: list[str] = []
    splits: list[str] = []
    prefills: list[str] = []
    prefilled: list[Prefill] = []
    predicted_ttft_s: float | None = None
    ttft_s: float | None = None
    took_s: float = 0.0
    waited_s: float = 0.0
    refused: str = ""
    fault: str = ""
