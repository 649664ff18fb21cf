"""What a request asks for: its prompt as bytes, how much text that is, how many answers."""

from typing import Final

import msgspec

from router.apis.openai.schema import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    MessagePart,
    RerankRequest,
)

MESSAGE_BYTES: Final = 12
"""What a template adds to a message, beside the two bytes of ours that set it off."""

OpenAiRequest = ChatRequest | CompletionRequest | EmbeddingRequest | RerankRequest


def rendered(request: OpenAiRequest) -> bytes:
    """Return the prompt as bytes that begin alike where two do; of a reranking, its query."""
    if isinstance(request, ChatRequest):
        said = _bytes("".join([f"\0{one.role}\0{_text(one.content)}" for one in request.messages]))
        # Templates put tools first.
        return bytes(request.tools) + said if request.tools else said
    if isinstance(request, CompletionRequest):
        prompt = request.prompt
        return _bytes(prompt) if isinstance(prompt, str) else msgspec.json.encode(prompt)
    if isinstance(request, EmbeddingRequest):
        return _bytes(request.input) if isinstance(request.input, str) else b""
    return _bytes(request.query)


def text_bytes(request: OpenAiRequest, rendered_bytes: int) -> int:
    """Return how much text there is, a chat template's words included."""
    if isinstance(request, ChatRequest):
        return rendered_bytes + MESSAGE_BYTES * len(request.messages)
    if isinstance(request, RerankRequest):
        # The query is read with each document.
        texts = [one if isinstance(one, str) else one.text for one in request.documents]
        return sum([len(_bytes(text)) + rendered_bytes for text in texts])
    text = request.prompt if isinstance(request, CompletionRequest) else request.input
    return rendered_bytes if isinstance(text, str) else _size(text)


def answers(request: OpenAiRequest) -> int:
    """Return how many answers there are to be: so many to each prompt."""
    count = request.n or 1
    # Chats are asked for first: what a struct is not, it takes ten times as long to say.
    if isinstance(request, ChatRequest) or not isinstance(request, CompletionRequest):
        return count
    prompt = request.prompt
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    return count if is_one else count * len(prompt)


def output_tokens_max(request: OpenAiRequest) -> int | None:
    """Return how many tokens the client allows to each answer, if it says."""
    if isinstance(request, ChatRequest):
        return request.max_completion_tokens or request.max_tokens
    return request.max_tokens


def _size(text: list[str | int | list[int]]) -> int:
    """Return the bytes of several texts; a token id counts as four."""
    size = 0
    for one in text:
        if isinstance(one, str):
            size += len(_bytes(one))
        else:
            size += 4 if isinstance(one, int) else 4 * len(one)
    return size


def _text(content: str | list[MessagePart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join([part.text or "" for part in content])


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")
