"""The gateway's OpenAPI document: what it checks of a request itself, and what it answers."""

from __future__ import annotations

from typing import Any

import msgspec

from kvist.gateway.ask import DEADLINE, MOST_DEADLINE_S, SESSION, Body, Draining, Endpoint
from kvist.gateway.faults import FaultBody

_SCHEMAS = "#/components/schemas/"
_FAULTS = {
    400: "A field cannot be meant, or the body is not JSON.",
    401: "No API key, or one that nobody has.",
    403: "The key is a tenant's, the path the operator's.",
    404: "No such model, or path.",
    405: "Another method is meant.",
    408: "The body did not come in time.",
    413: "The body is too long.",
    415: "The body is compressed, or not JSON.",
    429: "A limit of the key is reached, or the engines are too busy to be in time.",
    500: "The engine failed.",
    502: "A stream broke and could not go on.",
    503: "No replica is up, or the gateway ends.",
}
_NEEDED = {
    Endpoint.CHAT: ["messages"],
    Endpoint.COMPLETIONS: ["prompt"],
    Endpoint.EMBEDDINGS: ["input"],
}
_HEADERS: list[dict[str, Any]] = [
    {
        "name": DEADLINE,
        "in": "header",
        "description": "Seconds from the request's head within which a first token is worth "
        "something; where that is not foreseen, it is refused.",
        "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": MOST_DEADLINE_S},
    },
    {
        "name": SESSION,
        "in": "header",
        "description": "The conversation that it belongs to, which stays at one replica where "
        "that costs little; else `session_id` of the body.",
        "schema": {"type": "string"},
    },
]
_ABOUT = {
    Endpoint.CHAT: "Answers a chat.",
    Endpoint.COMPLETIONS: "Completes a prompt.",
    Endpoint.EMBEDDINGS: "Embeds texts.",
}


def openapi(version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document. Fields that it does not name go to the engine as they come."""
    kinds = [Body, Draining, FaultBody]
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_SCHEMAS + "{name}")
    paths: dict[str, Any] = {
        endpoint.value: {"post": _routed(endpoint, about)} for endpoint, about in _ABOUT.items()
    }
    json: dict[str, Any] = {"application/json": {}}
    text: dict[str, Any] = {"text/plain": {}}
    paths["/v1/models"] = {"get": _operation("models", "Models of the engines.", json)}
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/models/{model}"] = {
        "get": _operation("model", "One of them.", json) | {"parameters": [name]}
    }
    paths["/replicas"] = {
        "get": _operation("replicas", "The replicas and their state; the operator's.", json)
    }
    paths["/replicas/drain"] = {
        "post": _operation(
            "drain", "Has a replica get nothing new, or something again; the operator's.", json
        )
        | {"requestBody": _body({"$ref": _SCHEMAS + Draining.__name__})}
    }
    paths["/metrics"] = {"get": _operation("metrics", "For Prometheus; the operator's.", text)}
    for path, about in (
        ("/healthz", "The gateway lives."),
        ("/readyz", "It can serve."),
        ("/openapi.json", "This document."),
    ):
        public = _operation(path[1:].partition(".")[0], about, json) | {"security": []}
        paths[path] = {"get": public}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Kvist gateway", "version": version},
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _routed(endpoint: Endpoint, about: str) -> dict[str, Any]:
    answers: dict[str, Any] = {"application/json": {}}
    if endpoint is not Endpoint.EMBEDDINGS:
        answers["text/event-stream"] = {}
    schema = {"allOf": [{"$ref": _SCHEMAS + "Body"}, {"required": _NEEDED[endpoint]}]}
    return _operation(endpoint.name.lower(), about, answers) | {
        "parameters": _HEADERS,
        "requestBody": _body(schema),
    }


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _operation(name: str, about: str, answers: dict[str, Any]) -> dict[str, Any]:
    fault = {"application/json": {"schema": {"$ref": _SCHEMAS + FaultBody.__name__}}}
    return {
        "summary": about,
        "operationId": name,
        "responses": {
            "200": {"description": "OK", "content": answers},
            **{str(code): {"description": t, "content": fault} for code, t in _FAULTS.items()},
        },
    }
