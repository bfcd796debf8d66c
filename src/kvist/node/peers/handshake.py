"""Both sides of the handshake (`messages.py`). A stranger gets a few hundred bytes and seconds."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import NoReturn

from kvist.core.errors import NodeRefusedError
from kvist.node.keyspaces import Attach
from kvist.node.peers import messages as m
from kvist.node.peers.credentials import Credentials, same
from kvist.node.peers.wire import Wire
from kvist.node.protocol import ProtocolError, choose_protocol


class SelfMetError(NodeRefusedError):
    """The other node is this one."""


def greet(
    wire: Wire, credentials: Credentials, node: bytes, attach: Attach, until: float
) -> m.Welcome:
    """The reader's side; what the owner says at last.

    Raises:
        NodeRefusedError: the owner refuses, or is not to be believed; `SelfMetError`: it is us.
        ProtocolError: it speaks something else.
        OSError: the connection is broken, or `until` is over.
    """
    hello = wire.tell(
        m.Hello(m.MAGIC, m.OLDEST_PROTOCOL, m.NEWEST_PROTOCOL, node, os.urandom(m.NONCE_BYTES)),
        until,
    )
    raw, challenge = _answer(wire, m.MOST_STRANGER_BYTES, until)
    if not isinstance(challenge, m.Challenge):
        raise ProtocolError("the handshake went another way")
    if not m.OLDEST_PROTOCOL <= challenge.protocol <= m.NEWEST_PROTOCOL:
        raise ProtocolError(f"that node chose protocol {challenge.protocol}, which was not offered")
    if challenge.node == node:
        raise SelfMetError("that is this node itself", for_good=True)
    if challenge.token != bool(credentials.token):
        raise NodeRefusedError(
            "that node demands a token, and this one has none"
            if challenge.token
            else "that node does not ask for the token, so it cannot prove that it knows it"
        )
    wire.tell(m.Proof(credentials.proof_of_reader(hello, raw)), until)
    _, proof = _answer(wire, m.MOST_STRANGER_BYTES, until)
    if not isinstance(proof, m.Proof) or not same(
        proof.mac, credentials.proof_of_owner(hello, raw)
    ):
        raise NodeRefusedError("that node does not know the token")
    wire.tell(m.Want(attach.fingerprint, attach.layout, attach.block_bytes), until)
    _, welcome = _answer(wire, m.MOST_STRANGER_BYTES, until)
    if not isinstance(welcome, m.Welcome):
        raise ProtocolError("the handshake went another way")
    wire.protocol = challenge.protocol
    return welcome


def _answer(wire: Wire, most_bytes: int, until: float) -> tuple[bytes, m.Answer]:
    raw = wire.hear(most_bytes, until)
    answer = m.decode(m.ANSWER, raw[m.HEAD.size :])
    if isinstance(answer, m.Refused):
        raise NodeRefusedError(answer.reason)
    return bytes(raw), answer


def receive(
    wire: Wire,
    credentials: Credentials,
    node: bytes,
    held: Callable[[bytes], Attach | None],
    until: float,
) -> Attach:
    """The owner's side; what the reader wants. It has proven what `credentials` demand.

    Args:
        wire: the connection, on which TLS has been agreed upon already.
        credentials: what readers must know.
        node: the number of this process.
        held: what the blocks of a keyspace are like; `None` where no store of it is open.
        until: the reader must have finished by then.

    Raises:
        NodeRefusedError: the reader was refused, and told why.
        ProtocolError: it speaks something else, and was told so.
        OSError: the connection is broken, or `until` is over.
    """
    try:
        return _receive(wire, credentials, node, held, until)
    except ProtocolError as error:
        with contextlib.suppress(OSError):
            wire.tell(m.refusal(str(error)), until)
        raise


def _receive(
    wire: Wire,
    credentials: Credentials,
    node: bytes,
    held: Callable[[bytes], Attach | None],
    until: float,
) -> Attach:
    raw = bytes(wire.hear(m.MOST_STRANGER_BYTES, until))
    hello = m.decode(m.HELLO, raw[m.HEAD.size :])
    if hello.magic != m.MAGIC:
        raise ProtocolError(f"the first word is {hello.magic!r}, not {m.MAGIC!r}")
    ours = m.OLDEST_PROTOCOL, m.NEWEST_PROTOCOL
    protocol = choose_protocol(hello.oldest, hello.newest, ours=ours)
    if protocol is None:
        _refuse(
            wire,
            f"this node speaks peer protocols {ours[0]} to {ours[1]}, the other {hello.oldest} to "
            f"{hello.newest}; update the older one",
            until,
        )
    challenge = wire.tell(
        m.Challenge(protocol, node, os.urandom(m.NONCE_BYTES), bool(credentials.token)), until
    )
    proof = m.decode(m.PROOF, wire.hear(m.MOST_STRANGER_BYTES, until)[m.HEAD.size :])
    if not same(proof.mac, credentials.proof_of_reader(raw, challenge)):
        _refuse(wire, "the token is not this node's" if proof.mac else "a token is needed", until)
    wire.tell(m.Proof(credentials.proof_of_owner(raw, challenge)), until)
    want = m.decode(m.WANT, wire.hear(m.MOST_WANT_BYTES, until)[m.HEAD.size :])
    attach = Attach(want.fingerprint, want.layout, want.block_bytes)
    there = held(want.fingerprint)
    if there is not None and there != attach:
        _refuse(wire, disagreement(there, attach), until)
    wire.tell(m.Welcome(there is not None), until)
    return attach


def disagreement(held: Attach, wanted: Attach) -> str:
    """Why blocks of the same keyspace cannot be shared."""
    return (
        f"blocks of keyspace {held.fingerprint.hex()[:12]} have {held.block_bytes} bytes here "
        f"({held.layout[:100]}), {wanted.block_bytes} there ({wanted.layout[:100]})"
    )


def _refuse(wire: Wire, reason: str, until: float) -> NoReturn:
    with contextlib.suppress(OSError):
        wire.tell(m.refusal(reason), until)
    raise NodeRefusedError(reason)
