"""Words between gateways: sealed, ordered, bounded, and of no harm when they are lost or wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvist.assemble.gateway import open_gateway
from kvist.assemble.gateway_peers import gateway_peers
from kvist.config import GatewayPeersConfig, load_config
from kvist.core.errors import ConfigError
from kvist.gateway.limits import TenantLimits, Used
from kvist.gateway.peers import TOPIC, Peers, Word
from kvist.node.events import secret_of
from kvist.router.exchange import LoadReport, ReplicaLoad

LOAD = ReplicaLoad(1.0, 2, 1, 1000, 2, 3000, 10)
WAIT_S = 30.0
LOCAL = "tcp://127.0.0.1:*"
GOLDEN = (  # of `test_word_is_written_as_in_version_1`
    "84a46c6f616484a767617465776179a167a66e756d62657202a8626f6f6b65645f73cb3fe00000000000"
    "00a56c6f61647381a16187a771756575655f73cb3ff0000000000000a8726571756573747302a7776169"
    "74696e6701ae70726566696c6c5f746f6b656e73cd03e8a8636f6e746578747302ae636f6e746578745f"
    "746f6b656e73cd0bb8a6626c6f636b730aa47573656481a17485a87265717565737473cb3ff000000000"
    "0000a6746f6b656e73cb4000000000000000a9696e5f666c6967687403ad72657175657374735f6c6566"
    "74cb4010000000000000ab746f6b656e735f6c656674c0a577686f6c65c3a6666f726d617401"
)


class Booked:
    """A router that says what it was told to, and notes what it hears."""

    def __init__(self) -> None:
        self.number = 0
        self.heard: dict[str, LoadReport] = {}

    def report(self, gateway: str, now_s: float) -> LoadReport:
        self.number += 1
        return LoadReport(gateway, self.number, 1.0, {"a": LOAD})

    def hear(self, report: LoadReport, now_s: float) -> bool:
        before = self.heard.get(report.gateway)
        if before is not None and report.number <= before.number:
            return False
        self.heard[report.gateway] = report
        return True

    def forget_silent(self, now_s: float) -> None:
        return

    @property
    def other_gateways(self) -> int:
        return len(self.heard)


def until(done: Callable[[], bool], step: Callable[[], None]) -> None:
    """Steps until it has come to that."""
    give_up = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < give_up, "it did not come to that"
        step()


@pytest.fixture
def speaker() -> Iterator[zmq.Socket[bytes]]:
    """Somebody on this host who says what it likes."""
    socket = zmq.Context.instance().socket(zmq.PUB)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(LOCAL)
    yield socket
    socket.close()


def place_of(socket: zmq.Socket[bytes]) -> str:
    """Where it speaks."""
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))


def peers(*members: str, secret: str = "", router: Booked | None = None) -> Peers:
    """A gateway that tells on any port."""
    limits = TenantLimits(requests_per_min=60)
    return Peers(router or Booked(), limits, listen=LOCAL, members=members, secret=secret)


def test_word_reaches_the_others_and_not_oneself(tmp_path: Path) -> None:
    places = [f"ipc://{tmp_path}/{n}" for n in range(3)]
    routers = [Booked() for _ in places]
    all_ = [
        Peers(r, TenantLimits(requests_per_min=60), listen=place, members=places)
        for r, place in zip(routers, places, strict=True)
    ]

    def step() -> None:
        for one in all_:
            one.tell(0.0)
            one.hear(0.0)

    try:
        until(lambda: all(len(r.heard) == 2 for r in routers), step)
        for one, router in zip(all_, routers, strict=True):
            assert set(router.heard) == {o.name for o in all_} - {one.name}
            assert all(report.loads == {"a": LOAD} for report in router.heard.values())
    finally:
        for one in all_:
            one.close()


def test_what_is_heard_first_of_a_gateway_names_all_its_tenants() -> None:
    """Else what a tenant did there first would not be told from what it did before."""
    telling = TenantLimits(requests_per_min=60)
    teller = Peers(Booked(), telling, listen=LOCAL, members=())
    heard: list[bool] = []

    class Listening(TenantLimits):
        def hear(self, *_args: Any, whole: bool = True) -> None:
            heard.append(whole)

    listener = Peers(Booked(), Listening(), listen="", members=(teller.listens_at,))
    now_s = 100.0
    try:
        teller.tell(now_s)  # nobody hears it: the first of all

        def step() -> None:
            teller.tell(now_s + 0.1)
            listener.hear(now_s)

        until(lambda: bool(heard), step)
        assert heard[0]
    finally:
        teller.close()
        listener.close()


def test_only_who_knows_the_secret_hears_and_is_believed() -> None:
    secret, other = secret_of(b"a" * 32), secret_of(b"b" * 32)
    teller = peers(secret=secret)
    knows, stranger, open_ = Booked(), Booked(), Booked()
    listeners = [
        peers(teller.listens_at, secret=secret, router=knows),
        peers(teller.listens_at, secret=other, router=stranger),
        peers(teller.listens_at, router=open_),
    ]

    def step() -> None:
        teller.tell(0.0)
        for one in listeners:
            one.hear(0.0)

    try:
        until(lambda: bool(knows.heard), step)
        for _ in range(50):
            step()
        assert (stranger.heard, open_.heard) == ({}, {})
    finally:
        for one in (teller, *listeners):
            one.close()


def test_words_that_are_wrong_or_late_are_counted_and_change_nothing(
    speaker: zmq.Socket[bytes],
) -> None:
    router = Booked()
    one = peers(place_of(speaker), router=router)
    load = LoadReport("other", 5, 1.0, {"a": LOAD})
    word = msgspec.msgpack.encode(Word(load, {"": Used(1, 1, 1)}))
    old = msgspec.msgpack.encode(Word(msgspec.structs.replace(load, number=4), {}))
    newer = msgspec.msgpack.encode(Word(msgspec.structs.replace(load, number=6), {}, format=2))

    def mark(name: str) -> bytes:
        """A word of another gateway, which is heard when all before it was."""
        return msgspec.msgpack.encode(Word(msgspec.structs.replace(load, gateway=name), {}))

    def say(*frames: bytes) -> None:
        speaker.send_multipart([TOPIC, *frames])

    def until_heard(name: str) -> None:
        until(lambda: name in router.heard, lambda: one.hear(0.0))

    def begin() -> None:
        say(mark("first"))
        one.hear(0.0)

    try:
        until(lambda: bool(router.heard), begin)
        say(word)
        say(mark("second"))
        until_heard("second")
        assert router.heard["other"] == load
        before, heard = one.refused, one.heard
        for frames in ([b""], [b"\xc1"], [word, word], [word[:-1]], [old], [newer], [word]):
            say(*frames)
        say(mark("third"))
        until_heard("third")
        assert (one.refused, one.heard) == (before + 7, heard + 1)
        assert router.heard["other"] == load
    finally:
        one.close()


def test_word_is_written_as_in_version_1() -> None:
    word = Word(LoadReport("g", 2, 0.5, {"a": LOAD}), {"t": Used(1.0, 2.0, 3, 4.0, None)})
    packed = msgspec.msgpack.encode(word)
    assert msgspec.msgpack.decode(packed, type=Word) == word
    assert packed.hex() == GOLDEN


@pytest.mark.parametrize(
    ("knobs", "path", "remedy"),
    [
        ({"listen": "tcp://0.0.0.0:0"}, "listen", "secret_file"),
        ({"listen": "tcp://127.0.0.1:0", "members": "tcp://10.0.0.1:1"}, "members", "secret_file"),
        ({"listen": "127.0.0.1:0"}, "listen", "tcp://"),
        ({"listen": "tcp://127.0.0.1:99999"}, "listen", "PORT"),
        ({"listen": "tcp://[::1"}, "listen", "PORT"),
        ({"listen": "tcp://127.0.0.1:0", "secret_file": "/nowhere"}, "secret_file", "openssl"),
    ],
    ids=["others reach it", "elsewhere", "no endpoint", "no port", "no address", "no secret"],
)
def test_what_cannot_be_meant_is_refused(knobs: dict[str, str], path: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        gateway_peers(GatewayPeersConfig(**knobs), Booked(), TenantLimits())
    assert refused.value.path == f"$.gateway.peers.{path}"
    assert remedy in refused.value.remedy


def test_gateway_without_peers_tells_nobody() -> None:
    sets = ["gateway.replicas=http://127.0.0.1:1", "gateway.listen=127.0.0.1:0"]
    gateway, listener = open_gateway(load_config(env={}, sets=sets).config)
    listener.close()
    gateway.close()
    assert gateway.peers is None
