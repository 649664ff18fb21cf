"""The request fields for tools: which tools there are, and which the model may or must call.

Accepted are OpenAI's `{"type": "function", "function": {...}}` and Workers AI's flat
`{"name": ..., "parameters": {...}}`; `tool_choice` is `auto`, `none`, `required`, a function by
name, or `allowed_tools`.
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
from nodeagent.engine.server.openai.request_errors import invalid_request
from nodeagent.engine.structured.grammar import Grammar, GrammarError, union


class FunctionSpec(msgspec.Struct, forbid_unknown_fields=True):
    """A function as a client describes it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(msgspec.Struct, forbid_unknown_fields=True):
    """A tool: `function` in OpenAI's form, the other fields in Workers AI's."""

    type: Literal["function"] = "function"
    function: FunctionSpec | None = None
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionNameSpec(msgspec.Struct, forbid_unknown_fields=True):
    """A function by its name."""

    name: str


class ToolNameSpec(msgspec.Struct, forbid_unknown_fields=True):
    """A tool by the name of its function."""

    function: FunctionNameSpec
    type: Literal["function"] = "function"


class AllowedToolsSpec(msgspec.Struct, forbid_unknown_fields=True):
    """The `allowed_tools` of a tool choice."""

    tools: Annotated[list[ToolNameSpec], Meta(min_length=1, max_length=TOOLS_MAX)]
    mode: Literal["auto", "required"] = "auto"


class ToolChoiceSpec(msgspec.Struct, forbid_unknown_fields=True):
    """A `tool_choice` that is an object."""

    type: Literal["function", "allowed_tools"]
    function: FunctionNameSpec | None = None
    allowed_tools: AllowedToolsSpec | None = None


class CalledFunctionSpec(msgspec.Struct):
    """The function of a call in an earlier answer."""

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
    """The tools of one request, and which of them the model may or must call."""

    described: tuple[ToolDefinition, ...]
    """The tools in the prompt."""
    callable: tuple[ToolDefinition, ...]
    """The tools that may be called."""
    must_call: bool
    calls_max: int

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The parameter schema of each tool that may be called, by name."""
        return {tool.name: tool.parameters for tool in self.callable}

    def grammar(
        self,
        call_format: ToolCallFormat,
        special_ids: dict[str, int],
        answer_grammar: Grammar | None,
    ) -> Grammar | None:
        """Return the grammar of the output; None if the output is free.

        `answer_grammar` is the grammar that the request's other fields ask for, `special_ids` the
        format's marks that are special tokens. Raises ApiError.
        """
        if self.must_call and answer_grammar and answer_grammar.param == "response_format":
            # It describes the text of an answer, and a required call has none. Clients send both.
            answer_grammar = None
        if self.must_call and answer_grammar is not None:
            raise invalid_request(
                answer_grammar.param,
                f"cannot use field '{answer_grammar.param}' with a 'tool_choice' that requires a"
                " call",
            )
        # The model may answer in text, but a call of a strict tool must follow its parameters.
        text_allowed = not self.must_call and answer_grammar is None
        if text_allowed and not any(tool.strict for tool in self.callable):
            return None
        try:
            calls = tool_call_grammar(
                self.callable, call_format, self.calls_max, special_ids, text_allowed=text_allowed
            )
        except GrammarError as error:
            raise invalid_request("tools", str(error)) from error
        return calls if answer_grammar is None else union(answer_grammar, calls)


def requested_tools(
    specs: list[ToolSpec] | None, choice: ToolChoice, parallel: bool | None
) -> RequestTools | None:
    """Return the tools of a request; None if it has none or forbids calls. Raises ApiError."""
    tools = tuple(_definition(spec) for spec in specs or ())
    names = [tool.name for tool in tools]
    if len(tools) > TOOLS_MAX:
        raise invalid_request(
            "tools", f"cannot use field 'tools': {len(tools)} tools, the limit is {TOOLS_MAX}"
        )
    for name in names:
        if names.count(name) > 1:
            raise invalid_request("tools", f"cannot use two tools with the name {name!r}")
    if choice == "none" or (not tools and choice in (None, "auto")):
        return None
    calls_max = 1 if parallel is False else CALLS_MAX
    if choice is None or isinstance(choice, str):
        return RequestTools(tools, _select(tools, names), choice == "required", calls_max)
    if choice.type == "function" and choice.function is not None:
        return RequestTools(tools, _select(tools, [choice.function.name]), True, 1)
    if choice.allowed_tools is not None:
        allowed = [tool.function.name for tool in choice.allowed_tools.tools]
        must_call = choice.allowed_tools.mode == "required"
        return RequestTools(tools, _select(tools, allowed), must_call, calls_max)
    raise invalid_request(
        "tool_choice",
        f"cannot use field 'tool_choice': type '{choice.type}' needs the field '{choice.type}'",
    )


def template_calls(calls: list[ToolCallSpec]) -> list[dict[str, Any]]:
    """Return earlier calls in the form that chat templates expect: arguments as an object."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {
                "name": call.function.name,
                "arguments": _arguments_object(call.function.arguments),
            },
        }
        for call in calls
    ]


def _definition(spec: ToolSpec) -> ToolDefinition:
    function = spec.function
    if function is None:
        if spec.name is None:
            raise invalid_request(
                "tools", "cannot use field 'tools': a tool needs a 'function' or a 'name'"
            )
        function = FunctionSpec(spec.name, spec.description, spec.parameters, spec.strict)
    if not TOOL_NAME.fullmatch(function.name):
        raise invalid_request(
            "tools",
            f"cannot use the tool name {function.name[:80]!r}: expected 1 to 128 letters, digits"
            " and _.:/-",
        )
    return ToolDefinition(
        function.name, function.description or "", function.parameters or {}, bool(function.strict)
    )


def _select(tools: tuple[ToolDefinition, ...], names: list[str]) -> tuple[ToolDefinition, ...]:
    by_name = {tool.name: tool for tool in tools}
    missing = [name for name in names if name not in by_name]
    if missing:
        raise invalid_request(
            "tool_choice",
            f"cannot use field 'tool_choice': {missing[0][:80]!r} is not among the tools",
        )
    if not names:
        raise invalid_request("tool_choice", "cannot require a call: the request has no tools")
    return tuple(by_name[name] for name in dict.fromkeys(names))


def _arguments_object(arguments: str | dict[str, Any]) -> Any:
    """Return the arguments as an object; a string that is not a JSON object stays as it is."""
    if isinstance(arguments, dict):
        return arguments
    try:
        value = msgspec.json.decode(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
