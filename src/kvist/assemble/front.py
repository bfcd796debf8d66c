"""The HTTP side of a node, if the configuration wants one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from pathlib import Path

from kvist.config import Config
from kvist.core.errors import ConfigError
from kvist.node.place import Place


def node_front(config: Config, place: Place) -> AbstractContextManager[None]:
    """Listens at once, and serves while the context is entered.

    Raises:
        ConfigError: it cannot be as configured, or its packages are missing.
    """
    http = config.node.http
    if not http.listen:
        return nullcontext()
    if not http.token_file:
        raise ConfigError(
            "nobody may ask without a token",
            path="$.node.http.token_file",
            remedy="make one: (umask 077; openssl rand -hex 32 > node.token), and name the file",
        )
    try:
        from kvist.node.http.server import HttpServer
        from kvist.node.http.tokens import Tokens, read_token
    except ImportError as error:
        raise ConfigError(
            f"a package is missing: {error.name}",
            path="$.node.http.listen",
            remedy="pip install 'kvist[http]'",
        ) from error
    files = http.tenants if isinstance(http.tenants, dict) else {}
    tenants = {n: read_token(Path(f), f"$.node.http.tenants.{n}") for n, f in files.items()}
    tokens = Tokens(read_token(Path(http.token_file), "$.node.http.token_file"), tenants)
    version = metadata.version("kvist")
    return HttpServer(http.listen, place.socket, tokens, version=version).running()
