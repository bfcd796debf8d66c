"""The knobs of the gateway."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvist.config.disaggregation_schema import DisaggregationConfig
from kvist.config.gateway_peers_schema import GatewayEventsConfig, GatewayPeersConfig
from kvist.config.store_schema import MIB, SIZE, Section

_Rate = Annotated[int, Meta(ge=0)]
_RATE_WORDS = 'A mapping (in YAML) gives tenants their own by name, "*" being all others.'


class GatewayTlsConfig(Section, frozen=True):
    """The gateway's own certificate."""

    cert: Annotated[
        str, Meta(description="Certificate chain (PEM); with `key`, the gateway speaks TLS.")
    ] = ""
    key: Annotated[str, Meta(description="The private key of `cert` (PEM).")] = ""


class GatewayTimeoutsConfig(Section, frozen=True):
    """How long the gateway waits, for engines and for clients."""

    connect_s: Annotated[
        float, Meta(gt=0, description="Seconds to connect to a replica, before another is tried.")
    ] = 2.0
    first_token_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds to a stream's first token, of queueing and prefill, after which "
            "the replica counts as hung.",
        ),
    ] = 300.0
    token_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds between two tokens of a stream after which the replica counts "
            "as hung, and the stream goes on elsewhere.",
        ),
    ] = 30.0
    answer_s: Annotated[
        float, Meta(gt=0, description="Seconds to a whole answer that is not streamed.")
    ] = 900.0
    health_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds between two questions to a replica whether it is well, and how "
            "long its answer may take. After two without an answer its streams go on elsewhere.",
        ),
    ] = 2.0
    head_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds in which a client has to send a request's head, and for which "
            "an idle connection is kept.",
        ),
    ] = 20.0
    body_s: Annotated[
        float, Meta(gt=0, description="Seconds in which a client has to send a request's body.")
    ] = 60.0
    stall_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds after which a client that reads nothing is cut off, and in which "
            "one that is behind has to take 48 KiB.",
        ),
    ] = 60.0


class GatewayLimitsConfig(Section, frozen=True):
    """What a client, a tenant, and all of them together may ask."""

    body: Annotated[
        int,
        Meta(ge=1024, description="Bytes of one request's body; more is refused.", extra=SIZE),
    ] = 32 * MIB
    bodies: Annotated[
        int,
        Meta(
            ge=MIB,
            description="Bytes of all bodies that are held until their requests are done; beyond "
            "it requests are refused for a while.",
            extra=SIZE,
        ),
    ] = 1024 * MIB
    answers: Annotated[
        int,
        Meta(
            ge=MIB,
            description="Bytes of all answers that are no streams, which are held until their "
            "clients have taken them; beyond it such requests are refused for a while.",
            extra=SIZE,
        ),
    ] = 1024 * MIB
    connections: Annotated[
        int, Meta(ge=1, description="Connections of clients at once; more are closed.")
    ] = 20_000
    requests: Annotated[
        int, Meta(ge=1, description="Requests in flight at once; more are refused for a while.")
    ] = 16_384
    tenant_requests: Annotated[
        _Rate | Annotated[dict[str, _Rate], Meta(min_length=1)],
        Meta(description=f"Requests in flight of one tenant; 0: no limit. {_RATE_WORDS}"),
    ] = 0
    requests_per_min: Annotated[
        _Rate | Annotated[dict[str, _Rate], Meta(min_length=1)],
        Meta(
            description=f"Requests that a tenant may send in a minute; 0: no limit. {_RATE_WORDS}"
        ),
    ] = 0
    tokens_per_min: Annotated[
        _Rate | Annotated[dict[str, _Rate], Meta(min_length=1)],
        Meta(
            description="Tokens, of prompts and answers, that a tenant may use in a minute. An "
            "answer is never cut short: what it takes too much, the next request waits for. 0: no "
            f"limit. {_RATE_WORDS}"
        ),
    ] = 0


class GatewayConfig(Section, frozen=True):
    """The OpenAI-compatible front of several engines."""

    listen: Annotated[
        str,
        Meta(
            description="Address and port. Anything but loopback needs `operator_file`, and "
            "`tenants` for others, so that nobody uses the engines who should not."
        ),
    ] = "127.0.0.1:8080"
    replicas: Annotated[
        str | tuple[str, ...],
        Meta(
            description="URLs of the engines, such as `http://127.0.0.1:8001`, which all serve the "
            "same model: a list, or one text with commas. Behind one may stand "
            "`?events=tcp://HOST:5557&replay=tcp://HOST:5558` (where it publishes KV events, and "
            "replays them) and `node=NAME` (the Kvist node that it reads from, if it is not the "
            "only one on its host)."
        ),
    ] = ""
    tenants: Annotated[
        Annotated[dict[str, str], Meta(min_length=1)] | Literal["none"],
        Meta(
            description="Files with the API keys of tenants, by name (in YAML), of mode 0600: one "
            "line of 16 characters or more. `none`: whoever reaches the gateway may use it, and "
            "the client's own key goes to the engine."
        ),
    ] = "none"
    tenants_share: Annotated[
        bool,
        Meta(
            description="Whether what one tenant had computed spares others with the same "
            "beginning of a prompt computing it. They can then tell by the time to the first token "
            "what has been asked. Without, each tenant's requests get a cache salt of the tenant."
        ),
    ] = False
    operator_file: Annotated[
        str,
        Meta(
            description="File with the operator's key, of mode 0600: with it one sees `/metrics` "
            "and the replicas, and drains them. Needed with `tenants`."
        ),
    ] = ""
    engine_key_file: Annotated[
        str, Meta(description="File with the key that the engines want, of mode 0600.")
    ] = ""
    tokenizer: Annotated[
        str,
        Meta(
            description="Folder of the model, of which its tokenizer and chat template are read: a "
            "prompt is then known by its blocks before an engine is chosen. Empty: lengths are "
            "guessed, and prefixes play no part."
        ),
    ] = ""
    tokenizer_threads: Annotated[
        int, Meta(ge=1, le=64, description="Threads for prompts too long to be read at once.")
    ] = 2
    migrate: Annotated[
        Literal["exact", "sampled", "off"],
        Meta(
            description="What happens to a stream whose replica breaks when its client has tokens "
            "already. `exact`: it goes on elsewhere if the text is then the one that a single "
            "engine gives (greedy, or with a seed), else it ends with an error. `sampled`: other "
            "plain streams go on too, with tokens drawn anew. `off`: it ends with an error."
        ),
    ] = "exact"
    attempts: Annotated[
        int,
        Meta(ge=1, le=16, description="Replicas that one request is tried on before it fails."),
    ] = 3
    leave_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds that a gateway that ends still serves while `/readyz` says no, "
            "for load balancers to see it.",
        ),
    ] = 0.0
    drain_s: Annotated[
        float,
        Meta(gt=0, description="Seconds that requests may then take to end by themselves."),
    ] = 300.0
    otlp_endpoint: Annotated[
        str,
        Meta(
            description="URL to which traces go by OTLP over HTTP, such as "
            "`http://127.0.0.1:4318/v1/traces`. Empty: to none. Needs `pip install 'kvist[otel]'`."
        ),
    ] = ""
    disaggregation: DisaggregationConfig = msgspec.field(default_factory=DisaggregationConfig)
    tls: GatewayTlsConfig = msgspec.field(default_factory=GatewayTlsConfig)
    timeouts: GatewayTimeoutsConfig = msgspec.field(default_factory=GatewayTimeoutsConfig)
    limits: GatewayLimitsConfig = msgspec.field(default_factory=GatewayLimitsConfig)
    events: GatewayEventsConfig = msgspec.field(default_factory=GatewayEventsConfig)
    peers: GatewayPeersConfig = msgspec.field(default_factory=GatewayPeersConfig)
