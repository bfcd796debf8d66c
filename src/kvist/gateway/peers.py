"""What gateways in front of the same engines tell each other, over ZMQ.

    PUB ["kvist-gateway", payload]  ──► SUB of each of the others          every `every_s`

A word says what is, not what changed: what the sender has booked (`router/exchange.py`) and what
its tenants used since its start (`limits.py`). So a lost word costs nothing but its age, and an old
one, which its number tells, is ignored. Each start of a gateway has a name that none had before.
Who is silent is forgotten, with all that it had booked. Nothing waits for anybody.

With a secret the words are sealed (CURVE), and who does not know it neither hears nor is believed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Protocol

import msgspec
import zmq
from msgspec import Meta

from kvist.core.errors import ConfigError
from kvist.gateway.limits import TenantLimits, Used
from kvist.node.events import Sockets, received, send
from kvist.router.exchange import LoadReport

_log = logging.getLogger(__name__)
TOPIC = b"kvist-gateway"
FORMAT = 1
MOST_WORD_BYTES = 16 << 20
_MOST_TAKEN = 1000  # words in one go
_TICK_S = 0.02
_WHOLE_S = 5.0
_FEW_TENANTS = 1000  # all of them are in every word: what a new gateway hears first is then whole
_NAME_BYTES = 8
_MOST_TENANTS = 1 << 16


class Word(msgspec.Struct, frozen=True):
    """What one gateway says.

    Attributes:
        load: what it has booked; its number orders the words.
        used: by tenant; those without a limit are left out.
        whole: whether `used` has all tenants, not only those that did something lately.
    """

    load: LoadReport
    used: Annotated[dict[str, Used], Meta(max_length=_MOST_TENANTS)]
    whole: bool = True
    format: int = FORMAT


class TellsLoads(Protocol):
    """A router that several gateways can share the knowledge of."""

    def report(self, gateway: str, now_s: float) -> LoadReport:
        """What it has booked."""
        ...

    def hear(self, report: LoadReport, now_s: float) -> bool:
        """Takes in what another one has booked; False for an old word."""
        ...

    def forget_silent(self, now_s: float) -> None:
        """Others that were not heard for too long book nothing."""
        ...

    @property
    def other_gateways(self) -> int:
        """Those whose bookings count now."""
        ...


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Word)


class Peers:
    """One gateway's part. For the gateway's loop."""

    def __init__(
        self,
        router: TellsLoads,
        limits: TenantLimits,
        *,
        listen: str,
        members: Sequence[str],
        secret: str = "",
        every_s: float = 0.1,
    ) -> None:
        """Binds `listen`, if it is given, and connects to all `members`, which may be oneself.

        Raises:
            ConfigError: others could reach `listen` and there is no secret, or a member is none.
            OSError: `listen` cannot be bound.
        """
        self.name = secrets.token_hex(_NAME_BYTES)
        self._router, self._limits, self._every_s = router, limits, every_s
        self._tell_s = self._whole_s = 0.0
        self.heard = self.refused = 0
        sockets = Sockets(secret)
        self._said: Any = sockets.server(zmq.PUB, listen) if listen else None
        self._others: list[Any] = []
        for member in members:
            socket = sockets.client(zmq.SUB, member)
            if socket is None:
                self.close()
                raise ConfigError(f"{member!r} is no endpoint", remedy="write tcp://HOST:PORT")
            socket.setsockopt(zmq.SUBSCRIBE, TOPIC)
            self._others.append(socket)

    @property
    def listens_at(self) -> str:
        """Where it tells; empty if nowhere."""
        if self._said is None:
            return ""
        return str(self._said.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode())

    async def run(self, clock: Callable[[], float]) -> None:
        """Tells and hears until it is cancelled."""
        while True:
            now_s = clock()
            self.hear(now_s)
            if now_s >= self._tell_s:
                self._tell_s = now_s + self._every_s
                self.tell(now_s)
            await asyncio.sleep(min(_TICK_S, self._every_s))

    def tell(self, now_s: float) -> None:
        """Says what holds now."""
        if self._said is None:
            return
        whole = now_s >= self._whole_s or self._limits.tenants <= _FEW_TENANTS
        if whole:
            self._whole_s = now_s + _WHOLE_S
        used = self._limits.used(now_s, whole=whole)
        word = Word(self._router.report(self.name, now_s), used, whole)
        send(self._said, [TOPIC, _encoder.encode(word)])

    def hear(self, now_s: float) -> None:
        """Takes in all that has come; what cannot be read, or is old, is counted."""
        self._limits.forget_silent(now_s)
        self._router.forget_silent(now_s)
        for socket in self._others:
            for _ in range(_MOST_TAKEN):
                frames = received(socket)
                if frames is None:
                    break
                self._take(frames, now_s)

    def measures(self) -> dict[str, float]:
        """What was heard, under the names of `kvist.metrics`."""
        return {
            "kvist_gateway_peers": self._router.other_gateways,
            "kvist_gateway_peer_words_total": self.heard,
            "kvist_gateway_peer_words_refused_total": self.refused,
        }

    def close(self) -> None:
        """Lets go of the sockets."""
        for socket in (self._said, *self._others):
            if socket is not None:
                socket.close()

    def _take(self, frames: Sequence[bytes], now_s: float) -> None:
        try:
            if len(frames) != 2 or len(frames[1]) > MOST_WORD_BYTES:
                raise msgspec.ValidationError("no word")
            word = _decoder.decode(frames[1])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.refused += 1
            _log.debug("a word of another gateway: %s", error)
            return
        if word.load.gateway == self.name:
            return
        if word.format != FORMAT or not self._router.hear(word.load, now_s):
            self.refused += 1
            return
        self._limits.hear(word.load.gateway, word.used, now_s, whole=word.whole)
        self.heard += 1
