"""The error tree. A miss is a value (`Outcome.MISS`), never an exception.

    KvistError
    ├── ConfigError(ValueError)            what the user wrote is wrong: path, origin, remedy
    │   └── UnsupportedError               the model, engine or version cannot be served
    ├── FormatError(ValueError)            bytes that are not what they claim to be
    │   ├── ChecksumError                  right shape, wrong bytes
    │   └── VersionError                   written by a newer Kvist
    ├── StoreError
    │   ├── NoSpaceError                   a reservation that cannot be met now
    │   ├── LeaseError(RuntimeError)       a lease used after it was released, or twice
    │   ├── ClosedError(RuntimeError)      the store or tier was closed
    │   ├── NodeAwayError(ConnectionError) no node answers on the socket
    │   ├── NodeRefusedError               a node does not want this client, and says why
    │   └── NodeRunningError               another node serves this socket
    ├── TierError(OSError)                 a medium failed
    │   ├── TierTimeout(TimeoutError)      ... by not answering before the deadline
    │   ├── TierFullError                  ... by having no space left
    │   └── TierBusyError                  ... it belongs to another process
    └── LayoutError(ValueError)            a page layout that we cannot map to canonical blocks

Only `connectors/fallback.py` turns a `KvistError` into "recompute".
"""

from __future__ import annotations


class KvistError(Exception):
    """Root of everything that Kvist raises on purpose."""


class ConfigError(KvistError, ValueError):
    """A configuration that cannot be used.

    `str()` is one line: the path of the knob, its origin, the fault, the remedy.
    """

    def __init__(self, message: str, *, path: str = "", origin: str = "", remedy: str = "") -> None:
        self.message = message
        self.path = path
        self.origin = origin
        self.remedy = remedy
        where = f"{path} ({origin}): " if path and origin else f"{path or origin}: "
        text = (where if path or origin else "") + message
        super().__init__(f"{text}; {remedy}" if remedy else text)


class UnsupportedError(ConfigError):
    """A model, engine or version that Kvist refuses rather than serve wrongly."""


class FormatError(KvistError, ValueError):
    """Bytes that are not what they claim to be."""


class ChecksumError(FormatError):
    """A header or payload whose checksum does not match."""


class VersionError(FormatError):
    """A format version that this Kvist does not read."""


class StoreError(KvistError):
    """A request that the store refuses."""


class NoSpaceError(StoreError):
    """A reservation that cannot be met now; nothing was reserved."""


class LeaseError(StoreError, RuntimeError):
    """A lease used after its release, or for a block that it does not hold."""


class ClosedError(StoreError, RuntimeError):
    """The store or tier was closed."""


class NodeAwayError(StoreError, ConnectionError):
    """No node answers on the socket."""


class NodeRefusedError(StoreError):
    """A node does not want this client. `for_good`: it will say the same again."""

    def __init__(self, reason: str, *, for_good: bool = False) -> None:
        self.for_good = for_good
        super().__init__(reason)


class NodeRunningError(StoreError):
    """Another node serves this socket."""


class TierError(KvistError, OSError):
    """A medium failed to read or write."""


class TierTimeout(TierError, TimeoutError):
    """A medium did not answer before the deadline."""


class TierFullError(TierError):
    """A medium has no space left (ENOSPC, EDQUOT or the byte cap)."""


class TierBusyError(TierError):
    """A medium belongs to another process that is alive."""


class LayoutError(KvistError, ValueError):
    """A page layout that cannot be mapped to the canonical block."""
