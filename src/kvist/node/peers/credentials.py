"""What a node proves itself with to another: a token that both know, certificates, or both.

The token never crosses the wire. Each side draws a nonce; the reader proves first, the owner then,
each with an HMAC-SHA256 over both opening messages and a word that says which side it is, so that
no proof can be sent back or used again. A wrong owner is found out as well as a wrong reader.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import ssl
import stat
from dataclasses import dataclass, field
from pathlib import Path

from kvist.core.errors import ConfigError

LEAST_TOKEN_BYTES = 32
ENV_PREFIX = "env:"
_MOST_TOKEN_BYTES = 4096
_REMEDY = "make one: (umask 077; openssl rand -hex 32 > FILE)"
_READER, _OWNER = b"kvist-peer reader\0", b"kvist-peer owner\0"


@dataclass(frozen=True, slots=True)
class Credentials:
    """None, a token, TLS contexts for either side, or both. Not to be printed."""

    token: bytes = field(default=b"", repr=False)
    to_others: ssl.SSLContext | None = None
    from_others: ssl.SSLContext | None = None

    @property
    def proven(self) -> bool:
        """Whether who is on the other side of a connection is known at all."""
        return bool(self.token) or self.to_others is not None

    def proof_of_reader(self, hello: bytes, challenge: bytes) -> bytes:
        """What the reader shows, from both opening messages."""
        return self._proof(_READER, hello, challenge)

    def proof_of_owner(self, hello: bytes, challenge: bytes) -> bytes:
        """What the owner shows."""
        return self._proof(_OWNER, hello, challenge)

    def _proof(self, side: bytes, hello: bytes, challenge: bytes) -> bytes:
        if not self.token:
            return b""
        return hmac.new(self.token, side + hello + challenge, hashlib.sha256).digest()


def same(a: bytes, b: bytes) -> bool:
    """Whether two proofs are equal, in a time that does not say where they differ."""
    return hmac.compare_digest(a, b)


def read_token(source: str, knob: str) -> bytes:
    """The token in a file, or of `env:NAME` in that variable, without white space around it.

    Raises:
        ConfigError: it cannot be read, others could read it, or it is too short to be safe.
    """
    name = source.removeprefix(ENV_PREFIX)
    token = os.environ.get(name, "").strip().encode() if name != source else _in_file(source, knob)
    if len(token) < LEAST_TOKEN_BYTES:
        raise ConfigError(
            f"the token in {source} has {len(token)} characters, {LEAST_TOKEN_BYTES} are the least",
            path=f"$.{knob}",
            remedy=_REMEDY,
        )
    return token


def _in_file(source: str, knob: str) -> bytes:
    path = Path(source).expanduser()
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            token = file.read(_MOST_TOKEN_BYTES).strip()
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}",
            path=f"$.{knob}",
            remedy=_REMEDY,
        ) from error
    if stat.S_IMODE(about.st_mode) & 0o077:
        raise ConfigError(
            f"{path} is open to other users", path=f"$.{knob}", remedy=f"chmod 600 {path}"
        )
    return token


def tls_contexts(cert: Path, key: Path, ca: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS 1.3 to others and from others, with certificates demanded both ways.

    Raises:
        ConfigError: a file cannot be used.
    """
    contexts = []
    for kind in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
        context = ssl.SSLContext(kind)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(cert, key)
            context.load_verify_locations(ca)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ConfigError(
                f"cannot be used with {key} and {ca}: {error}",
                path="$.node.peers.tls_cert",
                remedy="give a PEM certificate, its key, and the CA that signed every node's",
            ) from error
        contexts.append(context)
    return contexts[0], contexts[1]
