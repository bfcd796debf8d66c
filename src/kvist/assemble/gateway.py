"""A gateway and the socket it listens on, from the configuration."""

from __future__ import annotations

import ipaddress
import random
import socket
import ssl
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from kvist.assemble.gateway_peers import gateway_peers, members_and_secret
from kvist.assemble.hearing import hearing_of, loading_of, prefixes_of
from kvist.assemble.replicas import prefill_entries, replica_entries
from kvist.assemble.routing import queue_of, router_of, splitting_of
from kvist.config import Config, GatewayConfig, GatewayLimitsConfig, GatewayTimeoutsConfig
from kvist.core.errors import ConfigError
from kvist.gateway.limits import TenantLimits
from kvist.gateway.prompt import Prompts
from kvist.gateway.server import Gateway
from kvist.gateway.settings import Bounds, Prefilling, Settings, Timeouts
from kvist.gateway.template import ModelTokenizer
from kvist.gateway.tracer import NoTracer, Tracer
from kvist.native import digest
from kvist.node.http.tokens import Tokens, read_token
from kvist.router.choice import make_policy
from kvist.router.prefixes import IndexedPrefixes

_SECTION = "$.gateway"
_DOMAIN = b"kvist.gateway.v1"


def open_gateway(config: Config) -> tuple[Gateway, socket.socket]:
    """A gateway that can be served, and its listener.

    Raises:
        ConfigError: it cannot be as configured, or a package is missing.
    """
    wanted = config.gateway
    entries, prefills = replica_entries(wanted), prefill_entries(wanted)
    everybody = (*entries, *prefills)
    folder = Path(wanted.tokenizer).expanduser() if wanted.tokenizer else None
    prefixes = prefixes_of(config, _fingerprint(wanted), everybody)
    loading = loading_of(config.router, config.block_tokens, folder)
    router = router_of(
        config.router,
        config.block_tokens,
        prefixes,
        random.Random(),
        splitting=splitting_of(wanted.disaggregation),
        loading=loading,
        expire_s=wanted.peers.expire_s,
    )
    limits = _limits(wanted.limits, wanted.peers.expire_s)
    gateway = Gateway(
        urls=tuple(entry.url for entry in entries),
        prefill_urls=tuple(entry.url for entry in prefills),
        router=router,
        queue=queue_of(config.router),
        prompts=_prompts(wanted, folder, prefixes),
        limits=limits,
        tracer=_tracer(wanted.otlp_endpoint),
        tokens=_tokens(wanted),
        settings=_settings(wanted),
        version=metadata.version("kvist"),
        tls=_tls(wanted),
        prefixes=prefixes,
        hearing=hearing_of(config, prefixes, everybody),
        peers=gateway_peers(wanted.peers, router, limits),
    )
    return gateway, _listener(wanted)


def gateway_faults(config: Config) -> list[ConfigError]:
    """Why a gateway could not be as configured. Binds nothing and reads no model.

    Without `gateway.replicas` it may still get its engines from the command line.
    """
    wanted = config.gateway
    checks: list[Callable[[], object]] = [
        lambda: make_policy(config.router.policy, random.Random(), config.block_tokens),
        lambda: prefill_entries(wanted) if wanted.replicas else None,  # and the replicas
        lambda: _tokens(wanted),
        lambda: _settings(wanted),
        lambda: _tls(wanted),
        lambda: _address(wanted),
        lambda: members_and_secret(wanted.peers),
    ]
    found = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            found.append(error)
    return found


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
        tenants_share=wanted.tenants_share,
        prefilling=Prefilling(
            transport=wanted.disaggregation.transport,
            patience=wanted.disaggregation.patience,
            least_s=wanted.disaggregation.least_s,
        ),
        timeouts=_timeouts(wanted.timeouts),
        bounds=Bounds(
            body_bytes=limits.body,
            bodies_bytes=limits.bodies,
            answers_bytes=limits.answers,
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


def _limits(wanted: GatewayLimitsConfig, expire_s: float) -> TenantLimits:
    return TenantLimits(
        requests_per_min=wanted.requests_per_min,
        tokens_per_min=wanted.tokens_per_min,
        in_flight=wanted.tenant_requests,
        expire_s=expire_s,
    )


def _prompts(wanted: GatewayConfig, folder: Path | None, prefixes: IndexedPrefixes) -> Prompts:
    if folder is None:
        return Prompts(None, None)
    return Prompts(ModelTokenizer(folder), prefixes.keys, threads=wanted.tokenizer_threads)


def _fingerprint(wanted: GatewayConfig) -> bytes:
    """Of the keys that name prefixes for this gateway's router: no store's keyspace."""
    return digest(_DOMAIN + Path(wanted.tokenizer).name.encode())


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


def _address(wanted: GatewayConfig) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    """Where it listens.

    Raises:
        ConfigError: that is no address, or whoever reaches it could use the engines.
    """
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
    return address, number


def _listener(wanted: GatewayConfig) -> socket.socket:
    address, number = _address(wanted)
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
