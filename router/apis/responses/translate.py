"""Translates a Responses request to a chat completion request, which engines understand. Pure.

Field names are from OpenAI's API reference, "Responses". A request for tools that would run in the
router is refused.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from isochrone.wire.errors import unusable_field
from isochrone.wire.http.public_bodies import ReasoningEffort
from router.apis.chat_messages import BETWEEN_TEXTS, arranged
from router.apis.earlier_reasoning import FIELDS as REASONING_FIELDS
from router.apis.earlier_reasoning import decode_reasoning, reasoning_fields
from router.apis.openai.images import refuse_link
from router.apis.openai.schema import (
    Fraction,
    ImageUrl,
    ModelField,
    RefusedOpenAiFields,
    RouterOptions,
    Temperature,
    TokenCount,
)
from router.apis.responses.tools import Tool, chat_name, chat_tools

ITEMS_MAX: Final = 10_000
StoredId = Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]


class ContentPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of an input item's content: a text, or an image: in a `data:` URL, or a link."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | None = None
    detail: str | None = None
    file_id: None = None
    annotations: Any = None
    """Those of an earlier answer, like `logprobs`: no part of the prompt."""
    logprobs: Any = None
    parsed: Any = None
    """Added to an answer's text by OpenAI's helpers for Node.js, which send it back."""
    prompt_cache_breakpoint: Any = None
    """Every prefix is cached while there is space."""


Content = str | Annotated[list[ContentPart], Meta(max_length=1024)]


class SummaryPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the summary of earlier reasoning."""

    type: Literal["summary_text"]
    text: str


class DirectFunctionCaller(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The caller of a function: the model itself, not a program that it wrote."""

    type: Literal["direct"]


class InputItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One item of the input: a message, a function call, or the output of a function.

    No engine sees its unknown fields, so they are refused.
    """

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] = "user"
    content: Content | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: Content = ""
    id: str | None = None
    status: str | None = None
    summary: Annotated[list[SummaryPart], Meta(max_length=1024)] | None = None
    """Of reasoning, whose text may be in `content` or in `encrypted_content` instead."""
    encrypted_content: Any = None
    caller: DirectFunctionCaller | None = None
    is_async: Literal[False] | None = msgspec.field(default=None, name="async")
    namespace: str | None = None
    """Of a function call, and of its output."""
    parsed_arguments: Any = None
    """Those of `arguments`, added to a call by OpenAI's helpers for Node.js."""
    phase: None = None


class NamedToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The one function that the model must call."""

    type: Literal["function"]
    name: str


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The format of the generated text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = "answer"
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`text`: the format of the generated text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`reasoning`: how much a reasoning model should reason.

    With `summary` its reasoning is returned as the summary, unabridged.
    """

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "detailed"] | None = None
    generate_summary: Literal["auto", "detailed"] | UnsetType | None = UNSET
    """The older name of `summary`."""
    context: Literal["auto"] | UnsetType | None = UNSET
    mode: Literal["standard"] | UnsetType | None = UNSET


class ResponsesStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`stream_options`. Events are not padded."""

    include_obfuscation: bool | None = None


class BackgroundOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`background_options`: longer windows are those of `/v1/batches`."""

    completion_window: Literal["soonest"] | None = None


class ConversationReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The conversation that a response continues."""

    id: StoredId


class ResponsesRequest(RefusedOpenAiFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/responses`. No engine sees its unknown fields, so they are refused.

    `stored.py` honours `store`, `background`, `previous_response_id` and `conversation`.
    """

    model: ModelField
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=ITEMS_MAX)]
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    stream: bool | None = None
    tools: Annotated[list[Tool], Meta(max_length=1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    metadata: dict[str, str] | None = None
    client_metadata: dict[str, str] | None = None
    """Codex describes itself here; it changes nothing, like `user`."""
    user: str | None = None
    options: RouterOptions | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    """Reasoning is returned unencrypted, and again in this form for clients that send back no
    other."""
    max_tool_calls: int | None = None
    """Limits built-in tools, which do not exist here."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None

    previous_response_id: StoredId | None = None
    conversation: StoredId | ConversationReference | None = None
    background: bool | None = None
    background_options: BackgroundOptions | None = None

    # Fields that are not supported: see `_refuse_unsupported`.
    prompt: Any = None
    truncation: Literal["auto", "disabled"] | None = None
    top_logprobs: int | None = None
    stream_options: ResponsesStreamOptions | None = None
    access_programs: None = None
    context_management: None = None
    image: None = None

    @property
    def conversation_id(self) -> str:
        """The id of the conversation that is continued; "" without one."""
        conversation = self.conversation
        return (
            conversation.id
            if isinstance(conversation, ConversationReference)
            else conversation or ""
        )


RESPONSES_REQUEST: Final = msgspec.json.Decoder(ResponsesRequest)


def is_summarised(request: ResponsesRequest) -> bool:
    """Return whether reasoning is to be returned as its summary."""
    reasoning = request.reasoning
    return reasoning is not None and bool(reasoning.summary or reasoning.generate_summary)


def to_chat(request: ResponsesRequest, *, may_link: bool = True) -> bytes:
    """Return the body of the equivalent chat completion request. Raises ApiError 400.

    Without `may_link` links to images are refused.
    """
    _refuse_unsupported(request)
    if not may_link and not isinstance(request.input, str):
        refuse_links(request.input, "input")
    chat: dict[str, Any] = {"model": request.model, "messages": _messages(request)}
    optional = {
        "max_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "parallel_tool_calls": request.parallel_tool_calls,
        "options": request.options,
        "service_tier": request.service_tier,
        "prompt_cache_key": request.prompt_cache_key,
    }
    chat |= {name: value for name, value in optional.items() if value is not None}
    if request.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    if request.tools:
        chat["tools"] = chat_tools(request.tools)
    if isinstance(request.tool_choice, NamedToolChoice):
        chat["tool_choice"] = {"type": "function", "function": {"name": request.tool_choice.name}}
    elif request.tool_choice is not None and (request.tools or request.tool_choice != "auto"):
        # Without tools `auto`, OpenAI's default, asks for nothing, and vLLM refuses it.
        chat["tool_choice"] = request.tool_choice
    if request.text is not None and request.text.format is not None:
        chat["response_format"] = _response_format(request.text.format)
    if request.reasoning is not None and request.reasoning.effort is not None:
        chat["reasoning_effort"] = request.reasoning.effort
    return msgspec.json.encode(chat)


def _refuse_unsupported(request: ResponsesRequest) -> None:
    """Raise ApiError 400 for fields that need stored prompts or tools run by the router."""
    unsupported = {
        "prompt": "prompts are not stored: send the text as 'instructions'",
        "top_logprobs": "use POST /v1/chat/completions for log probabilities",
    }
    for field, reason in unsupported.items():
        if getattr(request, field):
            raise unusable_field(field, reason)
    if request.stream_options and request.stream_options.include_obfuscation:
        raise unusable_field("stream_options.include_obfuscation", "events are not padded")
    if request.truncation == "auto":
        raise unusable_field(
            "truncation", "'auto' is not supported: send an input that fits the context"
        )


def refuse_links(items: Sequence[InputItem], field: str) -> None:
    """Raise ApiError 400 if an item, which is in a request's `field`, links to an image."""
    for number, item in enumerate(items):
        for name, content in (("content", item.content), ("output", item.output)):
            if isinstance(content, list):
                for place, part in enumerate(content):
                    where = f"{field}[{number}].{name}[{place}].image_url"
                    refuse_link(part.image_url or "", where)


def check_items(items: Sequence[InputItem], field: str) -> None:
    """Raise ApiError 400, which names `field`, if an item of it cannot be translated."""
    _add_messages([], items, field)


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the input as chat messages."""
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    _add_messages(messages, request.input, "input")
    return arranged(messages)


def _add_messages(messages: list[dict[str, Any]], items: Sequence[InputItem], field: str) -> None:
    """Append the messages of items, which are in a request's `field`. Raises ApiError 400.

    Reasoning belongs to the message or the calls after it. Whether it becomes a part of the prompt
    is for the chat template to decide.
    """
    reasoning, images = "", list[dict[str, Any]]()
    for item in items:
        if item.namespace and not item.type.startswith("function_call"):
            raise unusable_field(field, f"items of type {item.type[:60]!r} have no 'namespace'")
        if item.type == "reasoning":
            reasoning += _reasoning(item, field)
            continue
        if item.type != "function_call_output":
            _add_images(messages, images)
        if item.type == "message":
            messages.append({"role": item.role, "content": _content(item.content or "", field)})
        elif item.type == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(_call(item))
        elif item.type == "function_call_output":
            output = _content(item.output, field)
            if not isinstance(output, str):
                images += [part for part in output if part["type"] == "image_url"]
                output = "".join(part["text"] for part in output if part["type"] == "text")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
        else:
            raise unusable_field(field, f"items of type {item.type[:60]!r} are not supported")
        if messages[-1]["role"] == "assistant":
            before = messages[-1].get(REASONING_FIELDS[0], "")
            messages[-1] |= reasoning_fields(before + reasoning)
        reasoning = ""
    _add_images(messages, images)


def _reasoning(item: InputItem, field: str) -> str:
    """Return the text of reasoning: its summary only if there is no other."""
    text = _text(item.content or "", field) or decode_reasoning(item.encrypted_content)
    return text or BETWEEN_TEXTS.join([part.text for part in item.summary or ()])


def _add_images(messages: list[dict[str, Any]], images: list[dict[str, Any]]) -> None:
    """Append the images of functions' outputs, and forget them.

    A message of a tool is text in most chat templates: images follow all of them.
    """
    if images:
        messages.append({"role": "user", "content": [*images]})
        images.clear()


def _call(item: InputItem) -> dict[str, Any]:
    name = chat_name(item.namespace, item.name)
    function = {"name": name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _content(content: Content, field: str) -> str | list[dict[str, Any]]:
    """Return the content of a message: one text, or parts if it has images. Raises ApiError 400."""
    if isinstance(content, str) or not any(part.type == "input_image" for part in content):
        return _text(content, field)
    parts: list[dict[str, Any]] = []
    for part in content:
        if part.type != "input_image":
            parts.append({"type": "text", "text": _text([part], field)})
        elif part.image_url is None:
            raise unusable_field(field, "an image needs an 'image_url': files are not stored")
        else:
            image = {"url": part.image_url, **({"detail": part.detail} if part.detail else {})}
            parts.append({"type": "image_url", "image_url": image})
    return parts


def _text(content: Content, field: str) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.text is None and part.refusal is None:
            raise unusable_field(
                field, f"parts of type {part.type[:60]!r} are not supported, only text"
            )
    return "".join(part.text or part.refusal or "" for part in content)


def _response_format(text_format: TextFormat) -> dict[str, Any]:
    if text_format.type != "json_schema":
        return {"type": text_format.type}
    schema: dict[str, Any] = {"name": text_format.name, "schema": text_format.schema or {}}
    optional = {"description": text_format.description, "strict": text_format.strict}
    schema |= {name: value for name, value in optional.items() if value is not None}
    return {"type": "json_schema", "json_schema": schema}
