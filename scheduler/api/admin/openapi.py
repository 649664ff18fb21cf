"""The OpenAPI 3.1 document of the admin API, made from the table of its endpoints."""

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from isochrone.wire.errors import ErrorCode
from scheduler.api.admin.access import OPEN_PATHS
from scheduler.api.admin.endpoint import ETAG_PATTERN, LIMIT_DEFAULT, LIMIT_MAX, Endpoint

_PATH_PARAMETER = re.compile(r"\{(\w+)(?::[^}]*)?\}")

_COMPONENT: Final = "#/components/schemas/"
_TEXT: Final = {"type": "string"}
_ETAG: Final = {"type": "string", "pattern": ETAG_PATTERN}
_IDEMPOTENCY_KEY: Final = {"type": "string", "pattern": "^[!-~]{1,128}$"}
_DAY: Final = {"type": "string", "format": "date", "pattern": "^2[0-9]{3}-[0-9]{2}-[0-9]{2}$"}

_QUERY_SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": LIMIT_MAX, "default": LIMIT_DEFAULT},
    "cursor": {
        "type": "string",
        "pattern": "^[A-Za-z0-9_-]*={0,2}$",
        "description": "`next_cursor` of the page before, as this API returned it",
    },
    "from": _DAY,
    "to": _DAY,
    "by": {"enum": ["key", "tenant"], "default": "key"},
    "per": {"enum": ["total", "day"], "default": "total"},
    "new": {
        "enum": ["true", "false"],
        "default": "false",
        "description": "whether the tenant may have no key yet",
    },
}
"""The schemas of query parameters that are not any text."""


def document(endpoints: Sequence[Endpoint], version: str) -> dict[str, Any]:
    """Return the OpenAPI document for these endpoints."""
    types = {endpoint.response for endpoint in endpoints if endpoint.response is not None}
    types |= {endpoint.body for endpoint in endpoints if endpoint.body is not None}
    ordered = sorted(types, key=lambda struct: struct.__name__)
    schemas, components = msgspec.json.schema_components(
        ordered, ref_template=_COMPONENT + "{name}"
    )
    by_type = dict(zip(ordered, schemas, strict=True))
    _close(
        [by_type[endpoint.body] for endpoint in endpoints if endpoint.body is not None], components
    )
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = _PATH_PARAMETER.sub(r"{\1}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, by_type)
    for path in sorted(OPEN_PATHS):
        paths[path] = {
            "get": {
                "summary": f"{path.strip('/')} (no token needed)",
                "security": [],
                "responses": {"200": {"description": "OK"}},
            }
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Isochrone admin API", "version": version},
        "security": [{"admin": []}],
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _error_schema()},
            "securitySchemes": {"admin": {"type": "http", "scheme": "bearer"}},
        },
    }


def _close(bodies: Sequence[Any], components: dict[str, Any]) -> None:
    """Let the objects of bodies have no other fields, at any depth, as json_body.py does."""
    rest, closed = list(bodies), set[str]()
    while rest:
        schema = rest.pop()
        if isinstance(schema, dict):
            rest += schema.values()
        elif isinstance(schema, list):
            rest += schema
        elif isinstance(schema, str) and schema.startswith(_COMPONENT):
            name = schema.removeprefix(_COMPONENT)
            if name not in closed:
                closed.add(name)
                rest.append(components[name])
                if "properties" in components[name]:
                    components[name]["additionalProperties"] = False


def _operation(endpoint: Endpoint, by_type: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    response: dict[str, Any] = {"description": endpoint.summary}
    if endpoint.response is not None:
        schema = by_type[endpoint.response]
        if endpoint.is_list:
            schema = {
                "type": "object",
                "required": ["data", "next_cursor"],
                "properties": {
                    "data": {"type": "array", "items": schema},
                    "next_cursor": {"type": ["string", "null"]},
                },
            }
        response["content"] = {"application/json": {"schema": schema}}
    operation: dict[str, Any] = {
        "operationId": endpoint.function.__name__,
        "summary": endpoint.summary,
        "parameters": _parameters(endpoint),
        "responses": {
            str(endpoint.status): response,
            "default": {
                "description": "An error with a code and a message",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
            },
        },
    }
    if endpoint.takes_file:
        operation["requestBody"] = {
            "required": True,
            "content": {
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
            },
        }
    elif endpoint.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": by_type[endpoint.body]}},
        }
    return operation


def _parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _TEXT}
        for name in _PATH_PARAMETER.findall(endpoint.path)
    ]
    parameters += [
        {"name": name, "in": "query", "schema": _QUERY_SCHEMAS.get(name, _TEXT)}
        for name in endpoint.query_names
    ]
    if endpoint.method in ("PUT", "DELETE"):
        parameters.append({"name": "If-Match", "in": "header", "schema": _ETAG})
    if endpoint.method == "POST":
        parameters.append({"name": "Idempotency-Key", "in": "header", "schema": _IDEMPOTENCY_KEY})
    return parameters


def _error_schema() -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["code", "message"],
                "properties": {
                    "code": {"type": "string", "enum": [code.value for code in ErrorCode]},
                    "message": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                },
            }
        },
    }
