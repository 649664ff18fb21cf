"""Which grammar a request body asks for, in whichever of the field's dialects it says so.

OpenAI's `response_format`, the same with Workers AI's bare schema, and vLLM's `structured_outputs`
and older `guided_*` fields mean the same things. At most one of them may be given.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal

import msgspec

from isochrone.wire.errors import ApiError, ErrorCode
from nodeagent.engine.structured import grammar
from nodeagent.engine.structured.grammar import Grammar, UnusableGrammar

_ENVELOPE: Final = {"name", "description", "schema", "strict"}


class ResponseFormat(msgspec.Struct):
    """What kind of text the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Any = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's fields of today. What is not here cannot be enforced, so it is refused by name."""

    json: Any = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    whitespace_pattern: None = None
    disable_any_whitespace: Literal[False] | None = None


class Constrained(msgspec.Struct, kw_only=True):
    """The fields of a body that constrain its output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None


def grammar_of(body: Constrained) -> Grammar | None:
    """Return the one grammar that `body` asks for, or raise ApiError."""
    structured = body.structured_outputs or StructuredOutputs()
    asked = {
        **_by_response_format(body.response_format),
        **_by_values("structured_outputs.", structured.json, structured.regex, structured.choice),
        **_by_values("guided_", body.guided_json, body.guided_regex, body.guided_choice),
    }
    if structured.json_object:
        param = "structured_outputs.json_object"
        asked[param] = partial(grammar.of_any_object, param)
    if not asked:
        return None
    param, build = next(iter(asked.items()))
    if len(asked) > 1:
        raise refused(param, f"cannot obey both {' and '.join(asked)}: give one of them")
    try:
        return build()
    except UnusableGrammar as error:
        raise refused(param, str(error)) from error


def _by_response_format(asked: ResponseFormat | None) -> dict[str, Callable[[], Grammar]]:
    param = "response_format"
    if asked is None or asked.type == "text":
        return {}
    if asked.type == "json_object":
        return {param: lambda: grammar.of_any_object(param)}
    schema, lenient = _unwrapped(asked.json_schema)
    return {param: lambda: grammar.of_schema(schema, param, lenient=lenient)}


def _by_values(
    prefix: str, schema: Any, regex: str | None, choices: list[str] | None
) -> dict[str, Callable[[], Grammar]]:
    found: dict[str, Callable[[], Grammar]] = {}
    if schema is not None:
        found[f"{prefix}json"] = lambda: grammar.of_schema(_parsed(schema), f"{prefix}json")
    if regex is not None:
        found[f"{prefix}regex"] = lambda: grammar.of_regex(regex, f"{prefix}regex")
    if choices is not None:
        found[f"{prefix}choice"] = lambda: grammar.of_choices(choices, f"{prefix}choice")
    return found


def _unwrapped(given: Any) -> tuple[Any, bool]:
    """Return the schema itself and whether it may be followed loosely.

    OpenAI wraps the schema with a name; Workers AI gives it bare. No keyword of JSON Schema is
    called `schema`, so the two cannot be confused.
    """
    if isinstance(given, dict) and given.keys() <= _ENVELOPE and given.keys() & {"schema", "name"}:
        return given.get("schema", {}), given.get("strict") is False
    return given, False


def _parsed(schema: Any) -> Any:
    """vLLM takes a schema as an object and as a string that holds one."""
    if not isinstance(schema, str):
        return schema
    try:
        return msgspec.json.decode(schema)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UnusableGrammar("cannot use a JSON schema that is no JSON") from error


def refused(param: str, message: str) -> ApiError:
    """Make the error for a value that cannot be used."""
    return ApiError(ErrorCode.INVALID_REQUEST, message, param=param)
