"""One block of the store, and the states it goes through.

    ABSENT ──write()──► WRITING ──commit()──► DIRTY ──written below──► CLEAN
       ▲                   │ release()          │ no tier below,         │
       │◄──────────────────┘                    │ or it is failing       │
       │◄────────────────────── evicted ◄───────┴────────────────────────┘
       └──read()──► LOADING ──bytes proven──► CLEAN
                       └── miss, error, cancelled ──► FAILED (and ABSENT)

* WRITING belongs to one write lease and is invisible to readers; others see it as present.
* LOADING is single flight: every reader of the key holds the same entry.
* `refs` counts the leases that hold the entry. `busy` says that a thread of ours moves its bytes:
  a loader fills the slot (LOADING) or the writer reads it (DIRTY). The slot of an entry that is
  referenced or busy is never given away.
* `detached` entries were cleared while somebody held them: no longer in the table, they keep
  their slot until the last holder lets go.
* CLEAN means that nothing is lost with the slot: the bytes are below, nothing is below at all, or
  the insert filter has `refused` the block. A refused block that is read and then admitted is
  DIRTY again.
* `lent`: read from another host, so that DIRTY though it may be, nothing is lost with the slot.
* `prefetched`: brought up by a wish, and not read since.
* `tenant`: whose share of DRAM the slot counts in: the first writer's, or the first reader's.
* FAILED entries own no slot; only leases still look at them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvist.core.keys import Key

NO_SLOT = -1


class State(Enum):
    """Where an entry stands; see the drawing above."""

    WRITING = "writing"
    LOADING = "loading"
    DIRTY = "dirty"
    CLEAN = "clean"
    FAILED = "failed"


class Idle(Enum):
    """Whether an entry could be evicted now, and at what price."""

    NO = "no"
    CLEAN = "clean"
    DIRTY = "dirty"


@dataclass(slots=True, eq=False)
class Entry:
    """A block that has, or had, a slot. Changed only under the store's lock."""

    key: Key
    parent: Key | None
    slot: int
    state: State
    refs: int = 0
    busy: bool = False
    pinned: bool = False
    detached: bool = False
    idle: Idle = Idle.NO
    tenant: str = ""
    prefetched: bool = False
    refused: bool = False
    lent: bool = False
    checksum: int | None = None  # of the bytes, as their writer took it
    since_s: float = 0.0  # when its bytes came to DRAM, by the store's clock

    @property
    def resident(self) -> bool:
        """Whether the slot holds the block's proven bytes."""
        return self.state is State.DIRTY or self.state is State.CLEAN
