"""What an owner lends, and for how long; what a reader makes of answers that are no loans."""

from __future__ import annotations

import errno
import random
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from node_process import attach
from peer_thread import LIMIT_S, RawPeer, owner, peering, until

from kvist.core.errors import KvistError, TierError
from kvist.native import checksum
from kvist.native.answer import BLOCK, HIT, MISS
from kvist.node.peers import messages as m
from kvist.node.peers.carrying.lane import CarriedCounts, CarriedWire, Lane
from kvist.node.peers.carrying.showcase import Showcase
from kvist.node.peers.carrying.staging import Lot
from kvist.node.peers.carrying.transport import Carrying
from kvist.node.peers.carrying.words import Piece
from kvist.node.peers.wire import Wire
from kvist.store import TieredStore
from kvist.testing.store_suite import RAW_BYTES, content, key
from kvist.tiers.dram import padded

KEYS = [key(n) for n in range(4)]
START_S = 90.0
MUTATIONS = 4000
SOON_S = 0.5
SEED = 11


@pytest.fixture
def showcase() -> Iterator[Showcase]:
    """Of carriers that need no package."""
    found = Showcase("memory")
    yield found
    found.close()


def carry(raw: RawPeer, kind: str = "memory") -> bytes:
    """What the owner says of its carrier."""
    raw.say(m.Carry(kind))
    return m.decode(m.CARRIED, (raw.hear() or b"")[m.HEAD.size :]).contact


def lend(raw: RawPeer, keys: Sequence[bytes], deadline_s: float = LIMIT_S) -> m.Lent:
    """What the owner lends."""
    raw.say(m.Lend(b"".join(keys), deadline_s))
    return m.decode(m.LENT, (raw.hear() or b"")[m.HEAD.size :])


def ready(raw: RawPeer) -> None:
    """Waits until the owner's carrier can be read from."""
    until(lambda: carry(raw) != b"", START_S)


def test_loan_is_held_until_the_reader_says_anything_else(showcase: Showcase) -> None:
    with owner(showcase=showcase) as (server, store), RawPeer(server) as raw:
        assert raw.greet() == m.Welcome(True)
        ready(raw)
        lent = lend(raw, [*KEYS, key(9)])
        assert lent.current
        loans = m.unpack_loans(lent.loans, [*KEYS, key(9)])
        assert [loan for loan, *_ in loans] == [m.Loan.LENT] * 4 + [m.Loan.MISS]
        assert [sum_ for _, _, sum_ in loans[:4]] == [checksum(content(k)) for k in KEYS]
        assert store.stats().leases == 1
        raw.say(m.Returned())
        until(lambda: store.stats().leases == 0)
        lend(raw, KEYS)
        lend(raw, KEYS[:1])
        assert store.stats().leases == 1
        raw.say(m.Have(key(0)))
        assert raw.hear() is not None
        assert store.stats().leases == 0
        assert server.counts.sent_blocks == 4 + 4 + 1
        assert server.counts.absent_blocks == 1


def test_loan_is_taken_back_at_the_deadline_and_the_reader_hung_up_on(showcase: Showcase) -> None:
    with owner(showcase=showcase) as (server, store), RawPeer(server) as raw:
        raw.greet()
        ready(raw)
        lend(raw, KEYS, 0.2)
        assert store.stats().leases == 1
        assert raw.take(1) is None
        until(lambda: store.stats().leases == 0)


def test_loan_of_a_reader_that_is_gone_is_taken_back(showcase: Showcase) -> None:
    with owner(showcase=showcase) as (server, store):
        with RawPeer(server) as raw:
            raw.greet()
            ready(raw)
            lend(raw, KEYS)
            assert store.stats().leases == 1
        until(lambda: store.stats().leases == 0)


def test_who_has_not_asked_how_to_read_is_told_to_ask(showcase: Showcase) -> None:
    with owner(showcase=showcase) as (server, store), RawPeer(server) as raw:
        raw.greet()
        lent = lend(raw, KEYS)
        assert not lent.current
        assert {loan for loan, *_ in m.unpack_loans(lent.loans, KEYS)} == {m.Loan.ASK}
        raw.say(m.Have(key(0)))
        assert raw.hear() is not None
        assert store.stats().leases == 0


def test_owner_without_carriers_or_with_others_offers_none(showcase: Showcase) -> None:
    with owner() as (server, _), RawPeer(server) as raw:
        raw.greet()
        assert carry(raw) == b""
    with owner(showcase=showcase) as (server, _), RawPeer(server) as raw:
        raw.greet()
        assert carry(raw, "nixl") == b""


def test_carrier_of_a_store_that_has_closed_is_ended(
    showcase: Showcase, monkeypatch: pytest.MonkeyPatch
) -> None:
    with owner(showcase=showcase) as (server, _), RawPeer(server) as raw:
        raw.greet()
        ready(raw)
        assert len(showcase.pids()) == 1
        monkeypatch.setattr(server, "_find", lambda fingerprint: None)
        until(lambda: showcase.pids() == [])
        lent = lend(raw, KEYS)
        assert not lent.current
        assert {loan for loan, *_ in m.unpack_loans(lent.loans, KEYS)} == {m.Loan.ASK}


def test_peers_of_protocol_2_get_their_blocks_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "NEWEST_PROTOCOL", 2)
    carrying = Carrying("memory")
    with owner() as (server, _):
        lender = peering(server, carrying=carrying).lender(attach(1))
        assert lender is not None
        until(lambda: carrying.facts()["reads"] != [], START_S)
        until(lambda: lender.contains_run(KEYS) == 4)
        outs = [bytearray(RAW_BYTES) for _ in KEYS]
        list(lender.read_many(list(zip(KEYS, map(memoryview, outs), strict=True))))
        assert [bytes(o) for o in outs] == [content(k) for k in KEYS]
        assert carrying.counts.blocks == 0
        lender.close()
    carrying.close()


# -- answers that are almost right ----------------------------------------------------------

_STRIDE = padded(RAW_BYTES)
_BASE = 1 << 40


@dataclass
class FakeStaging:
    """One lot, and a carrier that reads from a buffer of this process at once."""

    memory: bytes
    lot_bytes: int = 8 * _STRIDE
    lent: int = 0
    spoilt: int = 0
    carrier: Any = field(init=False)

    def __post_init__(self) -> None:
        self.carrier = SimpleNamespace(
            shown=object(), fetch=self.fetch, forget=lambda contact: None
        )
        self.bytes = bytearray(self.lot_bytes)

    def fetch(self, contact: bytes, pieces: Sequence[Piece]) -> Future[None]:
        future: Future[None] = Future()
        for piece in pieces:
            at = piece.remote - _BASE
            if at < 0 or at + piece.size_bytes > len(self.memory):
                future.set_exception(TierError(errno.EIO, "there is no such place"))
                return future
            end = piece.offset + piece.size_bytes
            self.bytes[piece.offset : end] = self.memory[at : at + piece.size_bytes]
        future.set_result(None)
        return future

    def take(self) -> Lot | None:
        self.lent += 1
        return Lot(0, memoryview(self.bytes))

    def give(self, lot: Lot) -> None:
        self.lent -= 1

    def spoil(self, lot: Lot) -> None:
        self.lent -= 1
        self.spoilt += 1


def test_reader_takes_no_wrong_byte_from_loans_that_are_almost_right() -> None:
    chance = random.Random(SEED)
    memory = b"".join(content(k).ljust(_STRIDE, b"\0") for k in KEYS)
    loans = [
        m.pack_loan(KEYS[0], m.Loan.LENT, _BASE, checksum(content(KEYS[0]))),
        m.pack_loan(KEYS[1], m.Loan.LENT, _BASE + _STRIDE, checksum(content(KEYS[1]))),
        m.pack_loan(KEYS[2], m.Loan.SURELY_NOT, 7, 9),
        m.pack_loan(KEYS[3], m.Loan.ASK),
    ]
    sent = BLOCK.pack(0, HIT, RAW_BYTES, checksum(content(KEYS[3])), KEYS[3]) + content(KEYS[3])
    parts = [m.encode(m.Carried(b"there")), m.encode(m.Lent(True, b"".join(loans))), sent]
    hits = spoilt = 0
    for n in range(MUTATIONS):
        data = bytearray(b"".join(parts))
        if n % 4 == 1:
            del data[chance.randrange(len(data)) :]
        elif n % 4:
            data[chance.randrange(len(data) if n % 4 == 2 else 300)] ^= 1 << chance.randrange(8)
        staging = FakeStaging(memory)
        lane = Lane("peer", "memory", staging, CarriedCounts(), block_bytes=RAW_BYTES)  # type: ignore[arg-type]
        ours, theirs = socket.socketpair()
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        wire = CarriedWire(Wire(ours), lane)
        outs = [bytearray(RAW_BYTES) for _ in KEYS]
        try:
            limit = time.monotonic() + SOON_S
            wire.ask(m.Read(b"".join(KEYS), SOON_S), limit)
            answers = wire.answers(KEYS, [memoryview(out) for out in outs])
            while answers.left:
                for at, found, position in wire.take(answers, limit, SOON_S, 0.0):
                    assert found in (HIT, MISS, 2)
                    assert found != HIT or bytes(outs[at]) == content(KEYS[at])
                    assert n or position == ((7, 9) if at == 2 else None)
                    hits += found == HIT
                    assert n or (found == HIT) is (at != 2)
        except (KvistError, OSError):
            assert n
        wire.close()
        theirs.close()
        assert staging.lent == 0
        spoilt += staging.spoilt
    assert hits > MUTATIONS
    assert spoilt > 0


def test_showcase_that_was_closed_shows_nothing(showcase: Showcase) -> None:
    with owner(showcase=showcase) as (server, store):
        assert isinstance(store, TieredStore)
        showcase.close()
        assert showcase.carrier("memory", b"k", store) is None
        assert server.counts.sent_blocks == 0
