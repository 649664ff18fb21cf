"""Translates a request's fields into those of TensorRT-LLM, schemas into its guided decoding.

TensorRT-LLM 1.2 reads OpenAI's `json_schema` object as the schema, which then allows any JSON. It
has no `strict` of functions, no `parallel_tool_calls` and no `tool_choice` of "required", and
refuses the fields that it does not know; it does not enforce a named tool (openai_protocol.py). Its
`response_format` has the types `json` and `structural_tag` besides, which constrain the answer. The
second is a grammar of xgrammar: the model may write any text, but what follows a trigger must be
one of the tags.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from isochrone.wire.errors import ApiError, ErrorCode


class GuidedDecoding(msgspec.Struct, frozen=True):
    """The requests of this engine are translated. `tool_parser` is the name of its parser.

    With `reasons` the engine separates the reasoning with which answers begin.
    """

    tool_parser: str = ""
    reasons: bool = False


class CallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a model writes one call: `begin`, the name, `after_name`, the arguments, `end`.

    `trigger` is the part of `begin` after which nothing but a call may follow. With `numbers_calls`
    a number stands between `after_name` and `before_arguments`. `opening` stands before all calls.
    """

    opening: str = ""
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
        opening="<|tool_calls_section_begin|>",
        trigger="<|tool_call_begin|>",
        begin="<|tool_call_begin|>functions.",
        after_name=":",
        numbers_calls=True,
        before_arguments="<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
    ),
    **dict.fromkeys(
        ("deepseekv3", "deepseek_v3"),
        CallFormat(
            opening="<｜tool▁calls▁begin｜>",
            trigger="<｜tool▁call▁begin｜>",
            begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            after_name="\n```json\n",
            end="\n```<｜tool▁call▁end｜>",
        ),
    ),
    **dict.fromkeys(
        ("deepseekv3.1", "deepseek_v31"),
        CallFormat(
            opening="<｜tool▁calls▁begin｜>",
            trigger="<｜tool▁call▁begin｜>",
            begin="<｜tool▁call▁begin｜>",
            after_name="<｜tool▁sep｜>",
            end="<｜tool▁call▁end｜>",
        ),
    ),
}
"""The formats that TensorRT-LLM's parsers read and whose arguments are JSON, by the parser's name
(tensorrt_llm/serve/tool_parser); those for DeepSeek have their second name in versions after 1.2.
Others do not write JSON. A grammar could hold the tags of `qwen3_coder`, but its parser reads the
values by rules of its own: whatever the schema says, 1.2 makes a number of a text of digits, and
later versions make none of the text `null`."""

WITHOUT_EFFECT: Final = frozenset(
    (
        *("metadata", "modalities", "prediction", "safety_identifier", "service_tier", "store"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "verbosity"),
    )
)
"""OpenAI's fields that its server refuses as unknown. Routers refuse values of them that would
change an answer."""

ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object", "additionalProperties": True}
"""The arguments of a function that is not strict, or that has no `parameters`."""


class _CallRules(NamedTuple):
    """The calls that an answer may have: of `functions`, with at least one if `is_required`, and
    with one at most if `is_single`. `subject` and `param` say which field demands it."""

    functions: list[dict[str, Any]]
    subject: str
    param: str
    is_required: bool = False
    is_single: bool = False


def with_guided_decoding(fields: Mapping[str, Any], guided: GuidedDecoding) -> dict[str, Any]:
    """Return the fields of a request, decoded or raw, with schemas that the engine follows.

    Raises ApiError 400 for a `response_format` without a schema that the engine can use, and for
    demands on calls that the engine cannot be held to.
    """
    translated = {name: fields[name] for name in fields if name not in WITHOUT_EFFECT}
    is_single = _decoded(translated, "parallel_tool_calls") is False
    translated.pop("parallel_tool_calls", None)
    # It knows either name, and takes both in one body for an unknown field, even if one is null.
    limit = translated.pop("max_completion_tokens", None)
    if _decoded({"limit": limit}, "limit") is not None:
        translated["max_tokens"] = limit
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
    rules = _call_rules(functions, _decoded(fields, "tool_choice"), is_single=is_single)
    if rules is not None:
        _refuse_unguided(rules, answer, guided)
        translated["response_format"] = _call_grammar(rules, CALL_FORMATS[guided.tool_parser])
        if rules.is_required:
            translated["tool_choice"] = "auto"
    for function in functions:
        function.pop("strict", None)
    translated["tools"] = tools
    return translated


def _call_rules(
    functions: list[dict[str, Any]], choice: Any, *, is_single: bool
) -> _CallRules | None:
    """Return what a request demands of calls; None if the model may write them as it likes."""
    if not functions or choice == "none":
        return None
    if isinstance(choice, dict):
        named = choice.get("function")
        name = named.get("name") if isinstance(named, dict) else None
        chosen = [function for function in functions if function.get("name") == name]
        if not chosen:
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                "cannot use field 'tool_choice': no function of 'tools' has its name",
                param="tool_choice",
            )
        return _CallRules(chosen, "a required tool", "tool_choice", True, True)
    if choice == "required":
        return _CallRules(functions, "a required tool", "tool_choice", True, is_single)
    if any(function.get("strict") is True for function in functions):
        return _CallRules(functions, "'strict' functions", "tools", is_single=is_single)
    if is_single:
        param = "parallel_tool_calls"
        return _CallRules(functions, f"'{param}': false", param, is_single=True)
    return None


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


def _refuse_unguided(rules: _CallRules, response_format: Any, guided: GuidedDecoding) -> None:
    """Raise ApiError 400 if calls cannot be constrained, or not beside the `response_format`."""
    problem, param = "", rules.param
    if guided.tool_parser not in CALL_FORMATS:
        known = ", ".join(sorted(CALL_FORMATS))
        problem = f"cannot use {rules.subject}: this model has no tool parser of {known}"
    elif rules.is_required and guided.reasons:
        problem = f"cannot use {rules.subject}: the answers of this model begin with reasoning"
    elif not rules.is_required and response_format not in (None, {"type": "text"}):
        problem = f"cannot use 'response_format' beside {rules.subject}: this engine follows one"
        param = "response_format"
    if problem:
        raise ApiError(ErrorCode.INVALID_REQUEST, f"{problem}; leave it out", param=param)


def _call_grammar(rules: _CallRules, form: CallFormat) -> dict[str, Any]:
    """Return the `response_format` of an answer with these calls.

    A call that is required follows the function's schema unless that is not `strict`, any other
    only if it is.
    """
    followed = (True, None) if rules.is_required else (True,)
    tags = [
        {
            "type": "tag",
            "begin": f"{form.begin}{function.get('name', '')}{form.after_name}",
            "content": _arguments(function, form, follows=function.get("strict") in followed),
            "end": form.end,
        }
        for function in rules.functions
    ]
    calls = {
        "type": "triggered_tags",
        "triggers": [form.trigger],
        "tags": tags,
        "at_least_one": rules.is_required,
        "stop_after_first": rules.is_single,
    }
    if rules.is_required and form.opening:
        opening = {"type": "const_string", "value": form.opening}
        calls = {"type": "sequence", "elements": [opening, calls]}
    return {"type": "structural_tag", "format": calls}


def _arguments(function: Mapping[str, Any], form: CallFormat, *, follows: bool) -> dict[str, Any]:
    """Return the grammar of what stands between `after_name` and `end`.

    The arguments are any object unless the call `follows` the function's schema.
    """
    parameters = function.get("parameters") if follows else None
    schema = {"type": "json_schema", "json_schema": parameters or ANY_OBJECT}
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
