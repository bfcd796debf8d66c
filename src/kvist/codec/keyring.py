"""Where sealing keys come from: a file or an environment variable, never the configuration itself.

The text has a line for each key: its id (1 to 16 letters, digits, `.`, `_`, `-`), a space, and 64
hexadecimal digits. Empty lines and lines that begin with `#` are skipped. The first key seals what
is written, all are tried by their id for what is read: to rotate, put a new line on top.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvist.core.errors import ConfigError

SECRET_BYTES = 32
ENV_PREFIX = "env:"
_ID = re.compile(r"[A-Za-z0-9._-]{1,16}")
_SECRET = re.compile(r"[0-9A-Fa-f]{64}")
_PATH = "$.store.ssd.keys"
_LINE = "write a line for each key: its id, a space, and 64 hexadecimal digits"
_MAX_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Keyring:
    """Secrets by id; `writes` is the id that seals. Secrets show in no `repr`."""

    writes: str
    secrets: Mapping[str, bytes] = field(repr=False)


def read_keyring(source: str, *, env: Mapping[str, str] | None = None) -> Keyring:
    """The keys in the file `source`, or with `env:NAME` in the environment variable NAME.

    Raises:
        ConfigError: there is no such file or variable, others may read the file, or it holds
            something else. The message never shows what was read.
    """
    if not source:
        raise ConfigError(
            "a sealed cache needs keys", path=_PATH, remedy="name a file, or env:VARIABLE"
        )
    text = _from_env(source, env) if source.startswith(ENV_PREFIX) else _from_file(source)
    secrets: dict[str, bytes] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        good = len(words) == 2 and _ID.fullmatch(words[0]) and _SECRET.fullmatch(words[1])
        if not good or words[0] in secrets:
            raise ConfigError(
                f"line {number} of {source} is not a key, or one with an id that was used",
                path=_PATH,
                remedy=_LINE,
            )
        secrets[words[0]] = bytes.fromhex(words[1])
    if not secrets:
        raise ConfigError(f"{source} holds no key", path=_PATH, remedy=_LINE)
    return Keyring(next(iter(secrets)), secrets)


def _from_env(source: str, env: Mapping[str, str] | None) -> str:
    name = source.removeprefix(ENV_PREFIX)
    text = (os.environ if env is None else env).get(name)
    if text is None:
        raise ConfigError(
            f"there is no environment variable {name}", path=_PATH, remedy="set it, or name a file"
        )
    return text


def _from_file(source: str) -> str:
    path = Path(source).expanduser()
    try:
        with path.open("rb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            data = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read {source}: {error.strerror or error}",
            path=_PATH,
            remedy="name a file that this user can read",
        ) from error
    if mode & stat.S_IRWXO:
        raise ConfigError(
            f"others may read or write {source}", path=_PATH, remedy=f"chmod 600 {source}"
        )
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{source} is no file of keys: too long", path=_PATH, remedy=_LINE)
    return data.decode("ascii", errors="replace")
