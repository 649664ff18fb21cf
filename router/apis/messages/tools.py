"""The tools of a Messages request, as a chat completion request offers them. Pure.

A tool with `defer_loading` is for a client with many tools: the model gets only the names, and a
tool with which it finds others. What that search returns are blocks `tool_reference`, and the tools
that they name are offered from then on.
"""

from typing import Any

from isochrone.wire.errors import unusable_field
from router.apis.messages.schema import (
    AnyToolChoice,
    AutoToolChoice,
    CountTokensRequest,
    CustomTool,
    NamedTool,
    NoToolChoice,
    ToolReferenceBlock,
    ToolResultBlock,
)


def tool_fields(request: CountTokensRequest) -> dict[str, Any]:
    """Return the fields `tools`, `tool_choice` and `parallel_tool_calls`. Raises ApiError 400."""
    tools = _offered_tools(request)
    if tools:
        return {"tools": [_function_tool(tool) for tool in tools], **_tool_choice(request)}
    if isinstance(request.tool_choice, AnyToolChoice | NamedTool):
        raise unusable_field("tool_choice", "it needs 'tools'")
    return {}


def _offered_tools(request: CountTokensRequest) -> list[CustomTool]:
    """Return the tools that are not deferred, and the others as they were found.

    In this order a tool that is found changes the list at its end only: what precedes it in the
    prompt is still in the prefix cache.
    """
    tools = request.tools or []
    found = _found_names(request)
    deferred = {tool.name: tool for tool in tools if tool.defer_loading}
    if not deferred and not found:
        return tools
    if unknown := found.keys() - {tool.name for tool in tools}:
        raise unusable_field(
            "messages",
            f"no tool of 'tools' has the name {min(unknown)[:128]!r} of a tool_reference",
        )
    offered = [tool for tool in tools if not tool.defer_loading]
    if not offered:
        raise unusable_field(
            "tools", "all have 'defer_loading': at least one must find the others for the model"
        )
    if isinstance(request.tool_choice, NamedTool):
        found[request.tool_choice.name] = None
    return offered + [deferred[name] for name in found if name in deferred]


def _found_names(request: CountTokensRequest) -> dict[str, None]:
    """Return the names in the blocks `tool_reference`, in their order."""
    names = dict[str, None]()
    for message in request.messages:
        blocks = [] if isinstance(message.content, str) else message.content
        for block in blocks:
            if isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                for part in block.content:
                    if isinstance(part, ToolReferenceBlock):
                        names[part.tool_name] = None
    return names


def _function_tool(tool: CustomTool) -> dict[str, Any]:
    parameters = tool.input_schema
    if tool.input_examples:
        parameters = {**parameters, "examples": tool.input_examples}
    function: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": parameters,
    }
    if tool.strict is not None:
        function["strict"] = tool.strict
    fields = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": fields}


def _tool_choice(request: CountTokensRequest) -> dict[str, Any]:
    choice = request.tool_choice
    if choice is None:
        return {}
    if isinstance(choice, NoToolChoice):
        return {"tool_choice": "none"}
    chosen: Any = "auto" if isinstance(choice, AutoToolChoice) else "required"
    if isinstance(choice, NamedTool):
        chosen = {"type": "function", "function": {"name": choice.name}}
    if choice.disable_parallel_tool_use is None:
        return {"tool_choice": chosen}
    is_parallel = not choice.disable_parallel_tool_use
    return {"tool_choice": chosen, "parallel_tool_calls": is_parallel}
