"""Tools in a chat: what may be called, how the model is told, and the grammar where it must call.

The field's dialects: OpenAI's `{"type": "function", "function": {...}}` and Workers AI's flat
`{"name": ..., "parameters": {...}}`; a choice of `auto`, `none`, `required`, one function by name,
or `allowed_tools`. A template that knows no tools is told of them in its system message.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from nodeagent.engine.chat.call_format import (
    CALLS_MAX,
    TOOL_NAME,
    TOOLS_MAX,
    ToolCallFormat,
    ToolDefinition,
    tool_call_grammar,
)
from nodeagent.engine.server.structured_fields import invalid_request
from nodeagent.engine.structured.grammar import Grammar, GrammarError, union


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


class FunctionNameSpec(msgspec.Struct):
    """A function by its name."""

    name: str


class ToolNameSpec(msgspec.Struct):
    """A tool by its function's name."""

    function: FunctionNameSpec
    type: Literal["function"] = "function"


class AllowedToolsSpec(msgspec.Struct):
    """Some of the tools."""

    tools: Annotated[list[ToolNameSpec], Meta(min_length=1, max_length=TOOLS_MAX)]
    mode: Literal["auto", "required"] = "auto"


class ToolChoiceSpec(msgspec.Struct):
    """A choice that is more than a word."""

    type: Literal["function", "allowed_tools"]
    function: FunctionNameSpec | None = None
    allowed_tools: AllowedToolsSpec | None = None


class CalledFunctionSpec(msgspec.Struct):
    """What an earlier answer called."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCallSpec(msgspec.Struct):
    """A call in an earlier answer."""

    function: CalledFunctionSpec
    id: str = ""
    type: Literal["function"] = "function"


ToolChoice = Literal["auto", "none", "required"] | ToolChoiceSpec | None


@dataclass(frozen=True, slots=True)
class RequestTools:
    """The tools of one request and what may or must be done with them."""

    all: tuple[ToolDefinition, ...]
    """All tools, as the prompt tells them."""
    callable: tuple[ToolDefinition, ...]
    """Those of them that may be called."""
    must: bool
    calls_max: int

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The names that may be called, and the JSON schema of what each takes."""
        return {tool.name: tool.parameters for tool in self.callable}

    def grammar(
        self, call_format: ToolCallFormat, special: dict[str, int], answer: Grammar | None
    ) -> Grammar | None:
        """Return the grammar of the output; `answer` is what else the request constrains it to."""
        if self.must and answer is not None:
            raise invalid_request(
                answer.param, f"cannot obey both {answer.param} and a tool_choice that must call"
            )
        # A call may come or not, but a strict tool's is as its parameters say.
        speech = not self.must and answer is None
        if speech and not any(tool.strict for tool in self.callable):
            return None
        try:
            calls = tool_call_grammar(
                self.callable, call_format, self.calls_max, special, text_allowed=speech
            )
        except GrammarError as error:
            raise invalid_request("tools", str(error)) from error
        return calls if answer is None else union(answer, calls)


def requested_tools(
    specs: list[ToolSpec] | None, choice: ToolChoice, parallel: bool | None
) -> RequestTools | None:
    """Return the tools of a request; None where it has none or may call none."""
    all = tuple(_tool(spec) for spec in specs or ())
    names = [tool.name for tool in all]
    if len(all) > TOOLS_MAX:
        raise invalid_request("tools", f"cannot use {len(all)} tools: the limit is {TOOLS_MAX}")
    for name in names:
        if names.count(name) > 1:
            raise invalid_request("tools", f"cannot use two tools of the name {name!r}")
    if choice == "none" or (not all and choice in (None, "auto")):
        return None
    calls_max = 1 if parallel is False else CALLS_MAX
    if choice is None or isinstance(choice, str):
        return RequestTools(all, _chosen(all, names), choice == "required", calls_max)
    if choice.type == "function" and choice.function is not None:
        return RequestTools(all, _chosen(all, [choice.function.name]), True, 1)
    if choice.allowed_tools is not None:
        some = [one.function.name for one in choice.allowed_tools.tools]
        must = choice.allowed_tools.mode == "required"
        return RequestTools(all, _chosen(all, some), must, calls_max)
    raise invalid_request(
        "tool_choice", f"cannot use a tool_choice of type {choice.type} without its field"
    )


def template_calls(calls: list[ToolCallSpec]) -> list[dict[str, Any]]:
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


def _tool(spec: ToolSpec) -> ToolDefinition:
    function = spec.function
    if function is None:
        if spec.name is None:
            raise invalid_request("tools", "cannot use a tool without a function")
        function = FunctionSpec(spec.name, spec.description, spec.parameters, spec.strict)
    if not TOOL_NAME.fullmatch(function.name):
        raise invalid_request(
            "tools",
            f"cannot use a tool of the name {function.name[:80]!r}: letters, digits and _.:/- up to"
            " 128 are allowed",
        )
    return ToolDefinition(
        function.name, function.description or "", function.parameters or {}, bool(function.strict)
    )


def _chosen(all: tuple[ToolDefinition, ...], names: list[str]) -> tuple[ToolDefinition, ...]:
    by_name = {tool.name: tool for tool in all}
    missing = [name for name in names if name not in by_name]
    if missing or not names:
        which = f"{missing[0][:80]!r}" if missing else "any tool"
        raise invalid_request("tool_choice", f"cannot call {which}: it is not among the tools")
    return tuple(by_name[name] for name in dict.fromkeys(names))


def _object_of(arguments: str | dict[str, Any]) -> Any:
    """Templates write the object themselves; text that is none stays as the model once wrote it."""
    if isinstance(arguments, dict):
        return arguments
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
