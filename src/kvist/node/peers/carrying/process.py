"""A carrier's process: `... -m kvist.node.peers.carrying.process KIND CONTROL MEMORY SIZE PARENT`.

Maps the memory (a descriptor that it inherits), lets others read it, reads theirs into it, as the
node says on the control socket. It ends with its node: the kernel sees to that, whatever it does.
Waits are short only while something is on its way.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from kvist.core.errors import TierError
from kvist.node.peers.carrying import words as w
from kvist.node.peers.carrying.agents import Agent, Transfer
from kvist.node.peers.carrying.memory_agent import MemoryAgent
from kvist.node.peers.carrying.nixl_agent import NixlAgent
from kvist.node.protocol import ProtocolError, decode
from kvist.tiers.mapping import map_shared

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_BUSY_S = 1e-4
_SLOW_S = 2e-3  # the longest pause while something is on its way
_SLOWER = 1.25  # so that a pause is a small part of what has been waited for
_IDLE_S = 0.05  # agents that are at rest still answer each other


@dataclass(frozen=True, slots=True)
class _UnderWay:
    number: int
    transfer: Transfer


class Carrying:
    """Does what the node says, until it hangs up."""

    def __init__(self, link: socket.socket, agent: Agent, size_bytes: int) -> None:
        """`link`: a packet socket; `size_bytes`: of the agent's memory."""
        self._link, self._agent, self._size_bytes = link, agent, size_bytes
        self._names: dict[int, str] = {}
        self._strange: dict[int, str] = {}  # who could not be met, and why
        self._under_way: list[_UnderWay] = []
        self._readers = 0
        self._pause_s = _BUSY_S

    def run(self) -> None:
        """Returns when the node has hung up.

        Raises:
            TierError: the transport has failed as a whole.
            ProtocolError: the node said something that is no order.
            OSError: the socket is broken.
        """
        while True:
            busy = self._readers > 0 or bool(self._under_way)
            ready, _, _ = select.select([self._link], [], [], self._pause_s if busy else _IDLE_S)
            if ready:
                data = self._link.recv(w.MOST_PACKET_BYTES)
                if not data:
                    return
                self._obey(decode(w.ORDER, data))
                self._pause_s = _BUSY_S
            else:
                self._pause_s = min(_SLOWER * self._pause_s, _SLOW_S)
            self._agent.progress()
            self._settle()

    def _obey(self, order: w.Order) -> None:
        if isinstance(order, w.Attend):
            self._readers += order.more
        elif isinstance(order, w.Meet):
            self._meet(order)
        else:
            self._fetch(order)

    def _meet(self, order: w.Meet) -> None:
        known = self._names.pop(order.peer, None)
        self._strange.pop(order.peer, None)
        try:
            if order.agent:
                self._names[order.peer] = self._agent.meet(order.agent)
            elif known is not None:
                self._agent.leave(known)
        except TierError as error:
            self._strange[order.peer] = w.short(error)

    def _fetch(self, order: w.Fetch) -> None:
        name = self._names.get(order.peer)
        why = ""
        if name is None:
            why = self._strange.get(order.peer, "that agent is not known")
        elif any(p.offset < 0 or p.offset + p.size_bytes > self._size_bytes for p in order.pieces):
            why = "there is no such place in this memory"
        if name is None or why:
            self._say(w.Fetched(order.number, why, begun=False))
            return
        try:
            transfer = self._agent.fetch(name, order.pieces)
        except TierError as error:
            self._say(w.Fetched(order.number, w.short(error)))
            return
        self._under_way.append(_UnderWay(order.number, transfer))

    def _settle(self) -> None:
        """Tells what has come to an end."""
        left = []
        for one in self._under_way:
            try:
                if not one.transfer.done():
                    left.append(one)
                    continue
                why = ""
            except TierError as error:
                why = w.short(error)
            with contextlib.suppress(TierError):  # of what has failed, the handle is lost
                one.transfer.release()
            self._say(w.Fetched(one.number, why))
        if len(left) < len(self._under_way):
            self._pause_s = _BUSY_S
        self._under_way = left

    def _say(self, report: w.Report) -> None:
        self._link.send(w.packet(report))


def make_agent(kind: str, memory: memoryview, fd: int, address: int) -> Agent:
    """The agent of that kind.

    Raises:
        TierError: it cannot be had, or there is no such kind.
    """
    if kind == "nixl":
        return NixlAgent(address, memory.nbytes)
    if kind == "memory":
        return MemoryAgent(memory, fd, address)
    raise TierError(f"{kind!r} is no way to carry blocks")


def main(argv: Sequence[str]) -> int:
    """Carries until the node hangs up; what it says last is why it could not begin."""
    kind, *numbers = argv
    control, fd, size_bytes, parent = map(int, numbers)
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        return 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the node gets it too, and ends us when it is due
    with socket.socket(fileno=control) as link:
        try:
            memory, address = map_shared(fd, size_bytes)
            agent = make_agent(kind, memory, fd, address)
            link.send(w.packet(w.Ready(address, agent.contact())))
            Carrying(link, agent, size_bytes).run()
        except (TierError, ProtocolError, ValueError, OSError) as error:
            print(f"kvist carrier: {error}", file=sys.stderr)
            with contextlib.suppress(OSError):
                link.send(w.packet(w.Ready(0, b"", w.short(error))))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
