"""What is where over HTTP: the one table that the server and its OpenAPI document come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from kvist.node.cache import messages as m


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path, the request that it takes (of the query or the body) and the reply that it gives."""

    method: str
    path: str
    request: type[m.Request]
    reply: type[m.Reply]

    @property
    def summary(self) -> str:
        """What it does, of the request's own docstring."""
        return (self.request.__doc__ or "").partition("\n")[0]


ENDPOINTS = (
    Endpoint("GET", "/v1/keyspaces", m.ShowKeyspaces, m.Keyspaces),
    Endpoint("GET", "/v1/runs", m.ListRuns, m.RunPage),
    Endpoint("GET", "/v1/blocks", m.ListBlocks, m.BlockPage),
    Endpoint("GET", "/v1/usage", m.ShowUsage, m.Usage),
    Endpoint("POST", "/v1/pin", m.PinBlocks, m.Changed),
    Endpoint("POST", "/v1/unpin", m.UnpinBlocks, m.Changed),
    Endpoint("POST", "/v1/evict", m.EvictBlocks, m.Changed),
    Endpoint("POST", "/v1/move", m.MoveBlocks, m.Changed),
    Endpoint("POST", "/v1/clear", m.ClearBlocks, m.Cleared),
)
_SCHEMAS = "#/components/schemas/"
_FAULTS = {
    400: "The request makes no sense here.",
    401: "No token, or one that nobody has.",
    403: "The token is a tenant's, the request another's.",
    413: "The body is too long.",
    503: "The node is busy, or its store failed.",
}


class Fault(msgspec.Struct, frozen=True):
    """Why a request was not met."""

    error: str


def openapi(version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document of `ENDPOINTS`."""
    types = [t for e in ENDPOINTS for t in (e.request, e.reply)]
    _, schemas = msgspec.json.schema_components([*types, Fault], ref_template=_SCHEMAS + "{name}")
    for endpoint in ENDPOINTS:  # the path says it
        schema = schemas[endpoint.request.__name__]
        schema["properties"].pop("kind", None)
        schema["required"] = [name for name in schema["required"] if name != "kind"]
    paths: dict[str, Any] = {}
    for endpoint in ENDPOINTS:
        paths[endpoint.path] = {endpoint.method.lower(): _operation(endpoint, schemas)}
    text = {"200": {"description": "OK", "content": {"text/plain": {}}}}
    paths["/metrics"] = {
        "get": {"summary": "For Prometheus.", "operationId": "metrics"}
        | {"responses": text | _faults(401, 403, 503)}
    }
    document = {"200": {"description": "OK", "content": {"application/json": {}}}}
    paths["/openapi.json"] = {
        "get": {"summary": "This document.", "operationId": "openapi"}
        | {"responses": document | _faults(401, 503)}
    }
    alive = {"200": {"description": "The node lives.", "content": {"application/json": {}}}}
    paths["/healthz"] = {
        "get": {"summary": "Needs no token.", "operationId": "healthz", "security": []}
        | {"responses": alive}
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Kvist node", "version": version},
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _faults(*codes: int) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _SCHEMAS + Fault.__name__}}}
    return {str(code): {"description": _FAULTS[code], "content": content} for code in codes}


def _operation(endpoint: Endpoint, schemas: dict[str, Any]) -> dict[str, Any]:
    name = endpoint.request.__name__
    reply = {"application/json": {"schema": {"$ref": _SCHEMAS + endpoint.reply.__name__}}}
    found: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": name,
        "responses": {
            "200": {"description": "OK", "content": reply},
            **_faults(*_FAULTS),
        },
    }
    if endpoint.method == "GET":
        found["parameters"] = [
            {"name": field, "in": "query", "required": False, "schema": schema}
            for field, schema in schemas[name]["properties"].items()
        ]
    else:
        body = {"application/json": {"schema": {"$ref": _SCHEMAS + name}}}
        found["requestBody"] = {"required": True, "content": body}
    return found
