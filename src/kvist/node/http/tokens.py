"""Who may ask over HTTP: bearer tokens from files that only their owner can read."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvist.core.errors import ConfigError

LEAST_CHARS = 16
MOST_CHARS = 512
_SCHEME = b"bearer "


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: a tenant by name, or the operator (`None`)."""

    tenant: str | None


class Tokens:
    """The tokens that count, as digests."""

    def __init__(
        self, operator: str, tenants: Mapping[str, str], *, section: str = "$.node.http"
    ) -> None:
        """Tokens of the operator and, by name, of tenants; `section` of the configuration.

        Raises:
            ConfigError: two of them are the same, or a tenant has no name.
        """
        if "" in tenants:
            raise ConfigError(
                "a tenant has no name",
                path=f"{section}.tenants",
                remedy="name it, or leave it out",
            )
        self._known = [(_digest(operator.encode()), Caller(None))]
        self._known += [(_digest(t.encode()), Caller(name)) for name, t in tenants.items()]
        if len({digest for digest, _ in self._known}) < len(self._known):
            raise ConfigError(
                "two callers have the same token",
                path=section,
                remedy="give each a token of its own, such as from `openssl rand -hex 32`",
            )

    def who(self, authorization: bytes) -> Caller | None:
        """Whose token the `Authorization` header bears; `None`: nobody's.

        All are compared, each in constant time.
        """
        scheme, token = authorization[: len(_SCHEME)], authorization[len(_SCHEME) :]
        given = _digest(token)
        found = None
        for digest, caller in self._known:
            if hmac.compare_digest(digest, given):
                found = caller
        return found if scheme.lower() == _SCHEME else None


def read_token(path: Path, knob: str) -> str:
    """The token in a file, which is its only line.

    Raises:
        ConfigError: it cannot be read, others can read it, or it holds no token.
    """
    try:
        with path.expanduser().open("rb") as file:
            found = os.fstat(file.fileno())
            text = file.read(MOST_CHARS + 2).decode("ascii", errors="replace").strip()
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror or error}",
            path=knob,
            remedy=f"make it: (umask 077; openssl rand -hex 32 > {path})",
        ) from error
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(f"others can read {path}", path=knob, remedy=f"run: chmod 600 {path}")
    if not LEAST_CHARS <= len(text) <= MOST_CHARS or not text.isprintable() or " " in text:
        raise ConfigError(
            f"{path} holds no token: one line of {LEAST_CHARS} to {MOST_CHARS} characters",
            path=knob,
            remedy=f"make one: openssl rand -hex 32 > {path}",
        )
    return text


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
