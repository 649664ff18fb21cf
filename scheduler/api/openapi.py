"""The OpenAPI 3.1 document of the admin API, made from the table of its endpoints."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from isochrone.wire.errors import ErrorCode
from scheduler.api.access import OPEN_PATHS
from scheduler.api.endpoint import Endpoint

_PART = re.compile(r"\{(\w+)(?::[^}]*)?\}")


def document(endpoints: Sequence[Endpoint], version: str) -> dict[str, Any]:
    """Return the document."""
    kinds = {endpoint.answer for endpoint in endpoints if endpoint.answer is not None}
    kinds |= {endpoint.body for endpoint in endpoints if endpoint.body is not None}
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(
        ordered, ref_template="#/components/schemas/{name}"
    )
    by_kind = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = _PART.sub(r"{\1}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, by_kind)
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


def _operation(endpoint: Endpoint, by_kind: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": endpoint.summary}
    if endpoint.answer is not None:
        schema = by_kind[endpoint.answer]
        if endpoint.is_list:
            schema = {
                "type": "object",
                "required": ["data", "next_cursor"],
                "properties": {
                    "data": {"type": "array", "items": schema},
                    "next_cursor": {"type": ["string", "null"]},
                },
            }
        answer["content"] = {"application/json": {"schema": schema}}
    operation: dict[str, Any] = {
        "operationId": endpoint.function.__name__,
        "summary": endpoint.summary,
        "parameters": _parameters(endpoint),
        "responses": {
            str(endpoint.status): answer,
            "default": {
                "description": "An error, in words",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
            },
        },
    }
    if endpoint.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": by_kind[endpoint.body]}},
        }
    return operation


def _parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    text = {"type": "string"}
    found = [
        {"name": name, "in": "path", "required": True, "schema": text}
        for name in _PART.findall(endpoint.path)
    ]
    queries = [*endpoint.query, *(("limit", "cursor") if endpoint.is_list else ())]
    for name in queries:
        schema = {"type": "integer", "minimum": 1, "maximum": 500} if name == "limit" else text
        found.append({"name": name, "in": "query", "schema": schema})
    if endpoint.method in ("PUT", "DELETE"):
        found.append({"name": "If-Match", "in": "header", "schema": text})
    if endpoint.method == "POST":
        found.append({"name": "Idempotency-Key", "in": "header", "schema": text})
    return found


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
