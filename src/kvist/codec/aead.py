"""The codec `aead`: a payload that only a holder of the key can read or make.

AES-256-GCM over what the codecs before it made. The key is derived from a secret of the keyring and
the tenant, and what was sealed opens only as the block that it was sealed for: under its key, its
chain of codecs, its head. A payload's head names the secret in its `table` field (the id, padded
with zeros); the body is

    16  tenant tag      derived from the secret and the tenant's name, so that it says nothing of it
    12  nonce           random
     n  ciphertext, and 16 bytes of authentication

Associated data: head, tenant tag, chain, block key. With random nonces a tenant's key should not
seal more than 2³² blocks: rotate long before.

Source: NIST SP 800-38D (GCM), RFC 5869 (HKDF with SHA-256).
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING

from kvist.codec.keyring import Keyring
from kvist.codec.payload import (
    HEAD_BYTES,
    NO_LAYOUT,
    TABLE_BYTES,
    CodecId,
    PayloadHead,
    open_payload,
)
from kvist.core.errors import ConfigError, FormatError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    from kvist.codec.frame import Buffer

AEAD = "aead"
MAX_SEALED_BYTES = 2**31 - 1 - 16  # what the library takes at once
TAG_BYTES = 16
NONCE_BYTES = 12
_AUTH_BYTES = 16
_OVERHEAD_BYTES = TAG_BYTES + NONCE_BYTES + _AUTH_BYTES
_TAG_INFO = b"kvist aead 1 tenant tag "
_KEY_INFO = b"kvist aead 1 key "
_CACHED_TENANTS = 1024
_REMEDY = "pip install 'kvist[seal]', or leave aead out"


class Sealer:
    """Seals and opens payloads. Thread-safe; releases the GIL while it works."""

    def __init__(self, keyring: Keyring) -> None:
        """Takes the keys.

        Raises:
            ConfigError: the package `cryptography` is missing.
        """
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as exc:
            raise ConfigError(
                "aead needs the package cryptography", path="$.store.ssd.codec", remedy=_REMEDY
            ) from exc
        self._keyring = keyring
        self._cipher = lru_cache(_CACHED_TENANTS)(
            lambda id_, tag: AESGCM(_derive(keyring.secrets[id_], _KEY_INFO + tag, 32))
        )
        self._tag = lru_cache(_CACHED_TENANTS)(
            lambda tenant: _derive(
                keyring.secrets[keyring.writes], _TAG_INFO + tenant.encode(), TAG_BYTES
            )
        )

    def seal(self, payload: Buffer, *, context: bytes, tenant: str = "") -> bytes:
        """A payload that holds `payload`, and opens under the same `context` only.

        Raises:
            FormatError: `payload` is larger than `MAX_SEALED_BYTES`.
        """
        if len(payload) > MAX_SEALED_BYTES:
            raise FormatError(f"{len(payload)} bytes are too many to be sealed")
        writes = self._keyring.writes
        head = PayloadHead(
            CodecId.AEAD,
            raw_bytes=len(payload),
            body_bytes=len(payload) + _OVERHEAD_BYTES,
            table=writes.encode().ljust(TABLE_BYTES, b"\0"),
        ).pack()
        tag, nonce = self._tag(tenant), os.urandom(NONCE_BYTES)
        cipher: AESGCM = self._cipher(writes, tag)
        return b"".join((head, tag, nonce, cipher.encrypt(nonce, payload, head + tag + context)))

    def open(self, stored: memoryview, *, context: bytes) -> bytes:
        """What was sealed.

        Raises:
            FormatError: it was not sealed with a key of ours under `context`, or was changed.
        """
        from cryptography.exceptions import InvalidTag

        head, body = open_payload(stored, codec=CodecId.AEAD, layout=NO_LAYOUT, level=0)
        id_ = head.table.rstrip(b"\0").decode("ascii", errors="replace")
        if id_ not in self._keyring.secrets:
            raise FormatError("sealed with a key that is not ours")
        if head.raw_bytes > MAX_SEALED_BYTES or len(body) != head.raw_bytes + _OVERHEAD_BYTES:
            raise FormatError("a sealed payload of a length that contradicts its head")
        tag = bytes(body[:TAG_BYTES])
        nonce = body[TAG_BYTES : TAG_BYTES + NONCE_BYTES]
        cipher: AESGCM = self._cipher(id_, tag)
        bound = bytes(stored[:HEAD_BYTES]) + tag + context
        try:
            return cipher.decrypt(nonce, body[TAG_BYTES + NONCE_BYTES :], bound)
        except InvalidTag as exc:
            raise FormatError("a sealed payload that does not open") from exc


def _derive(secret: bytes, info: bytes, length_bytes: int) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), length_bytes, salt=None, info=info).derive(secret)
