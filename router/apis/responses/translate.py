"""From a Responses body to a chat completion's, which the corridor and the engines speak. Pure.

Field names are those of OpenAI's API reference, "Responses". What would need memory of earlier
requests, or tools that run here, is refused in words.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from isochrone.wire.errors import ApiError, ErrorCode
from router.apis.openai.schema import ModelField, RouterOptions, Share, Temperature, TokenCount

ITEMS_MAX: Final = 10_000


class ContentPart(msgspec.Struct, frozen=True):
    """A part of an item's content; only text is taken."""

    type: str
    text: str | None = None
    refusal: str | None = None


Content = str | Annotated[list[ContentPart], Meta(max_length=1024)]


class InputItem(msgspec.Struct, frozen=True):
    """One item of the input: a message, a call of a function, or what the function gave."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] = "user"
    content: Content | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: Content = ""


class FunctionTool(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedToolChoice(msgspec.Struct, frozen=True):
    """The one function to call."""

    type: Literal["function"]
    name: str


class TextFormat(msgspec.Struct, frozen=True):
    """What the text is to be."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = "answer"
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextSettings(msgspec.Struct, frozen=True):
    """How the text is wanted."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningSettings(msgspec.Struct, frozen=True):
    """How much a model that reasons should."""

    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/responses`."""

    model: ModelField
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=ITEMS_MAX)]
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    stream: bool | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    options: RouterOptions | None = None

    # What cannot be served: see `_refuse`.
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    top_logprobs: int | None = None


RESPONSES_REQUEST: Final = msgspec.json.Decoder(ResponsesRequest)


def to_chat(wish: ResponsesRequest) -> bytes:
    """Return the body of the chat completion that asks for the same, or raise ApiError 400."""
    _refuse(wish)
    chat: dict[str, Any] = {"model": wish.model, "messages": _messages(wish)}
    given = {
        "max_tokens": wish.max_output_tokens,
        "temperature": wish.temperature,
        "top_p": wish.top_p,
        "parallel_tool_calls": wish.parallel_tool_calls,
        "options": wish.options,
    }
    chat |= {name: value for name, value in given.items() if value is not None}
    if wish.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    if wish.tools:
        chat["tools"] = [{"type": "function", "function": _function(tool)} for tool in wish.tools]
    if isinstance(wish.tool_choice, NamedToolChoice):
        chat["tool_choice"] = {"type": "function", "function": {"name": wish.tool_choice.name}}
    elif wish.tool_choice is not None:
        chat["tool_choice"] = wish.tool_choice
    if wish.text is not None and wish.text.format is not None:
        chat["response_format"] = _response_format(wish.text.format)
    if wish.reasoning is not None and wish.reasoning.effort is not None:
        chat["reasoning_effort"] = wish.reasoning.effort
    return msgspec.json.encode(chat)


def _refuse(wish: ResponsesRequest) -> None:
    """Raise ApiError 400 for what needs memory, or what runs elsewhere than in the engine."""
    refusals = {
        "previous_response_id": "no response is stored: send the earlier items as input",
        "conversation": "no conversation is stored: send its items as input",
        "prompt": "no prompt is stored: send its text as instructions",
        "background": "a response is not stored for later: ask with stream",
        "top_logprobs": "ask POST /v1/chat/completions for log probabilities",
    }
    for field, why in refusals.items():
        if getattr(wish, field):
            raise _refused(field, f"cannot use {field}: {why}")
    if wish.truncation == "auto":
        raise _refused("truncation", "cannot use truncation auto: send what fits the context")
    for tool in wish.tools or ():
        if tool.type != "function":
            raise _refused("tools", f"cannot use the tool {tool.type[:60]!r}: only functions")
        if not tool.name:
            raise _refused("tools", "cannot use a function without a name: it stands beside type")


def _messages(wish: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the input as messages of a chat."""
    messages: list[dict[str, Any]] = []
    if wish.instructions:
        messages.append({"role": "system", "content": wish.instructions})
    if isinstance(wish.input, str):
        return [*messages, {"role": "user", "content": wish.input}]
    for item in wish.input:
        if item.type == "message":
            messages.append({"role": item.role, "content": _text(item.content or "")})
        elif item.type == "function_call":
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif item.type == "function_call_output":
            told = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
            messages.append(told)
        elif item.type != "reasoning":
            raise _refused("input", f"cannot read an item of type {item.type[:60]!r}")
    return messages


def _text(content: Content) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.text is None and part.refusal is None:
            raise _refused("input", f"cannot read a part of type {part.type[:60]!r}: only text")
    return "".join(part.text or part.refusal or "" for part in content)


def _function(tool: FunctionTool) -> dict[str, Any]:
    given = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return {name: value for name, value in given.items() if value is not None}


def _response_format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    schema: dict[str, Any] = {"name": wanted.name, "schema": wanted.schema or {}}
    if wanted.strict is not None:
        schema["strict"] = wanted.strict
    return {"type": "json_schema", "json_schema": schema}


def _refused(param: str, message: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_REQUEST, message, param=param)
