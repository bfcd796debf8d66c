"""`Agent` over NIXL (`kvist[nixl]`): RDMA where there is any, else TCP or shared memory.

Which way bytes go is UCX's choice; its own environment variables (`UCX_TLS`, `UCX_NET_DEVICES`)
narrow it. Every exception of NIXL is a class of its own under `Exception`.

Source: https://github.com/ai-dynamo/nixl, `src/api/python/_api.py` (1.5).
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from types import ModuleType
from typing import Any, cast

from kvist.core.errors import TierError
from kvist.node.peers.carrying.words import Piece

_BACKEND = "UCX"
_MEMORY = "DRAM"
_DEVICE = 0
_DONE, _UNDER_WAY = "DONE", "PROC"


class NixlAgent:
    """See `agents.Agent`."""

    def __init__(self, address: int, size_bytes: int) -> None:
        """Registers the memory at `address`, which must outlive this.

        Raises:
            TierError: NIXL is not installed, or cannot be used here.
        """
        _hide_torch()
        with _mapped():
            from nixl import nixl_agent, nixl_agent_config

            # Without a thread of its own: it would spin, and `progress` is called anyway.
            settings = nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND])
            self._agent: Any = nixl_agent(f"kvist-{uuid.uuid4()}", settings)
            self._agent.register_memory([(address, size_bytes, _DEVICE, "")], _MEMORY)
        self._address = address

    def contact(self) -> bytes:
        """As of `Agent`."""
        with _mapped():
            return bytes(self._agent.get_agent_metadata())

    def meet(self, contact: bytes) -> str:
        """As of `Agent`."""
        with _mapped():
            name = self._agent.add_remote_agent(contact)
            return name.decode() if isinstance(name, bytes) else str(name)

    def leave(self, name: str) -> None:
        """As of `Agent`."""
        with _mapped():
            self._agent.remove_remote_agent(name)

    def fetch(self, name: str, pieces: Sequence[Piece]) -> NixlTransfer:
        """As of `Agent`."""
        ours = [(self._address + p.offset, p.size_bytes, _DEVICE) for p in pieces]
        theirs = [(p.remote, p.size_bytes, _DEVICE) for p in pieces]
        with _mapped():
            handle = self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(ours, _MEMORY),
                self._agent.get_xfer_descs(theirs, _MEMORY),
                name,
            )
            transfer = NixlTransfer(self._agent, handle)
            transfer.begin()
        return transfer

    def progress(self) -> None:
        """As of `Agent`; nobody sends notifications, but asking for them moves everything."""
        with _mapped():
            self._agent.get_new_notifs()


class NixlTransfer:
    """See `agents.Transfer`."""

    def __init__(self, agent: Any, handle: Any) -> None:
        """Owns the handle."""
        self._agent, self._handle = agent, handle
        self._state = _UNDER_WAY

    def begin(self) -> None:
        """Posts it; raises what NIXL raises."""
        self._state = self._agent.transfer(self._handle)

    def done(self) -> bool:
        """As of `Transfer`."""
        if self._state == _UNDER_WAY:
            with _mapped():
                self._state = self._agent.check_xfer_state(self._handle)
        if self._state not in (_DONE, _UNDER_WAY):
            raise TierError(f"the transfer ended as {self._state}")
        return bool(self._state == _DONE)

    def release(self) -> None:
        """As of `Transfer`."""
        with _mapped():
            self._handle.release()


def _hide_torch() -> None:
    """Spares the seconds that it takes to import a PyTorch without CUDA.

    NIXL would import it only to ask for the version of CUDA; nothing else here needs it.
    """
    with suppress(metadata.PackageNotFoundError):
        if metadata.version("torch").endswith("+cpu"):
            sys.modules.setdefault("torch", cast(ModuleType, None))


@contextmanager
def _mapped() -> Iterator[None]:
    """Everything that NIXL raises becomes one kind of error."""
    try:
        yield
    except TierError:
        raise
    except Exception as error:
        raise TierError(f"NIXL: {type(error).__name__}: {error}") from error
