"""The part of OpenAI's request and response bodies that the mock engine needs."""

from typing import Annotated, Any, Final

import msgspec

from isochrone.wire.errors import ApiError, ErrorCode
from nodeagent.mock.engine import MockRequest

CHAT_TOKENS_DEFAULT: Final = 256
COMPLETION_TOKENS_DEFAULT: Final = 16

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]


class MockTextPart(msgspec.Struct, frozen=True):
    """One part of a message's content; only text parts are accepted."""

    type: str
    text: str = ""


class MockMessage(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str | tuple[MockTextPart, ...] | None = None


class MockRequestBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions` with messages, or `POST /v1/completions` with a prompt.

    Fields of type Any change none of its numbered tokens. Misspelt fields are refused, so that a
    mistake of a router or a test shows.
    """

    messages: Annotated[tuple[MockMessage, ...], msgspec.Meta(min_length=1)] | None = None
    prompt: str | tuple[str | int, ...] | None = None
    model: str = ""
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: int | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    mock: dict[str, float] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    seed: Any = None
    stop: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    ignore_eos: Any = None
    tools: Any = None
    tool_choice: Any = None
    response_format: Any = None
    chat_template_kwargs: Any = None
    reasoning_effort: Any = None
    user: Any = None
    metadata: Any = None
    options: Any = None


_decoder = msgspec.json.Decoder(MockRequestBody)


def decode(data: bytes) -> MockRequestBody:
    """Decode a request body. Raises ApiError."""
    try:
        body = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise _invalid(str(error)) from error
    if body.n not in (None, 1):
        raise _invalid("n must be 1", "n")
    return body


def mock_request(body: MockRequestBody, *, is_chat: bool, salt: str) -> MockRequest:
    """Translate a body into a request. Raises ApiError if it has no prompt.

    If the prompt, or the assistant's last message, ends in "t41", the answer begins with t42. In
    this way a resumed answer shows whether a token was lost or repeated.
    """
    if is_chat:
        texts = [(message.role, _text(message)) for message in body.messages or ()]
        words = [word for role, text in texts for word in (role, *text.split())]
        resumed_text = texts[-1][1] if texts and texts[-1][0] == "assistant" else ""
        max_tokens = body.max_completion_tokens or body.max_tokens or CHAT_TOKENS_DEFAULT
    else:
        resumed_text, words = _prompt(body.prompt)
        max_tokens = body.max_tokens or COMPLETION_TOKENS_DEFAULT
    if not words:
        raise _invalid("the prompt is empty", "messages" if is_chat else "prompt")
    last = resumed_text.split()[-1:]
    number = last[0].removeprefix("t") if last and last[0].startswith("t") else ""
    first_token = int(number) + 1 if number.isdigit() else 0
    return MockRequest(words, first_token, max_tokens, salt, body.mock or {})


class MockAnswerEncoder:
    """Encodes the answer to one request, as the chunks of a stream or as one object."""

    def __init__(self, *, is_chat: bool, request_id: str, model: str, created: int) -> None:
        self._is_chat = is_chat
        self._kind = "chat.completion" if is_chat else "text_completion"
        answer_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}"
        self._head = {"id": answer_id, "created": created, "model": model}

    def first_chunk(self) -> bytes:
        """Return a chat's first chunk, which names the role; "" for a completion."""
        if not self._is_chat:
            return b""
        return self._choice_chunk({"delta": {"role": "assistant", "content": ""}})

    def token_chunk(self, text: str, *, is_last: bool) -> bytes:
        """Return the chunk of one token."""
        content: dict[str, Any] = {"delta": {"content": text}} if self._is_chat else {"text": text}
        return self._choice_chunk(content, "length" if is_last else None)

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """Return the chunk with the usage."""
        return self._chunk({"choices": [], "usage": usage})

    def complete(self, text: str, usage: dict[str, Any]) -> bytes:
        """Return the answer as one object."""
        content: dict[str, Any] = {"text": text}
        if self._is_chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        choice = {"index": 0, "logprobs": None, "finish_reason": "length", **content}
        body = {"object": self._kind, "choices": [choice], "usage": usage}
        return msgspec.json.encode({**self._head, **body})

    def _choice_chunk(self, content: dict[str, Any], finish_reason: str | None = None) -> bytes:
        return self._chunk({"choices": [{"index": 0, "finish_reason": finish_reason, **content}]})

    def _chunk(self, body: dict[str, Any]) -> bytes:
        kind = f"{self._kind}.chunk" if self._is_chat else self._kind
        return b"data: " + msgspec.json.encode({**self._head, "object": kind, **body}) + b"\n\n"


def usage_of(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Return OpenAI's usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _text(message: MockMessage) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    if any(part.type != "text" for part in message.content):
        raise _invalid("this model accepts only text content", "messages")
    return "".join(part.text for part in message.content)


def _prompt(prompt: str | tuple[str | int, ...] | None) -> tuple[str, list[str]]:
    """Return a completion's prompt as the text that may be resumed, and as words."""
    if isinstance(prompt, tuple) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt, prompt.split() or [""]
    if not prompt or any(isinstance(token, str) for token in prompt):
        raise _invalid("expected one string or one list of token ids", "prompt")
    return "", [str(token) for token in prompt]


def _invalid(reason: str, param: str | None = None) -> ApiError:
    return ApiError(ErrorCode.INVALID_REQUEST, f"cannot serve the request: {reason}", param=param)
