"""A gateway and the socket it listens on, from the configuration."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from kvist.assemble.routing import gateway_router, queue_of, splitting_of
from kvist.config import Config, GatewayConfig, GatewayLimitsConfig, GatewayTimeoutsConfig
from kvist.core.errors import ConfigError
from kvist.core.keys import RequestScope, seed_bytes
from kvist.gateway.limits import TenantLimits
from kvist.gateway.prompt import KeysOf, Prompts
from kvist.gateway.server import Gateway
from kvist.gateway.settings import Bounds, Prefilling, Settings, Timeouts
from kvist.gateway.template import ModelTokenizer
from kvist.gateway.tracer import NoTracer, Tracer
from kvist.native import chain_keys, digest
from kvist.node.http.tokens import Tokens, read_token

_SECTION = "$.gateway"
_DOMAIN = b"kvist.gateway.v1"


def open_gateway(config: Config) -> tuple[Gateway, socket.socket]:
    """A gateway that can be served, and its listener.

    Raises:
        ConfigError: it cannot be as configured, or a package is missing.
    """
    wanted = config.gateway
    fingerprint = _fingerprint(wanted)
    pools = wanted.disaggregation
    gateway = Gateway(
        urls=replica_urls(wanted),
        prefill_urls=prefill_urls(wanted),
        router=gateway_router(config.router, config.block_tokens, fingerprint, splitting_of(pools)),
        queue=queue_of(config.router),
        prompts=_prompts(wanted, config.block_tokens, fingerprint),
        limits=_limits(wanted.limits),
        tracer=_tracer(wanted.otlp_endpoint),
        tokens=_tokens(wanted),
        settings=_settings(wanted),
        version=metadata.version("kvist"),
        tls=_tls(wanted),
    )
    return gateway, _listener(wanted)


def replica_urls(wanted: GatewayConfig) -> tuple[str, ...]:
    """The URLs of the replicas, each once, without a slash at their end.

    Raises:
        ConfigError: there is none, or one is no URL.
    """
    urls = _urls(wanted.replicas, "replicas")
    if not urls:
        raise ConfigError(
            "there is nobody to serve requests",
            path=f"{_SECTION}.replicas",
            remedy="name engines: kvist gateway http://127.0.0.1:8001 http://127.0.0.1:8002",
        )
    return urls


def prefill_urls(wanted: GatewayConfig) -> tuple[str, ...]:
    """The URLs of the prefill engines; none where there are no pools.

    Raises:
        ConfigError: one is no URL, or answers requests, too.
    """
    urls = _urls(wanted.disaggregation.prefill, "disaggregation.prefill")
    both = set(urls) & set(replica_urls(wanted))
    if both:
        raise ConfigError(
            f"{min(both)} is among gateway.replicas, too",
            path=f"{_SECTION}.disaggregation.prefill",
            remedy="name an engine once: it computes prompts for others, or it answers",
        )
    return urls


def _urls(listed: str | tuple[str, ...], knob: str) -> tuple[str, ...]:
    texts = listed.split(",") if isinstance(listed, str) else listed
    urls = tuple(dict.fromkeys(text.strip().rstrip("/") for text in texts if text.strip()))
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ConfigError(
                f"{url!r} is no URL of an engine",
                path=f"{_SECTION}.{knob}",
                remedy="write http://127.0.0.1:8001",
            )
    return urls


def _settings(wanted: GatewayConfig) -> Settings:
    limits: GatewayLimitsConfig = wanted.limits
    key_file = wanted.engine_key_file
    return Settings(
        migrate=wanted.migrate,
        attempts=wanted.attempts,
        leave_s=wanted.leave_s,
        drain_s=wanted.drain_s,
        engine_key=read_token(Path(key_file), f"{_SECTION}.engine_key_file") if key_file else "",
        passes_keys=not wanted.operator_file,
        prefilling=Prefilling(
            transport=wanted.disaggregation.transport,
            patience=wanted.disaggregation.patience,
            least_s=wanted.disaggregation.least_s,
        ),
        timeouts=_timeouts(wanted.timeouts),
        bounds=Bounds(
            body_bytes=limits.body,
            bodies_bytes=limits.bodies,
            connections=limits.connections,
            requests=limits.requests,
        ),
    )


def _timeouts(wanted: GatewayTimeoutsConfig) -> Timeouts:
    return Timeouts(
        connect_s=wanted.connect_s,
        first_token_s=wanted.first_token_s,
        token_s=wanted.token_s,
        answer_s=wanted.answer_s,
        health_s=wanted.health_s,
        head_s=wanted.head_s,
        body_s=wanted.body_s,
        stall_s=wanted.stall_s,
    )


def _limits(wanted: GatewayLimitsConfig) -> TenantLimits:
    return TenantLimits(
        requests_per_min=wanted.requests_per_min,
        tokens_per_min=wanted.tokens_per_min,
        in_flight=wanted.tenant_requests,
    )


def _prompts(wanted: GatewayConfig, block_tokens: int, fingerprint: bytes) -> Prompts:
    if not wanted.tokenizer:
        return Prompts(None, None)
    folder = Path(wanted.tokenizer).expanduser()
    keys_of = _keys_of(fingerprint, block_tokens)
    return Prompts(ModelTokenizer(folder), keys_of, threads=wanted.tokenizer_threads)


def _fingerprint(wanted: GatewayConfig) -> bytes:
    """Of the keys that name prefixes for this gateway's router: no store's keyspace."""
    return digest(_DOMAIN + Path(wanted.tokenizer).name.encode())


def _keys_of(fingerprint: bytes, block_tokens: int) -> KeysOf:
    def keys_of(tokens: Sequence[int], lora: str, salt: str) -> tuple[bytes, ...]:
        seed = digest(seed_bytes(fingerprint, RequestScope(lora, salt)))
        return tuple(chain_keys(seed, np.asarray(tokens, np.uint32), block_tokens))

    return keys_of


def _tokens(wanted: GatewayConfig) -> Tokens | None:
    files = wanted.tenants if isinstance(wanted.tenants, dict) else {}
    if not wanted.operator_file:
        if files:
            raise ConfigError(
                "tenants have keys, and the operator has none",
                path=f"{_SECTION}.operator_file",
                remedy="make one: (umask 077; openssl rand -hex 32 > operator.key)",
            )
        return None
    keys = {n: read_token(Path(f), f"{_SECTION}.tenants.{n}") for n, f in files.items()}
    operator = read_token(Path(wanted.operator_file), f"{_SECTION}.operator_file")
    return Tokens(operator, keys, section=_SECTION)


def _tracer(endpoint: str) -> Tracer:
    if not endpoint:
        return NoTracer()
    try:
        from kvist.gateway.otel import OtelTracer
    except ImportError as error:
        raise ConfigError(
            f"a package is missing: {error.name}",
            path=f"{_SECTION}.otlp_endpoint",
            remedy="pip install 'kvist[otel]'",
        ) from error
    return OtelTracer.to(endpoint)


def _tls(wanted: GatewayConfig) -> ssl.SSLContext | None:
    cert, key = wanted.tls.cert, wanted.tls.key
    if not cert and not key:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(Path(cert).expanduser(), Path(key).expanduser())
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"the certificate cannot be used: {error}",
            path=f"{_SECTION}.tls.cert",
            remedy="give gateway.tls.cert and gateway.tls.key, both PEM",
        ) from error
    return context


def _listener(wanted: GatewayConfig) -> socket.socket:
    host, _, port = wanted.listen.rpartition(":")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
        number = int(port)
    except ValueError as error:
        raise ConfigError(
            f"{wanted.listen!r} is no address with a port",
            path=f"{_SECTION}.listen",
            remedy="such as 127.0.0.1:8080",
        ) from error
    if not address.is_loopback and not wanted.operator_file:
        raise ConfigError(
            f"{host} is not on loopback, and whoever reaches it could use the engines",
            path=f"{_SECTION}.listen",
            remedy="set gateway.operator_file and gateway.tenants, or listen on 127.0.0.1",
        )
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((str(address), number))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {wanted.listen}: {error}",
            path=f"{_SECTION}.listen",
            remedy="choose another port",
        ) from error
    return listener
