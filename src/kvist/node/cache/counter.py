"""The connections of `kvist cache` and HTTP at the node's loop: one request at a time, off it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvist.core.errors import StoreError
from kvist.node.cache import messages as m
from kvist.node.cache.desk import CacheDesk
from kvist.node.cache.wire import decode_request
from kvist.node.keyspaces import Keyspaces
from kvist.node.peer import Peer, Stage
from kvist.node.protocol import ProtocolError
from kvist.node.work import SlowWork

IDLE_S = 60.0  # a connection that asks nothing for so long is closed
Send = Callable[[Peer, msgspec.Struct], None]


class Counter:
    """Called on the loop's thread. Its own threads do the work: it must not delay an engine's."""

    def __init__(
        self,
        keyspaces: Keyspaces,
        poke: Callable[[], None],
        clock: Callable[[], float],
        send: Send,
    ) -> None:
        """`poke` makes the loop call `deliver` soon."""
        self._keyspaces, self._clock, self._send = keyspaces, clock, send
        self._work = SlowWork(poke)
        self.desk = CacheDesk(clock)

    def open(self, peer: Peer) -> None:
        """The peer may ask from now on."""
        peer.stage, peer.leave_at = Stage.ASKING, self._clock() + IDLE_S

    def take(self, peer: Peer, body: bytes) -> None:
        """A request.

        Raises:
            ProtocolError: it is none, or another is under way.
        """
        if peer.stage is Stage.WAITING:
            raise ProtocolError("a request came before the answer to the last one")
        request, keyspaces = decode_request(body), list(self._keyspaces)
        peer.stage = Stage.WAITING
        try:
            self._work.submit(
                lambda: self.desk.answer(keyspaces, request), lambda reply: self._done(peer, reply)
            )
        except StoreError as error:
            self._done(peer, error)

    def deliver(self) -> None:
        """Sends the answers that there are."""
        self._work.deliver()

    def tick(self) -> None:
        """Now and then: drops lists that nobody goes on with."""
        self.desk.expire()

    def stop(self, timeout_s: float) -> None:
        """Ends the threads."""
        self._work.stop(timeout_s)

    def _done(self, peer: Peer, result: object) -> None:
        if peer.stage is not Stage.WAITING:
            return
        self.open(peer)
        if isinstance(result, msgspec.Struct):
            self._send(peer, result)
        else:
            self._send(peer, m.Denied("store", str(result)[:2000]))
