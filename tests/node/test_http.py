"""A node's blocks over HTTP: who is refused, what a tenant sees; nothing waits for ever."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from node_process import NodeProcess, attach
from node_thread import serving
from test_cache_desk import K, two_tiers, write

from kvist.assemble import node_front
from kvist.config import load_config
from kvist.core.errors import ConfigError
from kvist.node.client import NodeStore
from kvist.node.http import app as app_module
from kvist.node.http import server as server_module
from kvist.node.http.endpoints import ENDPOINTS
from kvist.node.http.server import HttpServer
from kvist.node.http.tokens import Caller, Tokens
from kvist.node.place import Place
from kvist.testing.store_suite import WAIT_S, key

OPERATOR, ALICE, BOB = "operator-0123456789", "alice-0123456789abc", "bob-0123456789abcdef"
TOKENS = Tokens(OPERATOR, {"a": ALICE, "b": BOB})
LIMIT_S = 10.0
Answer = tuple[int, Any, Mapping[str, str]]


class Client:
    """Asks an HTTP server, one connection a request."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(
        self,
        path: str,
        token: str | None = OPERATOR,
        body: object = None,
        *,
        method: str = "",
        scheme: str = "Bearer",
    ) -> Answer:
        """Status, body and headers."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        headers = {} if token is None else {"Authorization": f"{scheme} {token}"}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        link.request(method or ("GET" if body is None else "POST"), path, data, headers)
        reply = link.getresponse()
        text = reply.read()
        link.close()
        is_json = reply.headers.get_content_type() == "application/json"
        return reply.status, json.loads(text) if is_json else text.decode(), dict(reply.headers)


@pytest.fixture
def engine(folder: Path) -> Iterator[NodeStore]:
    """An engine on a node of two tiers, with blocks of two tenants."""
    path = folder / "n.sock"
    with serving(path, two_tiers), NodeStore(path, attach(1)) as store:
        write(store, "a", 0, 1)
        write(store, "b", 2)
        assert store.flush(WAIT_S)
        yield store


@pytest.fixture
def client(folder: Path, engine: NodeStore) -> Iterator[Client]:
    server = HttpServer("127.0.0.1:0", folder / "n.sock", TOKENS, version="1")
    with server.running():
        yield Client(server.port)


PATHS = ["/openapi.json", "/metrics", "/nothing", "/healthz/", "/", *(e.path for e in ENDPOINTS)]


def test_nothing_is_said_without_a_token(client: Client) -> None:
    wrong = [None, "", "x" * 19, OPERATOR[:-1], OPERATOR + "x", OPERATOR.upper()]
    for path in PATHS:
        for i, token in enumerate(wrong):
            method = ("GET", "POST", "DELETE", "OPTIONS")[i % 4]
            status, said, headers = client.ask(path, token, method=method)
            assert (status, said) == (401, {"error": "a token is needed"})
            assert headers["www-authenticate"] == "Bearer"
        assert client.ask(path, OPERATOR, scheme="Basic")[0] == 401


def test_health_says_only_that_it_lives(client: Client) -> None:
    assert client.ask("/healthz", None)[:2] == (200, {"status": "alive"})
    assert client.ask("/healthz", None, method="POST")[0] == 405


def test_two_authorization_headers_are_none(client: Client) -> None:
    with socket.create_connection(("127.0.0.1", client.port), LIMIT_S) as link:
        one = f"Authorization: Bearer {OPERATOR}\r\n".encode()
        link.sendall(b"GET /v1/usage HTTP/1.1\r\nHost: x\r\n" + one + one + b"\r\n")
        assert b" 401 " in link.recv(1000)


def test_the_operator_sees_and_changes_everything(client: Client, engine: NodeStore) -> None:
    status, usage, _ = client.ask("/v1/usage")
    assert status == 200
    assert {(u["tier"], u["tenant"], u["blocks"]) for u in usage["usage"]} == {
        (tier, tenant, count) for tier in ("dram", "ssd") for tenant, count in (("a", 2), ("b", 1))
    }
    assert client.ask("/v1/pin", body={"keys": [K[0]]})[1]["changed"] == 1
    assert client.ask("/v1/unpin", body={"keys": [K[0]]})[1]["changed"] == 1
    assert client.ask("/v1/move", body={"keys": K[:3], "to": "ssd"})[1]["changed"] == 3
    assert client.ask("/v1/move", body={"keys": K[:3], "to": "dram"})[1]["changed"] == 3
    assert client.ask("/v1/evict", body={"keys": [K[0]]})[1]["changed"] == 1
    page = client.ask("/v1/blocks?limit=1&tier=dram")[1]
    rest = client.ask(f"/v1/blocks?limit=5&tier=dram&cursor={page['cursor']}")[1]
    assert {b["key"] for b in page["blocks"] + rest["blocks"]} == {K[1], K[2]}
    assert len(client.ask("/v1/runs")[1]["runs"]) == 4
    assert len(client.ask("/v1/keyspaces")[1]["keyspaces"]) == 1
    assert client.ask("/v1/clear", body={})[1] == {"kind": "cleared", "blocks": 2, "complete": True}


def test_a_tenant_sees_counts_and_evicts_its_own_alone(client: Client, engine: NodeStore) -> None:
    usage = client.ask("/v1/usage", BOB)[1]["usage"]
    assert {(u["tenant"], u["blocks"]) for u in usage} == {("b", 1)}
    assert {b["key"] for b in client.ask("/v1/blocks", BOB)[1]["blocks"]} == {K[2]}
    assert {r["last"] for r in client.ask("/v1/runs", BOB)[1]["runs"]} == {K[2]}
    assert client.ask("/v1/evict", BOB, {"keys": K[:2]})[1]["changed"] == 0
    assert client.ask("/v1/pin", BOB, {"keys": K[:3]})[1]["changed"] == 1
    assert client.ask("/v1/unpin", BOB, {"keys": K[:3]})[1]["changed"] == 1
    assert client.ask("/v1/move", BOB, {"keys": K[:3], "to": "ssd"})[1]["changed"] == 1
    assert client.ask("/v1/move", BOB, {"keys": K[:3], "to": "dram"})[1]["changed"] == 1
    assert client.ask("/v1/clear", BOB, {})[1]["blocks"] == 1
    assert [len(engine.match([key(n)])) for n in range(3)] == [1, 1, 0]


def test_a_foreign_key_and_an_absent_one_get_the_same_answer(client: Client) -> None:
    for make in (
        lambda k: ("/v1/evict", {"keys": [k]}),
        lambda k: ("/v1/pin", {"keys": [k]}),
        lambda k: ("/v1/unpin", {"keys": [k]}),
        lambda k: ("/v1/move", {"keys": [k], "to": "dram"}),
        lambda k: ("/v1/move", {"keys": [k], "to": "ssd", "deadline_s": 0}),
        lambda k: (f"/v1/blocks?ending={k}", None),
    ):
        answers = []
        for asked in (K[0], K[7]):  # `a` has the first, nobody the second
            path, body = make(asked)
            status, said, _ = client.ask(path, BOB, body)
            answers.append((status, json.dumps(said).replace(asked, "KEY")))
        assert answers[0] == answers[1]


def test_a_tenant_that_names_another_is_refused(client: Client) -> None:
    for path in ("/v1/usage", "/v1/blocks", "/v1/runs", "/v1/keyspaces"):
        for other in ("a", "nobody", ""):
            assert client.ask(f"{path}?tenant={other}", BOB)[0] == 403
        assert client.ask(f"{path}?tenant=b", BOB)[0] == 200


def test_orders_that_name_another_tenant_are_refused(client: Client, engine: NodeStore) -> None:
    for path, body in (
        ("/v1/evict", {"keys": [K[0]]}),
        ("/v1/pin", {"keys": [K[0]]}),
        ("/v1/unpin", {"keys": [K[0]]}),
        ("/v1/move", {"keys": [K[0]], "to": "ssd"}),
        ("/v1/clear", {}),
    ):
        assert client.ask(path, BOB, body | {"tenant": "a"})[0] == 403
    assert len(engine.match([key(0)])) == 1


def test_a_cursor_of_another_tenant_is_worth_nothing(client: Client) -> None:
    cursor = client.ask("/v1/blocks?limit=1", ALICE)[1]["cursor"]
    assert cursor
    assert client.ask(f"/v1/blocks?limit=1&cursor={cursor}", BOB)[0] == 400
    assert client.ask(f"/v1/blocks?limit=1&cursor={cursor}", ALICE)[0] == 200


def test_metrics_are_the_operators(client: Client) -> None:
    status, text, _ = client.ask("/metrics")
    assert status == 200
    assert 'kvist_tier_blocks{tier="dram"} 3\n' in text
    assert "# TYPE kvist_evictions_total counter\n" in text
    assert client.ask("/metrics", ALICE)[0] == 403


def test_the_document_describes_every_path_and_nothing_else(client: Client) -> None:
    document = client.ask("/openapi.json", ALICE)[1]
    assert document["openapi"] == "3.1.0"
    told = {e.path for e in ENDPOINTS} | {"/metrics", "/healthz", "/openapi.json"}
    assert set(document["paths"]) == told
    for path, refused in (("/metrics", {401, 403}), ("/openapi.json", {401})):
        answers = {client.ask(path, token)[0] for token in (None, OPERATOR, ALICE)}
        assert answers == {200, *refused}
        assert {str(code) for code in answers} <= set(document["paths"][path]["get"]["responses"])
    schemas = document["components"]["schemas"]
    refs = set(json.dumps(document).split("#/components/schemas/")[1:])
    assert {ref.split('"')[0] for ref in refs} <= set(schemas)
    assert schemas["EvictBlocks"]["required"] == ["keys"]
    assert document["paths"]["/healthz"]["get"]["security"] == []


SENSELESS: tuple[tuple[str, object, int], ...] = (
    ("/v1/evict", b"{", 400),
    ("/v1/evict", b"\xff", 400),
    ("/v1/evict", b"[" * 100_000, 400),
    ("/v1/evict", {"keys": []}, 400),
    ("/v1/evict", {"keys": ["x"]}, 400),
    ("/v1/evict", {"keys": [K[0]], "kind": "pin"}, 400),
    ("/v1/evict", {"keys": [K[0]], "more": 1}, 400),
    ("/v1/evict", {"keys": [K[0]], "keyspace": "ff"}, 400),
    ("/v1/move", {"keys": [K[0]], "to": "dram", "deadline_s": 11}, 400),
    ("/v1/evict", b" " * (app_module.MOST_BODY_BYTES + 1), 413),
    ("/v1/blocks?limit=0", None, 400),
    ("/v1/blocks?limit=many", None, 400),
    ("/v1/blocks?more=1", None, 400),
    ("/v1/nothing", None, 404),
    ("/v1/usage", {}, 405),
)


def test_what_makes_no_sense_is_refused_with_a_reason(client: Client) -> None:
    for path, body, status in SENSELESS:
        got, said, _ = client.ask(path, OPERATOR, body)
        assert (path, got) == (path, status)
        assert said["error"]
    assert client.ask("/v1/usage")[0] == 200


def test_a_tenant_may_be_called_null(client: Client) -> None:
    assert client.ask("/v1/usage?tenant=null")[1]["usage"] == []


def test_a_node_that_is_gone_is_said_so(folder: Path) -> None:
    server = HttpServer("127.0.0.1:0", folder / "none.sock", TOKENS, version="1")
    with server.running():
        client = Client(server.port)
        assert client.ask("/healthz", None)[0] == 200
        status, said, _ = client.ask("/v1/usage")
        assert status == 503
        assert "no node listens" in said["error"]
        assert client.ask("/metrics")[0] == 503


def test_a_request_that_does_not_end_is_cut_off(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "REQUEST_S", 0.2)
    with socket.create_connection(("127.0.0.1", client.port), LIMIT_S) as link:
        head = f"POST /v1/evict HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {OPERATOR}\r\n"
        link.sendall(head.encode() + b"Content-Length: 100\r\n\r\n{")
        assert b" 503 " in link.recv(1000)


def test_a_head_that_does_not_end_is_cut_off(
    folder: Path, engine: NodeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "CONNECTION_S", 0.2)
    server = HttpServer("127.0.0.1:0", folder / "n.sock", TOKENS, version="1")
    with (
        server.running(),
        socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as link,
    ):
        until = time.monotonic() + LIMIT_S
        try:
            while True:  # one byte now and then, for ever
                assert time.monotonic() < until, "it was let go on"
                link.sendall(b"G")
                time.sleep(0.02)
        except (BrokenPipeError, ConnectionResetError):
            pass


def test_more_connections_than_there_may_be_are_turned_away(client: Client) -> None:
    address = ("127.0.0.1", client.port)
    links = [socket.create_connection(address, LIMIT_S) for _ in range(80)]
    try:
        assert client.ask("/v1/usage")[0] == 503
    finally:
        for link in links:
            link.close()
    until = time.monotonic() + LIMIT_S
    while client.ask("/v1/usage")[0] != 200:
        assert time.monotonic() < until


def test_tokens_are_told_apart() -> None:
    assert TOKENS.who(f"Bearer {ALICE}".encode()) == Caller("a")
    assert TOKENS.who(f"bearer {OPERATOR}".encode()) == Caller(None)
    for other in ("", "Bearer", "Bearer ", ALICE, f"Bearer  {ALICE}", f"Basic {ALICE}"):
        assert TOKENS.who(other.encode()) is None
    with pytest.raises(ConfigError, match="same token"):
        Tokens(OPERATOR, {"a": OPERATOR})
    with pytest.raises(ConfigError, match="no name"):
        Tokens(OPERATOR, {"": ALICE})


def _front(folder: Path, *sets: str, tenants: Mapping[str, str] | None = None) -> Any:
    overrides = {"node": {"http": {"tenants": tenants or "none"}}}
    config = load_config(env={}, overrides=overrides, sets=sets).config
    return node_front(config, Place(folder / "n.sock"))


def test_a_node_listens_only_with_a_token_that_nobody_else_can_read(folder: Path) -> None:
    listen = "node.http.listen=127.0.0.1:0"
    file = folder / "token"
    with pytest.raises(ConfigError, match="without a token"):
        _front(folder, listen)
    named = f"node.http.token_file={file}"
    with pytest.raises(ConfigError, match="cannot read"):
        _front(folder, listen, named)
    file.write_text(OPERATOR + "\n")
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        _front(folder, listen, named)
    file.chmod(0o600)
    for bad in ("short", "x" * 600, "two words and more than enough", "a\nb" * 10):
        file.write_text(bad)
        with pytest.raises(ConfigError, match="holds no token"):
            _front(folder, listen, named)
    file.write_text(OPERATOR + "\n")
    with pytest.raises(ConfigError, match="same token"):
        _front(folder, listen, named, tenants={"a": str(file)})
    with _front(folder, listen, named):
        pass
    for address in ("0.0.0.0:1", "192.0.2.1:80", "localhost:80", "127.0.0.1", "127.0.0.1:99999"):
        with pytest.raises(ConfigError, match=r"node\.http\.listen"):
            _front(folder, f"node.http.listen={address}", named)


def test_a_node_process_answers_over_http_and_ends_in_order(folder: Path) -> None:
    """Also where a request is under way and a connection is open when it is told to end."""
    file = folder / "token"
    file.write_text(OPERATOR)
    file.chmod(0o600)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = (f"--set=node.http.listen=127.0.0.1:{port}", f"--set=node.http.token_file={file}")
    with NodeProcess(folder / "p.sock", options=options) as node:
        client = Client(port)
        with node.client() as engine:
            write(engine, "a", 0)
            assert client.ask("/v1/usage")[1]["usage"][0]["blocks"] == 1
            assert client.ask("/v1/usage", None)[0] == 401
        with socket.create_connection(("127.0.0.1", port), LIMIT_S) as link:
            link.sendall(b"GET /v1/usage HTTP/1.1\r\nHost: x\r\n")
            node.terminate()
        with pytest.raises(ConnectionRefusedError):
            client.ask("/healthz", None)


def test_nothing_listens_unless_it_is_told_to(folder: Path) -> None:
    with _front(folder):
        pass
