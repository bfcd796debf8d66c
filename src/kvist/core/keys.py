"""Keys: `key_i = BLAKE3(key_{i-1} ‖ tokens_i ‖ extra_i)`, `key_{-1}` being the seed.

A key is 32 bytes and names a whole prefix in a keyspace. Tokens are little-endian u32, so any
language can compute a key. `extra_i` is empty, or the 32-byte digest of the multimodal content
that begins or continues in block i. The seed binds keyspace, LoRA adapter and tenant salt. This
module only says which bytes are hashed; `kvist.native` hashes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

KEY_BYTES = 32
Key = bytes

_SEED_DOMAIN = b"kvist.seed.v1"


@dataclass(frozen=True, slots=True)
class RequestScope:
    """What a request adds to the keyspace: its LoRA adapter's digest and its tenant salt."""

    lora: str = ""
    salt: str = ""


def seed_bytes(fingerprint: bytes, scope: RequestScope) -> bytes:
    """The bytes whose digest seeds a request's chain; every field carries its length."""
    parts = [_SEED_DOMAIN, fingerprint, scope.lora.encode(), scope.salt.encode()]
    return b"".join(len(p).to_bytes(4, "little") + p for p in parts)


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Tokens as little-endian u32.

    Raises:
        OverflowError: a token is negative or above 2**32 - 1.
    """
    return b"".join(t.to_bytes(4, "little") for t in tokens)
