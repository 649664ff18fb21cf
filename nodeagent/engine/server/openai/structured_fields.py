"""The request fields that constrain an output, and the grammar they ask for.

OpenAI's `response_format` (with Workers AI's bare schema), vLLM's `structured_outputs` and its
older `guided_*` fields mean the same things. A request may use at most one of them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import msgspec

from nodeagent.engine.server.openai.request_errors import invalid_request
from nodeagent.engine.structured.grammar import (
    Grammar,
    GrammarError,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
)

_ENVELOPE_KEYS: Final = {"name", "description", "schema", "strict"}

GrammarBuilder = Callable[[], Grammar]


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Any = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`. Fields that cannot be enforced are unknown and refused."""

    json: Any = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    whitespace_pattern: None = None
    disable_any_whitespace: Literal[False] | None = None


class StructuredOutputFields(msgspec.Struct, kw_only=True):
    """All fields of a request body that constrain its output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None


def requested_grammar(body: StructuredOutputFields) -> Grammar | None:
    """Return the grammar that `body` asks for; None if it asks for none. Raises ApiError."""
    structured = body.structured_outputs or StructuredOutputs()
    builders = {
        **_from_response_format(body.response_format),
        **_from_values("structured_outputs.", structured.json, structured.regex, structured.choice),
        **_from_values("guided_", body.guided_json, body.guided_regex, body.guided_choice),
    }
    if structured.json_object:
        param = "structured_outputs.json_object"
        builders[param] = partial(json_object_grammar, param)
    if not builders:
        return None
    param, build = next(iter(builders.items()))
    if len(builders) > 1:
        names = " and ".join(f"'{name}'" for name in builders)
        raise invalid_request(param, f"cannot use fields {names} together: give one of them")
    try:
        return build()
    except GrammarError as error:
        raise invalid_request(param, str(error)) from error


def _from_response_format(response_format: ResponseFormat | None) -> dict[str, GrammarBuilder]:
    param = "response_format"
    if response_format is None or response_format.type == "text":
        return {}
    if response_format.type == "json_object":
        return {param: lambda: json_object_grammar(param)}
    schema, lenient = _unwrap_schema(response_format.json_schema)
    return {param: lambda: json_schema_grammar(schema, param, lenient=lenient)}


def _from_values(
    prefix: str, schema: Any, regex: str | None, choices: list[str] | None
) -> dict[str, GrammarBuilder]:
    builders: dict[str, GrammarBuilder] = {}
    if schema is not None:
        param = f"{prefix}json"
        builders[param] = lambda: json_schema_grammar(_parse_schema(schema, param), param)
    if regex is not None:
        builders[f"{prefix}regex"] = lambda: regex_grammar(regex, f"{prefix}regex")
    if choices is not None:
        builders[f"{prefix}choice"] = lambda: choice_grammar(choices, f"{prefix}choice")
    return builders


class _UnwrappedSchema(NamedTuple):
    schema: Any
    lenient: bool


def _unwrap_schema(value: Any) -> _UnwrappedSchema:
    """Return the schema of `json_schema`, and whether keywords that cannot be enforced may pass.

    OpenAI wraps the schema in an object with a name; Workers AI gives it bare. JSON Schema has no
    keyword `schema`, so the two forms cannot be confused.
    """
    if (
        isinstance(value, dict)
        and value.keys() <= _ENVELOPE_KEYS
        and value.keys() & {"schema", "name"}
    ):
        return _UnwrappedSchema(value.get("schema", {}), value.get("strict") is False)
    return _UnwrappedSchema(value, False)


def _parse_schema(schema: Any, param: str) -> Any:
    """Return a schema that may be given as an object or, as in vLLM, as a JSON string."""
    if not isinstance(schema, str):
        return schema
    try:
        return msgspec.json.decode(schema)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"cannot use field '{param}': its string is not JSON") from error
