"""Translates schemas of a request into TensorRT-LLM's own fields for guided decoding.

TensorRT-LLM 1.2 takes OpenAI's `json_schema` for the schema itself, which then allows any JSON. It
has no `strict` of functions and no `parallel_tool_calls`, and refuses unknown fields
(openai_protocol.py). Its `response_format` has the types `json` and
`structural_tag` besides, which constrain the answer. The second is a grammar of xgrammar: the model
may write any text, but what follows a trigger must be one of the tags.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from isochrone.wire.errors import ApiError, ErrorCode


class GuidedDecoding(msgspec.Struct, frozen=True):
    """The requests of this engine are translated. `tool_parser` is the name of its parser."""

    tool_parser: str = ""


class CallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a model writes one call: `begin`, the name, `after_name`, the arguments, `end`.

    `trigger` is the part of `begin` after which nothing but a call may follow. With `numbers_calls`
    a number stands between `after_name` and `before_arguments`.
    """

    trigger: str
    begin: str
    after_name: str
    numbers_calls: bool = False
    before_arguments: str = ""
    end: str


CALL_FORMATS: Final[Mapping[str, CallFormat]] = {
    "qwen3": CallFormat(
        trigger="<tool_call>",
        begin='<tool_call>\n{"name": "',
        after_name='", "arguments": ',
        end="}\n</tool_call>",
    ),
    "kimi_k2": CallFormat(
        trigger="<|tool_call_begin|>",
        begin="<|tool_call_begin|>functions.",
        after_name=":",
        numbers_calls=True,
        before_arguments="<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
    ),
    "deepseekv3": CallFormat(
        trigger="<｜tool▁call▁begin｜>",
        begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        after_name="\n```json\n",
        end="\n```<｜tool▁call▁end｜>",
    ),
    "deepseekv3.1": CallFormat(
        trigger="<｜tool▁call▁begin｜>",
        begin="<｜tool▁call▁begin｜>",
        after_name="<｜tool▁sep｜>",
        end="<｜tool▁call▁end｜>",
    ),
}
"""The formats that TensorRT-LLM's parsers read and whose arguments are JSON, by the parser's name
(tensorrt_llm/serve/tool_parser). Others do not write JSON."""

ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object", "additionalProperties": True}
"""The arguments of a function that is not strict, or that has no `parameters`."""


def with_guided_decoding(fields: Mapping[str, Any], guided: GuidedDecoding) -> dict[str, Any]:
    """Return the fields of a request, decoded or raw, with schemas that the engine follows.

    Raises ApiError 400 for a `response_format` without a schema that the engine can use, and if the
    model may call functions that are `strict`, or one function only, and cannot be constrained.
    """
    translated = dict(fields)
    is_single = _decoded(translated, "parallel_tool_calls") is False
    translated.pop("parallel_tool_calls", None)
    answer = _decoded(fields, "response_format")
    if isinstance(answer, dict) and answer.get("type") == "json_schema":
        answer = translated["response_format"] = _json_format(answer)
    tools = _decoded(fields, "tools")
    if not isinstance(tools, list):
        return translated
    functions = [
        tool["function"]
        for tool in tools
        if isinstance(tool, dict) and isinstance(tool.get("function"), dict)
    ]
    strict = [function for function in functions if function.get("strict") is True]
    is_constrained = strict or (is_single and functions)
    if is_constrained and _decoded(fields, "tool_choice") != "none":
        subject = "'strict' functions" if strict else "'parallel_tool_calls': false"
        _refuse_unguided(subject, "tools" if strict else "parallel_tool_calls", answer, guided)
        form = CALL_FORMATS[guided.tool_parser]
        translated["response_format"] = _call_grammar(functions, strict, form, is_single=is_single)
    for function in functions:
        function.pop("strict", None)
    translated["tools"] = tools
    return translated


def _decoded(fields: Mapping[str, Any], name: str) -> Any:
    value = fields.get(name)
    return msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value


def _json_format(response_format: Mapping[str, Any]) -> dict[str, Any]:
    """Return the form with the schema itself."""
    envelope = response_format.get("json_schema")
    schema = envelope.get("schema", {}) if isinstance(envelope, dict) else None
    if not isinstance(schema, dict):
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            "cannot use field 'response_format': expected an object in 'json_schema.schema'",
            param="response_format",
        )
    return {"type": "json", "schema": schema} if schema else {"type": "json_object"}


def _refuse_unguided(
    subject: str, param: str, response_format: Any, guided: GuidedDecoding
) -> None:
    """Raise ApiError 400 if calls cannot be constrained, or not beside the `response_format`."""
    if guided.tool_parser not in CALL_FORMATS:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot use {subject}: this model has no tool parser of"
            f" {', '.join(sorted(CALL_FORMATS))}; leave it out",
            param=param,
        )
    if response_format not in (None, {"type": "text"}):
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot use 'response_format' beside {subject}: this engine follows one of the two;"
            " leave one out",
            param="response_format",
        )


def _call_grammar(
    functions: list[dict[str, Any]],
    strict: list[dict[str, Any]],
    form: CallFormat,
    *,
    is_single: bool,
) -> dict[str, Any]:
    """Return the `response_format` of an answer with calls of these functions; if `is_single`, it
    ends with its first call."""
    tags = [
        {
            "type": "tag",
            "begin": f"{form.begin}{function.get('name', '')}{form.after_name}",
            "content": _arguments(function if function in strict else {}, form),
            "end": form.end,
        }
        for function in functions
    ]
    grammar = {
        "type": "triggered_tags",
        "triggers": [form.trigger],
        "tags": tags,
        "stop_after_first": is_single,
    }
    return {"type": "structural_tag", "format": grammar}


def _arguments(function: Mapping[str, Any], form: CallFormat) -> dict[str, Any]:
    """Return the grammar of what stands between `after_name` and `end`."""
    schema = {
        "type": "json_schema",
        "json_schema": function.get("parameters") or ANY_OBJECT,
    }
    if not form.numbers_calls:
        return schema
    return {
        "type": "sequence",
        "elements": [
            {"type": "regex", "pattern": "[0-9]+"},
            {"type": "const_string", "value": form.before_arguments},
            schema,
        ],
    }
