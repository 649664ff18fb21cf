"""Makes of a client's request body the one that an engine gets."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from isochrone.wire.codec import describe
from isochrone.wire.engines.dead_grammars import grammar_problem
from isochrone.wire.engines.schema_numbers import NUMBER_MIN, has_low_number
from isochrone.wire.engines.schema_recursion import recursion_of
from isochrone.wire.engines.unread_keywords import unread_keyword
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.http.json_body import check_json_body
from nodeagent.drivers.driver import EngineCommand
from nodeagent.drivers.guided_decoding import with_guided_decoding

CONTINUOUS_USAGE: Final = "continuous_usage_stats"
"""The option of a stream that puts the usage so far into each event, as vLLM calls it."""

_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_SCHEMAS: Final = ("response_format", "tools")
_COMPILED: Final = (*_SCHEMAS, "json_schema", "grammar")
_SCHEMAS_AS_TEXT: Final = ("structured_outputs", "guided_json", "guided_grammar")
"""Fields with a client's JSON schemas; the latter ones may be written as text."""


PLAIN: Final = EngineCommand(arguments=(), base_url="")
"""An engine that needs no other bodies than its clients write."""


def with_fields(
    body: bytes,
    values: Mapping[str, Any],
    command: EngineCommand = PLAIN,
    *,
    counts_tokens: bool = False,
) -> bytes:
    """Return a request body with these fields set, as an engine started by `command` can use it.

    They replace what the client wrote; those that are None are removed. One of them is the salt
    that separates the prefix caches of tenants: a cache hit would reveal another tenant's prompt.
    With `counts_tokens` a stream asks for CONTINUOUS_USAGE, unless its client may have chosen.

    Raises ApiError 400 for a body that cannot be decoded (the engine's parser may be more lenient,
    and would read a salt of the client's choice), for one with a schema that could end the engine
    (`schema_numbers.py`, `schema_recursion.py`, `dead_grammars.py`), and for one that the engine
    would answer wrongly, as `command` says.
    """
    try:
        check_json_body(body)
        fields: dict[str, Any] = _FIELDS.decode(body)
        _check_schemas(fields)
        _check_limits(fields, command.field_limits)
        _check_grammars(fields, command.schema_recursion_max)
        if command.schema_recursion_max:
            _check_strict_schemas(fields)
        if command.functions_only:
            _check_tools(msgspec.json.decode(fields.get("tools", b"null")))
    except (ValueError, RecursionError) as error:
        raise ApiError(
            ErrorCode.INVALID_REQUEST, f"cannot use the request body: {describe(error)}"
        ) from error
    forces_tools = _requires_call(fields)
    _check_calls(fields, command, forces_tools=forces_tools)
    if command.strict_forced_tools and forces_tools:
        fields["tools"] = _strict(msgspec.json.decode(fields.get("tools", b"null")))
    if command.fills_refusals and b'"refusal"' in body:
        fields["messages"] = _with_refusals(msgspec.json.decode(fields.get("messages", b"null")))
    if command.guided is not None:
        fields = with_guided_decoding(fields, command.guided)
    is_stream = bytes(fields.get("stream", b"")) == b"true"
    if counts_tokens and is_stream and not mentions_token_counts(body):
        fields["stream_options"] = _with_token_counts(fields.get("stream_options", b"null"))
    removed = [name for name in values if values[name] is None]
    kept = {name: value for name, value in {**fields, **values}.items() if name not in removed}
    return msgspec.json.encode(kept)


def mentions_token_counts(body: bytes) -> bool:
    """Return whether a client may have chosen CONTINUOUS_USAGE itself. Costs one search."""
    return CONTINUOUS_USAGE.encode() in body


def _with_token_counts(stream_options: msgspec.Raw | bytes) -> Any:
    options = msgspec.json.decode(stream_options)
    if options is not None and not isinstance(options, dict):
        return options  # the engine refuses it
    return {CONTINUOUS_USAGE: True, **(options or {})}


def _check_schemas(fields: Mapping[str, msgspec.Raw]) -> None:
    for name in fields.keys() & {*_SCHEMAS, *_SCHEMAS_AS_TEXT}:
        value = msgspec.json.decode(fields[name])
        if has_low_number(value, in_texts=name in _SCHEMAS_AS_TEXT):
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"cannot use field '{name}': a schema in it has a number below {NUMBER_MIN}",
                param=name,
            )


def _check_limits(fields: Mapping[str, msgspec.Raw], limits: Mapping[str, int]) -> None:
    for name in fields.keys() & limits:
        value = msgspec.json.decode(fields[name])
        size = len(value) if isinstance(value, str | list | dict) else value
        # Engines take the low 32 bits of a number, so one far below zero may be a high one to them.
        if isinstance(size, int | float) and abs(size) > limits[name]:
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"cannot use field '{name}': it is above the limit of {limits[name]}",
                param=name,
            )


def _check_grammars(fields: Mapping[str, msgspec.Raw], recursion_max: int) -> None:
    for name in fields.keys() & _COMPILED if recursion_max else ():
        value = msgspec.json.decode(fields[name])
        problem = grammar_problem(value)
        if recursion_of(value) > recursion_max:
            problem = f"it has more than {recursion_max} references or parentheses"
        if problem:
            message = f"cannot use field '{name}': {problem}"
            raise ApiError(ErrorCode.INVALID_REQUEST, message, param=name)


def _check_strict_schemas(fields: Mapping[str, msgspec.Raw]) -> None:
    for param, schema in _strict_schemas(fields):
        if unread := unread_keyword(schema):
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"cannot hold an answer to {unread} of a 'strict' schema: the engine does not read"
                " it; leave it out, or 'strict'",
                param=param,
            )


def _strict_schemas(fields: Mapping[str, msgspec.Raw]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas to which a client asks an engine to hold its answer, and their fields."""
    form = msgspec.json.decode(fields.get("response_format", b"null"))
    described = form.get("json_schema") if isinstance(form, dict) else None
    if isinstance(described, dict) and described.get("strict") is True:
        yield "response_format", described.get("schema")
    tools = msgspec.json.decode(fields.get("tools", b"null"))
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and function.get("strict") is True:
            yield "tools", function.get("parameters")


def _check_tools(tools: Any) -> None:
    for tool in tools if isinstance(tools, list) else ():
        is_function = isinstance(tool, dict) and tool.get("type") == "function"
        if not is_function or not isinstance(tool.get("function"), dict):
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                "cannot use field 'tools': expected tools of type 'function'",
                param="tools",
            )


def _check_calls(
    fields: Mapping[str, msgspec.Raw], command: EngineCommand, *, forces_tools: bool
) -> None:
    if not command.may_force_tools and forces_tools:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            "cannot require a call of a tool: the chat template of this model has no tools, and"
            " its engine would answer with a text; leave 'tool_choice' out, or ask another model",
            param="tool_choice",
        )
    if not command.may_be_strict and not forces_tools and _may_call_strict(fields):
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            "cannot hold calls of a 'strict' function to its schema: the parser of this model's"
            " calls only reads them; leave 'strict' out, or require a call with 'tool_choice'",
            param="tools",
        )


def _with_refusals(messages: Any) -> Any:
    """Give messages that are a refusal alone its text as content; leave all others as they are."""
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict) or message.get("content") or message.get("tool_calls"):
            continue
        if isinstance(message.get("refusal"), str):
            message["content"] = message["refusal"]
    return messages


def _requires_call(fields: Mapping[str, msgspec.Raw]) -> bool:
    choice = msgspec.json.decode(fields.get("tool_choice", b"null"))
    return choice == "required" or isinstance(choice, dict)


def _may_call_strict(fields: Mapping[str, msgspec.Raw]) -> bool:
    tools = msgspec.json.decode(fields.get("tools", b"null"))
    choice = msgspec.json.decode(fields.get("tool_choice", b"null"))
    listed = tools if isinstance(tools, list) else ()
    functions = [tool.get("function") for tool in listed if isinstance(tool, dict)]
    is_strict = any(
        isinstance(function, dict) and function.get("strict") is True for function in functions
    )
    return is_strict and choice != "none"


def _strict(tools: Any) -> Any:
    """Mark functions `strict` whose client has not chosen; leave what is no function as it is."""
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and function.get("strict") is None:
            function["strict"] = True
    return tools
