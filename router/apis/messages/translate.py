"""Translates a Messages request to a chat completion request, which engines understand. Pure.

Anthropic puts the results of tools into messages of the user; chat templates expect a message of
the role `tool` for each. Its images go to the engine as `data:` URLs.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from isochrone.wire.errors import unusable_field
from router.apis.chat_messages import BETWEEN_TEXTS, arranged, content_parts
from router.apis.earlier_reasoning import reasoning_fields
from router.apis.messages.schema import (
    Base64Image,
    ContentBlock,
    CountTokensRequest,
    DocumentBlock,
    ImageBlock,
    InputMessage,
    LinkedImage,
    MessagesRequest,
    TextBlock,
    ThinkingAdaptive,
    ThinkingBlock,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from router.apis.messages.tools import tool_fields
from router.apis.openai.images import refuse_link

TOOL_FAILED: Final = "Error: "
"""The prefix of the result of a tool that failed: chat templates have no field for that."""

TOOL_FOUND: Final = "Tool found, and now available: "
"""The text of a `tool_reference`, before the tool's name. The tool itself is among the chat's
tools."""

BILLING_LINE: Final = "x-anthropic-billing-header:"
"""The prefix of a block of the system prompt that some clients fill with another value in each
request. The block is left out of the prompt: with it no prefix would ever be cached."""

SYSTEM_BLOCKS: Final = (TextBlock, DocumentBlock)
USER_BLOCKS: Final = (*SYSTEM_BLOCKS, ImageBlock, ToolResultBlock)
ASSISTANT_BLOCKS: Final = (TextBlock, ThinkingBlock, ToolUseBlock)


def to_chat(
    request: MessagesRequest, *, fills_context: bool = False, may_link: bool = True
) -> bytes:
    """Return the body of the equivalent chat completion request. Raises ApiError 400.

    With `fills_context` the answer may be as long as the context allows, whatever `max_tokens` is.
    Without `may_link` links to images are refused.
    """
    thinking = request.thinking
    if isinstance(thinking, ThinkingEnabled) and thinking.budget_tokens >= request.max_tokens:
        raise unusable_field(
            "thinking.budget_tokens",
            f"it is {thinking.budget_tokens}, and must be less than 'max_tokens'"
            f" ({request.max_tokens})",
        )
    chat = _conversation(request, may_link=may_link)
    optional = {
        "max_tokens": None if fills_context else request.max_tokens,
        "stop": request.stop_sequences,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
    }
    chat |= {name: value for name, value in optional.items() if value is not None}
    if request.output_config is not None and request.output_config.format is not None:
        schema = {"name": "answer", "schema": request.output_config.format.schema, "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if request.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode(chat)


def to_tokenize(request: CountTokensRequest, *, may_link: bool = True) -> bytes:
    """Return the body with which an engine counts the tokens of the same chat."""
    return msgspec.json.encode(_conversation(request, may_link=may_link))


def _conversation(request: CountTokensRequest, *, may_link: bool) -> dict[str, Any]:
    """Return the fields that make the prompt."""
    if not may_link:
        for number, message in enumerate(request.messages):
            _refuse_links(message.content, f"messages[{number}].content")
    chat: dict[str, Any] = {"model": request.model, "messages": _messages(request)}
    if chat["messages"][-1]["role"] == "assistant" and not chat["messages"][-1].get("tool_calls"):
        # Anthropic continues an answer that the client began. Options of vLLM and SGLang.
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    chat |= tool_fields(request)
    if isinstance(request.thinking, ThinkingDisabled):
        chat["chat_template_kwargs"] = {"enable_thinking": False}
    elif isinstance(request.thinking, ThinkingEnabled | ThinkingAdaptive):
        chat["chat_template_kwargs"] = {"enable_thinking": True}
    if request.output_config is not None and request.output_config.effort is not None:
        chat["reasoning_effort"] = request.output_config.effort
    return chat


def _refuse_links(content: str | Sequence[Any] | None, field: str) -> None:
    """Raise ApiError 400 if blocks, or those of tools' results, link to an image."""
    for place, block in enumerate(() if isinstance(content, str) else content or ()):
        if isinstance(block, ToolResultBlock):
            _refuse_links(block.content, f"{field}[{place}].content")
        elif isinstance(block, ImageBlock) and isinstance(block.source, LinkedImage):
            refuse_link(block.source.url, f"{field}[{place}].source.url")


def _messages(request: CountTokensRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    system = _system_text(request.system)
    if system:
        messages.append({"role": "system", "content": system})
    for message in request.messages:
        messages += _translate_message(message)
    messages = arranged(messages)
    if not any(message["role"] != "system" for message in messages):
        raise unusable_field("messages", "no message has any content")
    return messages


def _system_text(system: str | Sequence[TextBlock] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    texts = [block.text for block in system if not block.text.startswith(BILLING_LINE)]
    return BETWEEN_TEXTS.join(texts)


def _translate_message(message: InputMessage) -> list[dict[str, Any]]:
    """Return the chat messages of one message; several if it has results of tools."""
    content = message.content
    blocks = [TextBlock(text=content)] if isinstance(content, str) else content
    if message.role == "assistant":
        return [_assistant_message(blocks)]
    _check_blocks(message.role, blocks, SYSTEM_BLOCKS if message.role == "system" else USER_BLOCKS)
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            text, images = _tool_result(block)
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
            # A message of a tool is text in most chat templates: images follow it.
            parts += images
        else:
            parts.append(_part(block))
    if not parts:
        return results
    return [*results, {"role": message.role, "content": _content(parts)}]


def _assistant_message(blocks: Sequence[ContentBlock]) -> dict[str, Any]:
    _check_blocks("assistant", blocks, ASSISTANT_BLOCKS)
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [_tool_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    message: dict[str, Any] = {"role": "assistant", "content": BETWEEN_TEXTS.join(texts)}
    message |= reasoning_fields(BETWEEN_TEXTS.join(filter(None, thoughts)))
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = calls
    return message


def _check_blocks(
    role: str, blocks: Sequence[ContentBlock], allowed: tuple[type[msgspec.Struct], ...]
) -> None:
    for block in blocks:
        if not isinstance(block, allowed):
            kind = block.__struct_config__.tag
            raise unusable_field(
                "messages", f"a message of role '{role}' must not have a block of type '{kind}'"
            )


def _content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return parts as a message's content: one text if there are no images."""
    if any(part["type"] != "text" for part in parts):
        return parts
    return BETWEEN_TEXTS.join(part["text"] for part in parts)


def _part(block: ContentBlock | ToolReferenceBlock) -> dict[str, Any]:
    if isinstance(block, ImageBlock):
        source = block.source
        if isinstance(source, Base64Image):
            url = f"data:{source.media_type};base64,{source.data}"
        else:
            url = source.url
        return {"type": "image_url", "image_url": {"url": url}}
    if isinstance(block, DocumentBlock):
        texts = [text for text in (block.title, block.context, block.source.data) if text]
        return {"type": "text", "text": BETWEEN_TEXTS.join(texts)}
    if isinstance(block, ToolReferenceBlock):
        return {"type": "text", "text": TOOL_FOUND + block.tool_name}
    assert isinstance(block, TextBlock)
    return {"type": "text", "text": block.text}


def _tool_result(block: ToolResultBlock) -> tuple[str, list[dict[str, Any]]]:
    """Return the text and the images of a tool's result."""
    content = block.content or ""
    parts = (
        content_parts(content) if isinstance(content, str) else [_part(item) for item in content]
    )
    text = BETWEEN_TEXTS.join(part["text"] for part in parts if part["type"] == "text")
    images = [part for part in parts if part["type"] != "text"]
    return (TOOL_FAILED + text if block.is_error else text), images


def _tool_call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = msgspec.json.encode(block.input).decode()
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}
