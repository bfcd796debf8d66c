"""The knobs of the router: which replica, and whether at all."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvist.config.store_schema import GIB, SIZE, Section

_Weight = Annotated[float, Meta(gt=0)]
TenantWeight = Annotated[
    _Weight,
    Meta(
        description="Share of a tenant among those that wait: with twice the weight it gets twice "
        "the tokens computed. A mapping (in YAML) gives weights by name; those not in it have 1."
    ),
]
TenantWeights = Annotated[dict[str, _Weight], Meta(min_length=1)]


class RouterConfig(Section, frozen=True):
    """Which replica serves a request, and whether at all."""

    policy: Annotated[
        str,
        Meta(
            description="How a replica is picked: `kvist`, `cache-aware`, `cache-aware-local`, "
            "`dynamo`, `prefix`, `least-loaded`, `power-of-two`, `round-robin`, `random`; or "
            "`package.module:Class`, a class with `score(ask, candidate)`, least is best."
        ),
    ] = "kvist"
    temperature: Annotated[
        float,
        Meta(
            ge=0,
            description="Of `kvist`: 0 takes the least cost; above, replicas are drawn, the "
            "better the likelier. It means the same at any load.",
        ),
    ] = 0.0
    session_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Of `kvist`: seconds that staying with the replica of a session's last "
            "request may cost.",
        ),
    ] = 0.02
    lora_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Of `kvist`: seconds to load a LoRA adapter that a replica has not used "
            "lately.",
        ),
    ] = 1.0
    admission: Annotated[
        Literal["none", "baseline", "early", "predictive"],
        Meta(
            description="When a request is refused that is predicted to miss a limit: never; by "
            "the queue, and by decode once its prompt is computed; also by decode as it is now; by "
            "decode as it will be. Decode refuses nothing before some of its steps were timed."
        ),
    ] = "predictive"
    ttft_s: Annotated[
        float, Meta(gt=0, description="Limit of the time to the first token that is promised.")
    ] = 60.0
    tbt_s: Annotated[float, Meta(gt=0, description="Limit of a decode step that is promised.")] = (
        1.0
    )
    prefill_tokens_per_s: Annotated[
        float,
        Meta(
            gt=0,
            description="What a replica is believed to compute until its first prompts have shown "
            "it.",
        ),
    ] = 10_000.0
    decode_step_s: Annotated[
        float,
        Meta(gt=0, description="Likewise, a decode step of one short request."),
    ] = 0.02
    step_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Tokens that an engine computes in a step, decodes beside them (vLLM: "
            "`--max-num-batched-tokens`): very long prompts then keep away from where many decode, "
            "and speeds are learned from prompts that had no decodes beside them. 0: not known.",
        ),
    ] = 0
    kv_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Tokens of KV that one replica's HBM holds (vLLM says it at its start): "
            "beyond, requests wait for others to end. 0: not known.",
        ),
    ] = 0
    kv_token_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Bytes of KV of one token, which say how long blocks take to come from "
            "below HBM. 0: as the `config.json` in `gateway.tokenizer` has it; where that is "
            "not to be had, only what is in HBM counts.",
            extra=SIZE,
        ),
    ] = 0
    dram_bytes_per_s: Annotated[
        int,
        Meta(
            ge=0,
            description="Bytes a second that an engine loads from its host's DRAM; 0: never.",
            extra=SIZE,
        ),
    ] = 10 * GIB
    ssd_bytes_per_s: Annotated[
        int, Meta(ge=0, description="Likewise, from its node's SSD.", extra=SIZE)
    ] = 5 * GIB
    peer_bytes_per_s: Annotated[
        int,
        Meta(ge=0, description="Likewise, from the nodes of other hosts.", extra=SIZE),
    ] = 2 * GIB
    hold_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Requests wait at the gateway, in fair order and the shortest first, while "
            "every replica has more than this queued.",
        ),
    ] = 0.5
    overtaken_s: Annotated[
        float,
        Meta(
            ge=0,
            description="A request that waits is overtaken by shorter ones that come no more than "
            "this later. 0: all go in the order in which they came.",
        ),
    ] = 6.0
    waiting: Annotated[
        int,
        Meta(ge=1, description="Requests that may wait at a gateway; more are refused."),
    ] = 4096
    tenant_waiting: Annotated[
        int, Meta(ge=1, description="Of these, how many may be of one tenant.")
    ] = 1024
    tenant_weight: TenantWeight | TenantWeights = 1.0
