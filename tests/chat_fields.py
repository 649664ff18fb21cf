"""The fields within the messages, tools and formats of a chat: each is honoured or refused by name.

`CHAT_TYPES` are OpenAI's own types: a field that is new there fails test_openai_fields.py until
someone decides. field_conformance.py sends `HONOURED` and `REFUSED` to our own engines.
llama.cpp would refuse a message of the assistant that is a refusal alone; its agent fills it.
"""

from typing import Any, Final

from openai.types import chat, shared_params
from openai.types.chat import chat_completion_content_part_image_param as image_part
from openai.types.chat import chat_completion_content_part_param as content_part
from openai.types.chat import chat_completion_message_function_tool_call_param as tool_call
from openai.types.shared_params import response_format_json_schema

SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 2}}}
FUNCTION: Final = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": False}
TOOL: Final = {"type": "function", "function": FUNCTION}
CALL: Final = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USER: Final = {"role": "user", "content": "hi"}
CALLED: Final = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def a_part(part: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part]}]}


NO_EFFECT: Final = frozenset({"prompt_cache_breakpoint", "detail"})
"""Every prefix is cached anyway, and an engine reads images at its own size."""

CHAT_TYPES: Final[tuple[tuple[Any, frozenset[str]], ...]] = (
    *(
        (kind, frozenset({"role", "content", "name"}))
        for kind in (
            chat.ChatCompletionSystemMessageParam,
            chat.ChatCompletionDeveloperMessageParam,
            chat.ChatCompletionUserMessageParam,
            chat.ChatCompletionFunctionMessageParam,
        )
    ),
    (
        chat.ChatCompletionAssistantMessageParam,
        frozenset({"role", "content", "name", "refusal", "tool_calls", "function_call", "audio"}),
    ),
    (chat.ChatCompletionToolMessageParam, frozenset({"role", "content", "tool_call_id"})),
    (chat.ChatCompletionContentPartTextParam, frozenset({"type", "text"}) | NO_EFFECT),
    (chat.ChatCompletionContentPartRefusalParam, frozenset({"type", "refusal"})),
    (chat.ChatCompletionContentPartImageParam, frozenset({"type", "image_url"}) | NO_EFFECT),
    (image_part.ImageURL, frozenset({"url"}) | NO_EFFECT),
    (chat.ChatCompletionContentPartInputAudioParam, frozenset({"type", "input_audio"}) | NO_EFFECT),
    (content_part.File, frozenset({"type", "file"}) | NO_EFFECT),
    (chat.ChatCompletionMessageFunctionToolCallParam, frozenset(CALL)),
    (tool_call.Function, frozenset({"name", "arguments"})),
    (chat.ChatCompletionMessageCustomToolCallParam, frozenset({"id", "type", "custom"})),
    (chat.ChatCompletionFunctionToolParam, frozenset(TOOL)),
    (shared_params.FunctionDefinition, frozenset(FUNCTION)),
    (chat.ChatCompletionCustomToolParam, frozenset({"type", "custom"})),
    (chat.ChatCompletionNamedToolChoiceParam, frozenset({"type", "function"})),
    (chat.ChatCompletionAllowedToolChoiceParam, frozenset({"type", "allowed_tools"})),
    (
        chat.ChatCompletionStreamOptionsParam,
        frozenset({"include_usage", "include_obfuscation"}),
    ),
    (chat.ChatCompletionPredictionContentParam, frozenset({"type", "content"})),
    (
        response_format_json_schema.JSONSchema,
        frozenset({"name", "description", "schema", "strict"}),
    ),
)
"""OpenAI's types and the fields of each on which is decided."""

HONOURED: Final[dict[str, dict[str, Any]]] = {
    "name": {"messages": [{**USER, "name": "ann"}]},
    "refusal": {"messages": [USER, {"role": "assistant", "refusal": "no"}, USER]},
    "a text part": a_part({"type": "text", "text": "hi"}),
    "a call and its result": {
        "messages": [USER, CALLED, {"role": "tool", "tool_call_id": "c1", "content": "x"}],
        "tools": [TOOL],
    },
    "a function": {"tools": [TOOL]},
    "json_schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "description": "d", "schema": SCHEMA, "strict": True},
        }
    },
    "a prediction": {"prediction": {"type": "content", "content": "hi"}},
}
REFUSED: Final[dict[str, dict[str, Any]]] = {
    "function_call": {
        "messages": [USER, {"role": "assistant", "function_call": {"name": "f", "arguments": ""}}]
    },
    "audio": {"messages": [USER, {"role": "assistant", "audio": {"id": "a"}}]},
    "uuid": a_part({"type": "text", "text": "hi", "uuid": "u"}),
    "video_url": a_part({"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AAAA"}}),
    "tools": {"tools": [{"type": "custom", "custom": {"name": "f"}}]},
    "include_obfuscation": {"stream": True, "stream_options": {"include_obfuscation": True}},
}
"""By the field that the message names."""

NOT_TEXT: Final = a_part({"type": "file", "file": {"file_id": "f"}})
"""Refused by engines in words of their own."""
