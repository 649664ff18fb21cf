"""The tools of a Responses request: functions, alone or in a namespace. Pure.

A chat completion knows no namespaces. There a function of one is called `namespace__function`, and
a call of it is given back with both names.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from isochrone.wire.errors import ApiError, ErrorCode

CHAT_NAME_CHARS_MAX: Final = 64
_SEPARATOR: Final = "__"


class FunctionTool(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"
):
    """A function that the model may call. Unset fields are not repeated in the response."""

    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: list[Literal["direct"]] | UnsetType | None = UNSET
    is_async: Literal[False] | UnsetType | None = msgspec.field(default=UNSET, name="async")
    defer_loading: Literal[False] | UnsetType | None = UNSET
    output_schema: UnsetType | None = UNSET


class NamespaceTool(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="namespace"
):
    """Functions under one name. Its description goes before those of its functions."""

    name: Annotated[str, Meta(min_length=1)]
    description: str
    tools: Annotated[list[FunctionTool], Meta(max_length=1024)]


Tool = FunctionTool | NamespaceTool


class CalledName(NamedTuple):
    """A function as the client knows it."""

    namespace: str
    name: str


def chat_name(namespace: str | None, name: str) -> str:
    """Return the name of a function in a chat completion."""
    return f"{namespace}{_SEPARATOR}{name}" if namespace else name


def called_names(tools: Iterable[Any]) -> dict[str, CalledName]:
    """Return the functions of namespaces by their names in a chat completion."""
    return {
        chat_name(tool.name, function.name): CalledName(tool.name, function.name)
        for tool in tools
        if isinstance(tool, NamespaceTool)
        for function in tool.tools
    }


def chat_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the tools of a chat completion. Raises ApiError 400."""
    functions: list[dict[str, Any]] = []
    in_namespaces = called_names(tools)
    counts = Counter[str]()
    for tool in tools:
        namespace = tool if isinstance(tool, NamespaceTool) else None
        for function in tool.tools if isinstance(tool, NamespaceTool) else (tool,):
            if not function.name:
                raise _invalid("a function needs a 'name', beside its 'type'")
            name = chat_name(namespace.name if namespace else None, function.name)
            counts[name] += 1
            if name in in_namespaces and (counts[name] > 1 or len(name) > CHAT_NAME_CHARS_MAX):
                raise _invalid(
                    f"{name[:80]!r}, the name of a function of a namespace, must be the only one"
                    f" and have at most {CHAT_NAME_CHARS_MAX} characters"
                )
            functions.append(_chat_function(name, function, namespace))
    return [{"type": "function", "function": function} for function in functions]


def _chat_function(
    name: str, function: FunctionTool, namespace: NamespaceTool | None
) -> dict[str, Any]:
    description = function.description
    if namespace is not None:
        description = f"{namespace.description}\n{description or ''}".strip()
    fields = {
        "name": name,
        "description": description,
        "parameters": function.parameters,
        "strict": function.strict,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _invalid(reason: str) -> ApiError:
    message = f"cannot use field 'tools': {reason}"
    return ApiError(ErrorCode.INVALID_REQUEST, message, param="tools")
