"""Every knob of Kvist, typed and documented; `docs/configuration.md` is generated from here."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MIB = 1 << 20
GIB = 1 << 30

BlockTokens = Annotated[
    Literal[16, 32, 64, 128, 256, 512, 1024],
    Meta(
        description="Tokens in a block: a power of two from 16 to 1024. Part of the keyspace, so "
        "changing it starts an empty cache."
    ),
]
_Share = Annotated[float, Meta(gt=0, le=1)]
TenantShare = Annotated[
    _Share,
    Meta(
        description="Fraction of the blocks in DRAM that any one tenant may hold; 1: no limit. A "
        "tenant that wants more gives up blocks of its own. A mapping (in YAML) gives tenants "
        'shares by name, "*" being all others. A tenant is what a request names in '
        "`kv_transfer_params` as `kvist.tenant`, else its cache salt, else the empty name. A block "
        "counts as that of the tenant who first wrote or loaded it."
    ),
]
TenantShares = Annotated[dict[str, _Share], Meta(min_length=1)]
# A size in bytes. `parse_size` has read texts such as "8GiB" before msgspec sees the value.
_SIZE = {"size": True}


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What every section has in common: frozen, keyword-only, no unknown fields."""


class DramConfig(_Section, frozen=True):
    """The DRAM tier."""

    capacity: Annotated[
        int | Literal["auto"],
        Meta(
            description="Bytes of the DRAM arena. `auto`: a quarter of the memory that is "
            "available at start, at most 8 GiB.",
            extra=_SIZE,
        ),
    ] = "auto"
    restore: Annotated[
        float,
        Meta(
            description="Part of DRAM that is filled after a start, in the background and into "
            "free memory only, with the blocks that were written to the SSD tier last. 0: none.",
            ge=0,
            le=1,
        ),
    ] = 1.0
    policy: Annotated[
        Literal[
            "leaf-lru",
            "value",
            "arc",
            "fifo",
            "gdsf",
            "lirs",
            "lru",
            "s3-fifo",
            "sieve",
            "w-tinylfu",
        ],
        Meta(
            description="Eviction order. `leaf-lru` evicts the least recently used block that no "
            "present block continues; `value` learns when blocks are used again and evicts what "
            "brings least; the others ignore the prefix tree."
        ),
    ] = "leaf-lru"


class SsdConfig(_Section, frozen=True):
    """The SSD tier."""

    enabled: Annotated[
        bool, Meta(description="Whether blocks are also kept on disk and survive a restart.")
    ] = True
    path: Annotated[
        Annotated[str, Meta(min_length=1)]
        | Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(min_length=1)],
        Meta(
            description="Folder of the segment log, made with mode 0700. One process owns it. A "
            "list of folders (in YAML) spreads new blocks over them by capacity; adding one moves "
            "nothing, one that fails costs its own blocks only."
        ),
    ] = "~/.cache/kvist"
    capacity: Annotated[
        int | Literal["auto"],
        Meta(
            description="Hard cap in bytes on what a folder holds. `auto`: a tenth of the disk "
            "space that is free at start (counting what the folder already holds as free), at "
            "most 64 GiB.",
            extra=_SIZE,
        ),
    ] = "auto"
    segment: Annotated[
        int,
        Meta(
            ge=MIB,
            description="Bytes of a segment file, the unit in which space is reclaimed; limited "
            "to an eighth of the capacity.",
            extra=_SIZE,
        ),
    ] = 256 * MIB
    fsync: Annotated[
        Literal["batch", "off"],
        Meta(
            description="`batch`: one fdatasync for each batch of blocks before they count as "
            "stored. `off`: never; a power cut can then lose recent blocks, but a checksum still "
            "guards every read."
        ),
    ] = "batch"
    io: Annotated[
        Literal["auto", "direct", "buffered"],
        Meta(
            description="`direct`: O_DIRECT, so that no block is in memory twice and the page "
            "cache stays the engine's; where a file system refuses it, buffered. `buffered`: "
            "through the page cache; blocks that it still holds are read faster after a restart. "
            "`auto` is `direct`."
        ),
    ] = "auto"
    engine: Annotated[
        Literal["auto", "uring", "pool"],
        Meta(
            description="What reads several blocks at once: io_uring or a pool of threads. `auto`: "
            "io_uring where the kernel grants it."
        ),
    ] = "auto"
    depth: Annotated[
        int, Meta(ge=1, le=1024, description="Reads that one thread has under way at once.")
    ] = 4
    insert: Annotated[
        Literal["all", "second-sight", "value"],
        Meta(
            description="Which blocks are written. `all`: every one, so that a restart finds what "
            "was computed. `second-sight`: those that are written or read a second time while "
            "they are remembered (eight times as many keys as DRAM holds blocks). `value`: those "
            "that `store.dram.policy=value` would rather keep than its next victim. What is "
            "refused lives in DRAM only."
        ),
    ] = "all"


class BreakerConfig(_Section, frozen=True):
    """When a failing medium is treated as absent."""

    window_s: Annotated[
        float, Meta(gt=0, description="Seconds over which failures are counted.")
    ] = 30.0
    failures: Annotated[
        int, Meta(ge=1, description="Failures within the window that open the breaker.")
    ] = 5
    open_s: Annotated[
        float, Meta(gt=0, description="Seconds until an open breaker lets one probe through.")
    ] = 10.0


class StoreConfig(_Section, frozen=True):
    """The block store."""

    dram: DramConfig = msgspec.field(default_factory=DramConfig)
    ssd: SsdConfig = msgspec.field(default_factory=SsdConfig)
    io_threads: Annotated[
        int, Meta(ge=1, le=64, description="Threads that move blocks between DRAM and disk.")
    ] = 2
    read_deadline_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds after which a block that has not arrived is a miss and its "
            "tokens are recomputed.",
        ),
    ] = 10.0
    ttl_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds after which a block that nobody used is gone from DRAM and disk; "
            "0: never. Blocks that were on disk at start count as used at start.",
        ),
    ] = 0.0
    tenant_quota: TenantShare | TenantShares = 1.0
    breaker: BreakerConfig = msgspec.field(default_factory=BreakerConfig)


class ConnectorConfig(_Section, frozen=True):
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
            "load that falls behind is cut off. `always`: everything that matched is loaded."
        ),
    ] = "planned"
    save_unseen: Annotated[
        Literal["auto", "always"],
        Meta(
            description="Whether blocks are saved that nobody has asked for before. `auto`: "
            "unless so little is ever asked for again that saves cost more than they spare."
        ),
    ] = "auto"
    copy_threads: Annotated[
        Annotated[int, Meta(ge=1, le=256)] | Literal["auto"],
        Meta(
            description="Threads that copy between the engine's pages and DRAM. `auto`: chosen "
            "by the connector from the cores it may use."
        ),
    ] = "auto"


class BlendConfig(_Section, frozen=True):
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


class RecordConfig(_Section, frozen=True):
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
            extra=_SIZE,
        ),
    ] = 256 * MIB


class EventsConfig(_Section, frozen=True):
    """KV events."""

    enabled: Annotated[
        bool, Meta(description="Whether the store announces blocks that come and go.")
    ] = True


class Config(_Section, frozen=True):
    """Every knob; the defaults are a working configuration."""

    block_tokens: BlockTokens = 128
    store: StoreConfig = msgspec.field(default_factory=StoreConfig)
    connector: ConnectorConfig = msgspec.field(default_factory=ConnectorConfig)
    blend: BlendConfig = msgspec.field(default_factory=BlendConfig)
    events: EventsConfig = msgspec.field(default_factory=EventsConfig)
    record: RecordConfig = msgspec.field(default_factory=RecordConfig)
