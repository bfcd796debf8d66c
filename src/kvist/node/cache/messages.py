"""What a person asks of a node's blocks, and what it answers: over the socket and over HTTP.

On the socket these follow a `Control` that says `cache`, in protocol 2: each message is its length
(little-endian u32) and a MessagePack map of the fields and a `kind`. One request is under way at a
time, and each gets one answer. Over HTTP the same types are JSON (`http/openapi.py`).

Keys and fingerprints are hex digits. A `keyspace` is the beginning of a fingerprint, or empty where
only one is open. Where a request names a `tenant`, it sees and touches this tenant's blocks alone;
without, everybody's. Every field has a bound.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

FIRST_PROTOCOL = 2  # the first that has these messages
MOST_KEYS = 1024  # in one request
MOST_ITEMS = 1000  # in one page
MOST_WAIT_S = 10.0
MOST_TENANTS = 1000

Hex = Annotated[str, Meta(pattern="^[0-9a-f]*$", max_length=64)]
Key = Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
Keys = Annotated[tuple[Key, ...], Meta(min_length=1, max_length=MOST_KEYS)]
Parents = Annotated[tuple[Key | None, ...], Meta(max_length=MOST_KEYS)]
Name = Annotated[str, Meta(max_length=256)]
Cursor = Annotated[str, Meta(pattern="^[0-9a-f]*$", max_length=32)]
Limit = Annotated[int, Meta(ge=1, le=MOST_ITEMS)]
Wait = Annotated[float, Meta(ge=0, le=MOST_WAIT_S)]
Total = Annotated[int, Meta(ge=0)]
Place = Literal["dram", "ssd", "remote"]


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A part of a message."""


class _Request(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    gc=False,
    tag_field="kind",
    kw_only=True,
):
    """Common to all requests."""

    keyspace: Hex = ""
    tenant: Name | None = None


class _Reply(msgspec.Struct, frozen=True, gc=False, tag_field="kind"):
    """Common to all replies."""


# -- requests -------------------------------------------------------------------------------


class ShowKeyspaces(_Request, frozen=True, tag="keyspaces"):
    """→ `Keyspaces`: those that are open."""


class ListRuns(_Request, frozen=True, tag="runs"):
    """→ `RunPage`: runs of blocks. With a `cursor`, the rest of a list; else a new one."""

    tier: Place | None = None
    cursor: Cursor = ""
    limit: Limit = 100


class ListBlocks(_Request, frozen=True, tag="blocks"):
    """→ `BlockPage`. With a `cursor`, the rest of a list; else a new one.

    `ending`: only the prefix whose last key begins with these digits, from its first block on;
    `alone`: of that only the last block.
    """

    tier: Place | None = None
    ending: Hex = ""
    alone: bool = False
    cursor: Cursor = ""
    limit: Limit = 100


class ShowUsage(_Request, frozen=True, tag="usage"):
    """→ `Usage`: what each tenant has in each tier."""


class PinBlocks(_Request, frozen=True, tag="pin"):
    """→ `Changed`: blocks that are in DRAM stay there. `left`: those that are not there."""

    keys: Keys


class UnpinBlocks(_Request, frozen=True, tag="unpin"):
    """→ `Changed`."""

    keys: Keys


class EvictBlocks(_Request, frozen=True, tag="evict"):
    """→ `Changed`: blocks leave every tier. `left`: those leased, pinned, moving or absent."""

    keys: Keys


class MoveBlocks(_Request, frozen=True, tag="move"):
    """→ `Changed`: blocks come up to DRAM, or leave it for what is below.

    `parents` are the keys before each; empty where they are not known. What is not there after
    `deadline_s` is `left`.
    """

    keys: Keys
    to: Literal["dram", "ssd"]
    parents: Parents = ()
    deadline_s: Wait = 5.0


class ClearBlocks(_Request, frozen=True, tag="clear"):
    """→ `Cleared`: forgets all blocks of the keyspace, or the tenant's of it."""

    deadline_s: Wait = 5.0


# -- replies --------------------------------------------------------------------------------


class OpenKeyspace(_Part, frozen=True):
    """A model with its settings. `block_tokens` is 0 where the engine did not say."""

    fingerprint: Key
    block_bytes: Total
    block_tokens: Total
    engines: Total


class Keyspaces(_Reply, frozen=True, tag="keyspaces"):
    """Answers `ShowKeyspaces`."""

    keyspaces: tuple[OpenKeyspace, ...]


class ShownRun(_Part, frozen=True):
    """Blocks that continue each other. A `tenant` of `null`: nobody is known."""

    first: Key
    last: Key
    tier: Place
    tenant: str | None
    blocks: Total
    size_bytes: Total
    pinned_blocks: Total
    leased_blocks: Total
    age_s: float | None


class RunPage(_Reply, frozen=True, tag="runs"):
    """A part of a list; the rest is behind `cursor`, unless that is empty."""

    keyspace: Key
    runs: tuple[ShownRun, ...]
    cursor: Cursor


class ShownBlock(_Part, frozen=True):
    """A block in one tier; `state` is `clean` or `dirty`, `age_s` since it came to DRAM."""

    key: Key
    parent: Key | None
    tier: Place
    tenant: str | None
    size_bytes: Total
    state: str
    pinned: bool
    leased: bool
    age_s: float | None


class BlockPage(_Reply, frozen=True, tag="blocks"):
    """A part of a list; the rest is behind `cursor`, unless that is empty."""

    keyspace: Key
    blocks: tuple[ShownBlock, ...]
    cursor: Cursor


class TenantUsage(_Part, frozen=True):
    """What a tenant has in a tier."""

    tier: Place
    tenant: str | None
    blocks: Total
    size_bytes: Total
    pinned_blocks: Total


class Usage(_Reply, frozen=True, tag="usage"):
    """Answers `ShowUsage`, the largest first; `omitted` smaller ones are not in it."""

    keyspace: Key
    usage: tuple[TenantUsage, ...]
    omitted: Total


class Changed(_Reply, frozen=True, tag="changed"):
    """Blocks that were changed, that were so already, and that were left as they are."""

    changed: Total
    present: Total
    left: Total


class Cleared(_Reply, frozen=True, tag="cleared"):
    """Blocks known to be gone; `complete`: nothing more could go."""

    blocks: Total
    complete: bool


class Denied(_Reply, frozen=True, tag="denied"):
    """The request cannot be met. `fault` says whose it is: the `request`'s or the `store`'s."""

    fault: Literal["request", "store"]
    text: Annotated[str, Meta(max_length=2048)]


Request = (
    ShowKeyspaces
    | ListRuns
    | ListBlocks
    | ShowUsage
    | PinBlocks
    | UnpinBlocks
    | EvictBlocks
    | MoveBlocks
    | ClearBlocks
)
Reply = Keyspaces | RunPage | BlockPage | Usage | Changed | Cleared | Denied
