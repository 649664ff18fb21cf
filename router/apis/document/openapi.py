"""The OpenAPI 3.1 document of the public API, made from the table of its routes. Pure."""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from isochrone.ttft_order import TTFT_MS_MAX
from isochrone.wire.http import headers
from isochrone.wire.kv.kv_transfer import ENGINE_FIELDS, NESTED_FIELDS
from router.apis.document import answers
from router.apis.document.public_route import JSON, PublicRoute, Surface
from router.apis.document.routes import ROUTES
from router.apis.responses.translate import ResponsesRequest
from router.apis.workers_ai.catalog import input_schema
from router.apis.workers_ai.translate import FIELDS_OF_TASK

REF: Final = "#/components/schemas/{name}"
RUN_PATH: Final = "/ai/run/{model}"
ACCOUNT: Final = "/client/v4/accounts/{account_id}"
TITLE: Final = "Isochrone"

_PATH_PARAMETER: Final = re.compile(r"\{(\w+)\}")
_ERRORS: Final[dict[Surface, type]] = {
    "openai": answers.OpenAiError,
    "anthropic": answers.AnthropicError,
    "workers_ai": answers.WorkersAiError,
    "open": answers.OpenAiError,
}
_MODEL: Final = {"type": "string", "minLength": 1, "maxLength": 128}
_OBJECT_ID: Final = {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}
_REQUEST_HEADERS: Final = {
    headers.SESSION_AFFINITY: Annotated[str, Meta(max_length=256, pattern="^[!-~]*$")],
    headers.PRIORITY: Annotated[int, Meta(ge=0, le=headers.PRIORITY_DEFAULT)],
    headers.TTFT_MS: Annotated[int, Meta(ge=1, le=TTFT_MS_MAX)],
}
_BINARY: Final = {"type": "string", "format": "binary"}


def document(version: str, routes: Sequence[PublicRoute] = ROUTES) -> dict[str, Any]:
    """Return the OpenAPI document of the routes."""
    schemas = _Schemas(routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        item = paths.setdefault(route.path, _path_item(route.path))
        item[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": TITLE,
            "version": version,
            "description": "The public API of a router. Fields that a schema does not name are"
            " passed on to the engine where the schema allows others, and refused where it does"
            " not.",
        },
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": headers.API_KEY},
            },
        },
    }


class _Schemas:
    """The JSON Schema of each type that a route uses, and the components that they refer to."""

    def __init__(self, routes: Sequence[PublicRoute]) -> None:
        self._documented: dict[Any, Any] = {}
        types = [used for route in routes for used in self._types_of(route)]
        found, self.components = msgspec.json.schema_components(types, ref_template=REF)
        self._schemas = list(zip(types, found, strict=True))
        _, of_errors = msgspec.json.schema_components(_ERRORS.values(), ref_template=REF)
        self.components |= of_errors
        for deciding_field in FIELDS_OF_TASK:
            schema = input_schema(deciding_field, REF)
            self.components |= schema.pop("$defs")
            self.components[_run_name(deciding_field)] = schema

    def of(self, given: Any) -> dict[str, Any]:
        """Return the schema of a type."""
        return next(schema for known, schema in self._schemas if known is given)

    def body_of(self, route: PublicRoute) -> dict[str, Any]:
        """Return the schema of a route's body."""
        return self.of(self._body(route))

    def component(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return what a schema refers to."""
        found: dict[str, Any] = self.components[schema["$ref"].rpartition("/")[2]]
        return found

    def _types_of(self, route: PublicRoute) -> Iterator[Any]:
        if route.body is not None:
            yield self._body(route)
        if route.answer is not None:
            yield route.answer
        yield from parameter_types(route).values()

    def _body(self, route: PublicRoute) -> Any:
        key = (route.body, route.path if route.fields else "")
        if key not in self._documented:
            self._documented[key] = _documented(route)
        return self._documented[key]


def _documented(route: PublicRoute) -> Any:
    """Return a route's body as it is documented: fields without a type may be any JSON.

    The fields in which engines tell each other where KV is are no client's to set.
    """
    info = msgspec.structs.fields(route.body)
    if not route.fields and not any(field.type is msgspec.Raw for field in info):
        return route.body
    fields: list[Any] = []
    for field in info:
        if field.name in ENGINE_FIELDS or field.name == NESTED_FIELDS:
            continue
        kind = route.fields.get(field.name, Any if field.type is msgspec.Raw else field.type)
        if field.required:
            fields.append((field.encode_name, kind))
        else:
            default = None if field.type is msgspec.Raw else field.default
            fields.append((field.encode_name, kind, default))
    return msgspec.defstruct(
        route.body.__name__,
        fields,
        kw_only=True,
        forbid_unknown_fields=route.body.__struct_config__.forbid_unknown_fields,
        namespace={"__doc__": route.body.__doc__},
    )


def parameter_types(route: PublicRoute) -> dict[str, Any]:
    """Return the type of each query parameter of a route."""
    if route.query is None:
        return {}
    if isinstance(route.query, dict):
        return route.query
    return {field.encode_name: field.type for field in msgspec.structs.fields(route.query)}


def _path_item(path: str) -> dict[str, Any]:
    """Return a path's item: Workers AI's clients have an account before the path."""
    if path.startswith("/ai/"):
        return {"servers": [{"url": "/"}, _account_server(ACCOUNT)]}
    if path.startswith("/v1/"):
        return {"servers": [{"url": "/"}, {"url": "/ai"}, _account_server(f"{ACCOUNT}/ai")]}
    return {}


def _account_server(url: str) -> dict[str, Any]:
    description = "any account: the key decides"
    return {"url": url, "variables": {"account_id": {"default": "a", "description": description}}}


def _operation(route: PublicRoute, schemas: _Schemas) -> dict[str, Any]:
    name = "_".join(re.findall(r"\w+", f"{route.method.lower()} {route.path}"))
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": route.summary,
        "parameters": _parameters(route, schemas),
        "responses": {
            "200": {"description": "OK", "content": _answer_content(route, schemas)},
            "default": {
                "description": "An error",
                "content": {JSON: {"schema": _reference(_ERRORS[route.surface])}},
            },
        },
    }
    if route.surface == "open":
        operation["security"] = []
        if route.answer is answers.HealthAnswer:
            unready = {JSON: {"schema": _reference(answers.HealthAnswer)}}
            operation["responses"]["503"] = {"description": "Not ready", "content": unready}
    elif route.surface != "workers_ai":
        operation["security"] = [{"key": []}, {"x-api-key": []}]
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _body_content(route, schemas)}
    return operation


def _answer_content(route: PublicRoute, schemas: _Schemas) -> dict[str, Any]:
    content: dict[str, Any] = {name: {} for name in route.media_types}
    if route.answer is None:
        return content
    schema = schemas.of(route.answer)
    if route.surface == "workers_ai":
        schema = _enveloped(schema)
    elif route.is_list:
        schema = _listed(schema)
    return {JSON: {"schema": schema}, **content}


def _enveloped(result: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of Workers AI's envelope of a result."""
    empty = {"type": "array", "maxItems": 0}
    return {
        "type": "object",
        "required": ["result", "success", "errors", "messages"],
        "properties": {
            "result": result,
            "success": {"const": True},
            "errors": empty,
            "messages": {"type": "array"},
        },
    }


def _listed(item: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of OpenAI's list of items."""
    text = {"type": ["string", "null"]}
    return {
        "type": "object",
        "required": ["object", "data", "has_more"],
        "properties": {
            "object": {"const": "list"},
            "data": {"type": "array", "items": item},
            "first_id": text,
            "last_id": text,
            "has_more": {"type": "boolean"},
        },
    }


def _body_content(route: PublicRoute, schemas: _Schemas) -> dict[str, Any]:
    schema = schemas.body_of(route)
    if route.path == RUN_PATH:
        # The struct of a task says less than the table by which its fields are refused.
        tasks = [{"$ref": REF.format(name=_run_name(name))} for name in FIELDS_OF_TASK]
        inner = schemas.component(_reference(ResponsesRequest))
        required = [name for name in inner["required"] if name != "model"]
        return {JSON: {"schema": {"anyOf": [*tasks, {**inner, "required": required}, schema]}}}
    if not route.files:
        return {JSON: {"schema": schema}}
    form = dict(schemas.component(schema))
    form["properties"] = {**form["properties"], **dict.fromkeys(route.files, _BINARY)}
    form["required"] = [*form.get("required", ()), *route.files]
    return {"multipart/form-data": {"schema": form}}


def _parameters(route: PublicRoute, schemas: _Schemas) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = []
    for name in _PATH_PARAMETER.findall(route.path):
        schema = _MODEL if name == "model" else _OBJECT_ID
        parameters.append({"name": name, "in": "path", "required": True, "schema": schema})
    required = _required(route.query)
    for name, kind in parameter_types(route).items():
        given = {"name": name, "in": "query", "schema": schemas.of(kind)}
        parameters.append({**given, "required": name in required})
    if route.is_inference:
        for name, kind in _REQUEST_HEADERS.items():
            header_schema = msgspec.json.schema(kind)
            parameters.append({"name": name, "in": "header", "schema": header_schema})
    return parameters


def _required(query: Any) -> set[str]:
    if query is None or isinstance(query, dict):
        return set()
    return {field.encode_name for field in msgspec.structs.fields(query) if field.required}


def _reference(struct: type) -> dict[str, Any]:
    return {"$ref": REF.format(name=struct.__name__)}


def _run_name(deciding_field: str) -> str:
    return f"Run_{deciding_field}"
