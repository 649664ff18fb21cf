"""Tools in a chat: what may be called, how the model is told, and the grammar where it must call.

The field's dialects: OpenAI's `{"type": "function", "function": {...}}` and Workers AI's flat
`{"name": ..., "parameters": {...}}`; a choice of `auto`, `none`, `required`, one function by name,
or `allowed_tools`. A template that knows no tools is told of them in its system message.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from nodeagent.engine.structured.grammar import Grammar, UnusableGrammar, either
from nodeagent.engine.structured.request_grammar import refused
from nodeagent.engine.tools.call_format import (
    CALLS_MAX,
    NAME,
    TOOLS_MAX,
    Tool,
    ToolFormat,
    grammar_of_calls,
)


class FunctionSpec(msgspec.Struct):
    """A function as a client describes it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(msgspec.Struct):
    """A tool in either dialect."""

    type: Literal["function"] = "function"
    function: FunctionSpec | None = None
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionName(msgspec.Struct):
    """A function by its name."""

    name: str


class ToolName(msgspec.Struct):
    """A tool by its function's name."""

    function: FunctionName
    type: Literal["function"] = "function"


class AllowedTools(msgspec.Struct):
    """Some of the tools."""

    tools: Annotated[list[ToolName], Meta(min_length=1, max_length=TOOLS_MAX)]
    mode: Literal["auto", "required"] = "auto"


class ChoiceSpec(msgspec.Struct):
    """A choice that is more than a word."""

    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class CallFunction(msgspec.Struct):
    """What an earlier answer called."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class CallSpec(msgspec.Struct):
    """A call in an earlier answer."""

    function: CallFunction
    id: str = ""
    type: Literal["function"] = "function"


Choice = Literal["auto", "none", "required"] | ChoiceSpec | None


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one request and what may or must be done with them."""

    told: tuple[Tool, ...]
    """All tools, as the prompt tells them."""
    callable: tuple[Tool, ...]
    """Those of them that may be called."""
    must: bool
    calls_max: int

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The names that may be called, and the JSON schema of what each takes."""
        return {tool.name: tool.parameters for tool in self.callable}

    def grammar(
        self, how: ToolFormat, special: dict[str, int], answer: Grammar | None
    ) -> Grammar | None:
        """Return the grammar of the output; `answer` is what else the request constrains it to."""
        if self.must and answer is not None:
            raise refused(
                answer.param, f"cannot obey both {answer.param} and a tool_choice that must call"
            )
        # A call may come or not, but a strict tool's is as its parameters say.
        speech = not self.must and answer is None
        if speech and not any(tool.strict for tool in self.callable):
            return None
        try:
            calls = grammar_of_calls(self.callable, how, self.calls_max, special, speech=speech)
        except UnusableGrammar as error:
            raise refused("tools", str(error)) from error
        return calls if answer is None else either(answer, calls)


def tools_of(specs: list[ToolSpec] | None, choice: Choice, parallel: bool | None) -> Tools | None:
    """Return the tools of a request; None where it has none or may call none."""
    told = tuple(_tool(spec) for spec in specs or ())
    names = [tool.name for tool in told]
    if len(told) > TOOLS_MAX:
        raise refused("tools", f"cannot use {len(told)} tools: the limit is {TOOLS_MAX}")
    for name in names:
        if names.count(name) > 1:
            raise refused("tools", f"cannot use two tools of the name {name!r}")
    if choice == "none" or (not told and choice in (None, "auto")):
        return None
    calls_max = 1 if parallel is False else CALLS_MAX
    if choice is None or isinstance(choice, str):
        return Tools(told, _chosen(told, names), choice == "required", calls_max)
    if choice.type == "function" and choice.function is not None:
        return Tools(told, _chosen(told, [choice.function.name]), True, 1)
    if choice.allowed_tools is not None:
        some = [one.function.name for one in choice.allowed_tools.tools]
        must = choice.allowed_tools.mode == "required"
        return Tools(told, _chosen(told, some), must, calls_max)
    raise refused(
        "tool_choice", f"cannot use a tool_choice of type {choice.type} without its field"
    )


def in_words(
    messages: list[dict[str, Any]], described: list[dict[str, Any]], how: ToolFormat
) -> list[dict[str, Any]]:
    """Return `messages` for a template that knows no tools: calls and results as plain text."""
    told = [_worded(message, how) for message in messages]
    if described:
        words = _words(described, how)
        if told and told[0]["role"] == "system":
            told[0] = {**told[0], "content": f"{told[0]['content']}\n\n{words}"}
        else:
            told.insert(0, {"role": "system", "content": words})
    return told


def calls_for_template(calls: list[CallSpec]) -> list[dict[str, Any]]:
    """Return earlier calls as chat templates expect them: arguments as an object."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {
                "name": call.function.name,
                "arguments": _object_of(call.function.arguments),
            },
        }
        for call in calls
    ]


def _tool(spec: ToolSpec) -> Tool:
    function = spec.function
    if function is None:
        if spec.name is None:
            raise refused("tools", "cannot use a tool without a function")
        function = FunctionSpec(spec.name, spec.description, spec.parameters, spec.strict)
    if not NAME.fullmatch(function.name):
        raise refused(
            "tools",
            f"cannot use a tool of the name {function.name[:80]!r}: letters, digits and _.:/- up to"
            " 128 are allowed",
        )
    return Tool(
        function.name, function.description or "", function.parameters or {}, bool(function.strict)
    )


def _chosen(told: tuple[Tool, ...], names: list[str]) -> tuple[Tool, ...]:
    by_name = {tool.name: tool for tool in told}
    missing = [name for name in names if name not in by_name]
    if missing or not names:
        which = f"{missing[0][:80]!r}" if missing else "any tool"
        raise refused("tool_choice", f"cannot call {which}: it is not among the tools")
    return tuple(by_name[name] for name in dict.fromkeys(names))


def _worded(message: dict[str, Any], how: ToolFormat) -> dict[str, Any]:
    if message["role"] in ("tool", "function"):
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": text}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = how.between.join(
        json.dumps(
            {"name": call["function"]["name"], how.arguments_key: call["function"]["arguments"]},
            ensure_ascii=False,
        )
        for call in calls
    )
    said = f"{message['content']}\n" if message["content"] else ""
    return {"role": message["role"], "content": f"{said}{how.before}{written}{how.after}"}


def _words(described: list[dict[str, Any]], how: ToolFormat) -> str:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in described)
    example = f'{{"name": <function name>, "{how.arguments_key}": <object of arguments>}}'
    return (
        "You may call functions to help with the user's query. These are their signatures:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        "To call a function, answer with its name and arguments in this form, and nothing else:\n"
        f"{how.before}{example}{how.after}"
    )


def _object_of(arguments: str | dict[str, Any]) -> Any:
    """Templates write the object themselves; text that is none stays as the model once wrote it."""
    if isinstance(arguments, dict):
        return arguments
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
