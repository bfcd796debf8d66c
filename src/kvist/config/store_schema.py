"""The knobs of the store and of its tiers."""

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
SIZE = {"size": True}


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What every section has in common: frozen, keyword-only, no unknown fields."""


class DramConfig(Section, frozen=True):
    """The DRAM tier."""

    capacity: Annotated[
        int | Literal["auto"],
        Meta(
            description="Bytes of the DRAM arena. `auto`: a quarter of the memory that is "
            "available at start, at most 8 GiB.",
            extra=SIZE,
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


class SsdConfig(Section, frozen=True):
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
            extra=SIZE,
        ),
    ] = "auto"
    segment: Annotated[
        int,
        Meta(
            ge=MIB,
            description="Bytes of a segment file, the unit in which space is reclaimed; limited "
            "to an eighth of the capacity.",
            extra=SIZE,
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
    codec: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=64,
            description="How blocks are encoded on disk. `raw`: as they are. `lossless`: about a "
            "third smaller, every bit comes back. `int8`, `fp8`, `int4`: two to three times "
            "smaller, but not what was computed: answers may change. `cachegen-1` (nearly exact) "
            "to `cachegen-7`, `cachegen-paper-1` to `-5`: smaller still, with the model's table "
            "in `store.ssd.table`. `+aead` behind any of them "
            "(or `aead` alone) seals blocks with `store.ssd.keys`. What an earlier setting wrote "
            "is still read, but lossy blocks only while this setting is lossy, and while it seals, "
            "sealed ones only.",
        ),
    ] = "raw"
    keys: Annotated[
        str,
        Meta(
            description="Where `aead` takes its keys from: a file that others cannot read, or "
            "`env:NAME` for an environment variable. A line for each key: an id, a space, 64 "
            "hexadecimal digits. The first seals, all open. A block whose key is not there is a "
            "miss."
        ),
    ] = ""
    table: Annotated[
        str,
        Meta(
            description="The model's table for `cachegen`: a file that `kvist codec profile` "
            "wrote. Blocks that were written with another table are misses."
        ),
    ] = ""


class RemoteConfig(Section, frozen=True):
    """The remote tier: a store that several hosts share."""

    url: Annotated[
        str,
        Meta(
            description="Where blocks are shared with other hosts: `file:///mnt/shared/kvist`, "
            "`redis://host:6379/0` (or `rediss`, `redis+cluster`, `rediss+cluster`), "
            "`s3://bucket/prefix`, "
            "`mooncake://master:50051`. Empty: nowhere. Who can write there can change what "
            "models say; see docs/remote.md."
        ),
    ] = ""
    capacity: Annotated[
        int,
        Meta(
            ge=0,
            description="Bytes that Kvist keeps there, the oldest blocks going first; every host "
            "should say the same. 0: as many as the medium takes, which then evicts by itself.",
            extra=SIZE,
        ),
    ] = 0
    connections: Annotated[
        int, Meta(ge=1, le=64, description="Calls to the remote that may be under way at once.")
    ] = 4
    timeout_s: Annotated[
        float, Meta(gt=0, description="Seconds after which a call to the remote has failed.")
    ] = 2.0
    retries: Annotated[
        int, Meta(ge=0, le=10, description="How often a call that failed is made again.")
    ] = 1
    bandwidth: Annotated[
        int,
        Meta(
            ge=0,
            description="Bytes a second to and from the remote, together; 0: no limit.",
            extra=SIZE,
        ),
    ] = 0
    probe_s: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Seconds that a look-up of a prompt may wait to hear whether the remote "
            "has blocks that this host does not know of. 0: never; the next look-up then knows.",
        ),
    ] = 0.005
    refresh_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds between two listings of what the remote holds; 0: only at start.",
        ),
    ] = 300.0
    index: Annotated[
        int,
        Meta(ge=1, description="Blocks of the remote that this host remembers, the newest."),
    ] = 250_000
    queue: Annotated[
        int,
        Meta(
            ge=MIB,
            description="Bytes of blocks in memory that wait to be sent when there is an SSD "
            "tier; what does not fit is not sent.",
            extra=SIZE,
        ),
    ] = 256 * MIB
    codec: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=64,
            description="How blocks are encoded for the remote: as `store.ssd.codec`, with "
            "`store.remote.keys` and `store.ssd.table`. With `aead`, who can write to the remote "
            "but has no key cannot change what models say.",
        ),
    ] = "raw"
    keys: Annotated[
        str,
        Meta(
            description="Where `aead` takes its keys for the remote from, as `store.ssd.keys`; "
            "the same on every host."
        ),
    ] = ""


class BreakerConfig(Section, frozen=True):
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


class StoreConfig(Section, frozen=True):
    """The block store."""

    where: Annotated[
        Literal["embedded", "node", "auto"],
        Meta(
            description="Which process owns the store. `embedded`: the engine's own. `node`: the "
            "node of this host (`kvist node`), whose DRAM and SSD all its engines share. `auto`: "
            "the node, which is started if there is none, and stays when the engine ends."
        ),
    ] = "embedded"
    dram: DramConfig = msgspec.field(default_factory=DramConfig)
    ssd: SsdConfig = msgspec.field(default_factory=SsdConfig)
    remote: RemoteConfig = msgspec.field(default_factory=RemoteConfig)
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
