"""Every knob of Kvist, typed and documented; `docs/configuration.md` is generated from here."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvist.config.cluster_schema import ClusterConfig
from kvist.config.gateway_schema import GatewayConfig
from kvist.config.peers_schema import PeersConfig
from kvist.config.router_schema import RouterConfig
from kvist.config.store_schema import (
    MIB,
    SIZE,
    BlockTokens,
    Section,
    StoreConfig,
)


class HttpConfig(Section, frozen=True):
    """A node's blocks over HTTP."""

    listen: Annotated[
        str,
        Meta(
            description="Address and port, on loopback, on which a node answers over HTTP, such as "
            "`127.0.0.1:7333`. Empty: on none. Needs `pip install 'kvist[http]'`."
        ),
    ] = ""
    token_file: Annotated[
        str,
        Meta(
            description="File with the operator's token, of mode 0600: one line of 16 characters "
            "or more. Needed with `listen`."
        ),
    ] = ""
    tenants: Annotated[
        Annotated[dict[str, str], Meta(min_length=1)] | Literal["none"],
        Meta(
            description="Files with the tokens of tenants, by name (in YAML). A tenant sees, "
            "counts, pins, moves and evicts its own blocks alone."
        ),
    ] = "none"


class NodeConfig(Section, frozen=True):
    """The node of this host, and how engines reach it."""

    socket: Annotated[
        str,
        Meta(
            description="Path of the node's socket, in a folder of this user's with mode 0700. "
            "Empty: `kvist/node.sock` in XDG_RUNTIME_DIR, else `/tmp/kvist-UID/node.sock`."
        ),
    ] = ""
    keyspaces: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Models (keyspaces) that engines may use at once; each gets an equal part "
            "of the capacities of DRAM and SSD, and with more than one a subfolder of its own. A "
            "keyspace that no engine uses gives way to another.",
        ),
    ] = 1
    answer_s: Annotated[
        float,
        Meta(
            gt=0,
            le=60,
            description="Seconds after which a node that does not answer an engine counts as away, "
            "until it does.",
        ),
    ] = 1.0
    drain_s: Annotated[
        float,
        Meta(gt=0, description="Seconds that a node that ends may take to write what is dirty."),
    ] = 30.0
    peers: PeersConfig = msgspec.field(default_factory=PeersConfig)
    cluster: ClusterConfig = msgspec.field(default_factory=ClusterConfig)
    http: HttpConfig = msgspec.field(default_factory=HttpConfig)


class ConnectorConfig(Section, frozen=True):
    """What the connector inside an engine does."""

    load: Annotated[bool, Meta(description="Whether stored blocks are loaded.")] = True
    save: Annotated[bool, Meta(description="Whether computed blocks are saved.")] = True
    save_decode: Annotated[
        bool,
        Meta(description="Whether blocks filled by generated tokens are saved as well."),
    ] = True
    min_load_tokens: Annotated[
        int, Meta(ge=0, description="Matches shorter than this many tokens are recomputed.")
    ] = 0
    load_policy: Annotated[
        Literal["planned", "always"],
        Meta(
            description="`planned`: of what matched, as much is loaded as is predicted to be "
            "faster than computing it, from speeds that are learned while the engine works, and a "
            "load that falls behind is cut off. `always`: everything that matched is loaded, and "
            "what `blend` finds is blended."
        ),
    ] = "planned"
    save_unseen: Annotated[
        Literal["auto", "always"],
        Meta(
            description="Whether blocks are saved that nobody has asked for before. `auto`: "
            "unless so little is ever asked for again that saves cost more than they spare."
        ),
    ] = "auto"
    handover_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds that a request waits for blocks that a prefill engine has "
            "computed and is still saving; never longer than computing them is predicted to take.",
        ),
    ] = 1.0
    copy_threads: Annotated[
        Annotated[int, Meta(ge=1, le=256)] | Literal["auto"],
        Meta(
            description="Threads that copy between the engine's pages and DRAM. `auto`: chosen "
            "by the connector from the cores it may use."
        ),
    ] = "auto"


class BlendConfig(Section, frozen=True):
    """Reuse of cached text wherever it stands in a prompt. Changes answers, so it is off."""

    enabled: Annotated[
        bool,
        Meta(
            description="Whether text is also reused that was cached behind other text. Its KV is "
            "moved and repaired, not equal to that of a whole pass: answers change. All blocks are "
            "saved then, whatever `connector.save_unseen` says."
        ),
    ] = False
    ratio: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Part of the reused tokens that is computed again, as a mean over the "
            "layers: more gives answers nearer to those of a whole pass. 1: all of them.",
        ),
    ] = 0.15
    max_deviation: Annotated[
        float,
        Meta(
            gt=0,
            description="Mean deviation, relative to the size of K and V, of the tokens that "
            "would not be computed again, above which the whole prompt is.",
        ),
    ] = 0.1
    min_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description="Prompts with fewer reusable tokens behind their prefix than "
            "this are served without.",
        ),
    ] = 64
    max_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description="Tokens from a prompt's start that may be blended; what comes later is "
            "computed. The engine waits while a prompt is repaired.",
        ),
    ] = 32_768
    index_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description="Tokens of cached text that are kept to be found, 4 bytes each and half "
            "as much again for the index; beyond it the oldest are forgotten.",
        ),
    ] = 1 << 24


class RecordConfig(Section, frozen=True):
    """A trace of the traffic, for `kvist advise` and `kvist replay`."""

    path: Annotated[
        str,
        Meta(
            description="File that gets a line for each request: salted hashes of its blocks, and "
            "lengths, no text (`kvist record` reads it). Empty: nothing is recorded."
        ),
    ] = ""
    capacity: Annotated[
        int,
        Meta(
            ge=MIB,
            description="Bytes at which the file is put aside as FILE.1, replacing an older one.",
            extra=SIZE,
        ),
    ] = 256 * MIB


class EventsConfig(Section, frozen=True):
    """KV events."""

    enabled: Annotated[
        bool, Meta(description="Whether the store announces blocks that come and go.")
    ] = True


class Config(Section, frozen=True):
    """Every knob; the defaults are a working configuration."""

    block_tokens: BlockTokens = 128
    store: StoreConfig = msgspec.field(default_factory=StoreConfig)
    node: NodeConfig = msgspec.field(default_factory=NodeConfig)
    connector: ConnectorConfig = msgspec.field(default_factory=ConnectorConfig)
    blend: BlendConfig = msgspec.field(default_factory=BlendConfig)
    events: EventsConfig = msgspec.field(default_factory=EventsConfig)
    record: RecordConfig = msgspec.field(default_factory=RecordConfig)
    router: RouterConfig = msgspec.field(default_factory=RouterConfig)
    gateway: GatewayConfig = msgspec.field(default_factory=GatewayConfig)
