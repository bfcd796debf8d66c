"""The knobs of prefill and decode pools behind a gateway."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvist.config.store_schema import Section


class DisaggregationConfig(Section, frozen=True):
    """Engines that compute prompts for others, which go on with them."""

    prefill: Annotated[
        str | tuple[str, ...],
        Meta(
            description="URLs of engines that only compute prompts: a list, or one text with "
            "commas. Those in `gateway.replicas` then go on with them, or compute a prompt "
            "themselves where that is better or there is no other way. All serve the same model; "
            "with `transport` `kvist` they share a store (`store.where=node`). Empty: no pools."
        ),
    ] = ""
    rule: Annotated[
        Literal["cost", "length", "always", "never"],
        Meta(
            description="When a prompt is computed by a prefill engine. `cost`: when its first "
            "token, and those that wait or decode beside it, are predicted to lose less time. "
            "`length`: when more than `length_tokens` of it are not cached where it decodes, and "
            "fewer than `queued` wait there (Dynamo's rule). `always`: if one is up."
        ),
    ] = "cost"
    length_tokens: Annotated[
        int,
        Meta(ge=0, description="Of `length`: a prompt with no more to compute is not split."),
    ] = 2048
    queued: Annotated[
        int,
        Meta(ge=1, description="Of `length`: nor is one if so many wait at the prefill engine."),
    ] = 16
    handover_tokens_per_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Tokens whose KV is believed to come to a decode engine in a second, "
            "until the first have shown it.",
        ),
    ] = 50_000.0
    transport: Annotated[
        Literal["kvist", "nixl"],
        Meta(
            description="How KV comes to the decode engine. `kvist`: through the store that the "
            "engines share. `nixl`: from engine to engine, which run vLLM's NixlConnector."
        ),
    ] = "kvist"
    patience: Annotated[
        float,
        Meta(
            gt=1,
            description="A prefill that takes so many times as long as predicted is given up, and "
            "the decode engine computes the prompt.",
        ),
    ] = 4.0
    least_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds before which none is given up. Until an engine's speed was seen, "
            "only `gateway.timeouts.first_token_s` ends the wait.",
        ),
    ] = 2.0
