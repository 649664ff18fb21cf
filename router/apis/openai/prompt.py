"""Reads a decoded OpenAI request: its prompt as bytes, its text size, its number of answers."""

from typing import Final

import msgspec

from router.apis.openai.schema import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    MessagePart,
    RerankRequest,
    TextlessChat,
)

MESSAGE_BYTES: Final = 12
"""Bytes that a chat template adds to a message, besides our own two separator bytes."""

_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_ROLE_PARTS: Final = {role: f"\0{role}\0".encode() for role in _ROLES}

OpenAiRequest = ChatRequest | CompletionRequest | EmbeddingRequest | RerankRequest


def render_prompt(request: OpenAiRequest) -> bytes:
    """Return the prompt as bytes that have a common prefix where two prompts have one.

    For a reranking request this is its query.
    """
    if isinstance(request, ChatRequest):
        parts: list[str] = []
        for message in request.messages:
            parts += ("\0", message.role, "\0", _text(message.content))
        rendered = _encode("".join(parts))
        # Chat templates put tools first.
        return bytes(request.tools) + rendered if request.tools else rendered
    if isinstance(request, CompletionRequest):
        prompt = request.prompt
        return _encode(prompt) if isinstance(prompt, str) else msgspec.json.encode(prompt)
    if isinstance(request, EmbeddingRequest):
        return _encode(request.input) if isinstance(request.input, str) else b""
    return _encode(request.query)


def render_textless(request: TextlessChat, texts: bytes, ends: list[int]) -> bytes:
    """Return the prompt of a chat whose long texts were taken out, as `render_prompt` does.

    Text number n ends at `ends[n]`; a number as `content` or `text` is that of a text.
    """
    view = memoryview(texts)
    rendered: list[bytes | memoryview] = [bytes(request.tools)]
    for message in request.messages:
        rendered.append(_ROLE_PARTS[message.role])
        content = message.content
        if isinstance(content, list):
            rendered += [_taken(part.text, view, ends) for part in content]
        else:
            rendered.append(_taken(content, view, ends))
    return b"".join(rendered)


def count_text_bytes(request: OpenAiRequest, prompt_bytes: int) -> int:
    """Return the size of all text of a request, with what a chat template adds.

    `prompt_bytes` is the length of `render_prompt`.
    """
    if isinstance(request, ChatRequest):
        return prompt_bytes + MESSAGE_BYTES * len(request.messages)
    if isinstance(request, RerankRequest):
        # The model reads the query again with each document.
        texts = [
            document if isinstance(document, str) else document.text
            for document in request.documents
        ]
        return sum([len(_encode(text)) + prompt_bytes for text in texts])
    text = request.prompt if isinstance(request, CompletionRequest) else request.input
    return prompt_bytes if isinstance(text, str) else _size(text)


def count_answers(request: OpenAiRequest) -> int:
    """Return the number of answers: `n` for each prompt."""
    count = request.n or 1
    # Test for chats first: a negative isinstance test of a struct takes ten times as long.
    if isinstance(request, ChatRequest) or not isinstance(request, CompletionRequest):
        return count
    prompt = request.prompt
    is_single = isinstance(prompt, str) or isinstance(prompt[0], int)
    return count if is_single else count * len(prompt)


def output_tokens_max(request: OpenAiRequest) -> int | None:
    """Return the client's limit of output tokens for each answer, None if it sets none."""
    if isinstance(request, ChatRequest):
        return request.max_completion_tokens or request.max_tokens
    return request.max_tokens


def has_parts(request: ChatRequest) -> bool:
    """Return whether a message consists of parts, of which some may be images."""
    return any(isinstance(message.content, list) for message in request.messages)


def _size(items: list[str | int | list[int]]) -> int:
    """Return the bytes of several texts; a token id counts as four."""
    size = 0
    for item in items:
        if isinstance(item, str):
            size += len(_encode(item))
        else:
            size += 4 if isinstance(item, int) else 4 * len(item)
    return size


def _text(content: str | list[MessagePart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join([part.text or "" for part in content])


def _taken(text: int | str | None, texts: memoryview, ends: list[int]) -> bytes | memoryview:
    """Return a text, which may be a number in `texts`."""
    if isinstance(text, int):
        return texts[ends[text - 1] if text else 0 : ends[text]]
    return _encode(text or "")


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "replace")
