"""The OpenAI bodies that the mock takes and gives: as much of them as numbered tokens need."""

from typing import Annotated, Any, Final

import msgspec

from isochrone.wire.errors import ApiError, ErrorCode
from nodeagent.mock.engine import MockRequest

MAX_TOKENS_DEFAULT: Final = 256

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]


class MockTextPart(msgspec.Struct, frozen=True):
    """One part of a message's content; only text is understood."""

    type: str
    text: str = ""


class MockMessage(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str | tuple[MockTextPart, ...] | None = None


class MockRequestBody(msgspec.Struct, frozen=True):
    """`POST /v1/chat/completions` with messages, or `POST /v1/completions` with a prompt."""

    messages: Annotated[tuple[MockMessage, ...], msgspec.Meta(min_length=1)] | None = None
    prompt: str | tuple[str | int, ...] | None = None
    model: str = ""
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: int | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    mock: dict[str, float] | None = None


_decoder = msgspec.json.Decoder(MockRequestBody)


def read(data: bytes) -> MockRequestBody:
    """Decode a body, or raise ApiError saying what is wrong with it."""
    try:
        body = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise _refused(str(error)) from error
    if body.n not in (None, 1):
        raise _refused("one answer a request: n must be 1", "n")
    return body


def asked_of(body: MockRequestBody, *, is_chat: bool, salt: str) -> MockRequest:
    """Return what a body asks for.

    The token after a text that ends in "t41" is t42 where the last message is the assistant's, or
    the text a prompt: a continued answer then shows whether a token was lost or repeated.
    """
    if is_chat:
        told = [(message.role, _text(message)) for message in body.messages or ()]
        words = [word for role, text in told for word in (role, *text.split())]
        goes_on = told[-1][1] if told and told[-1][0] == "assistant" else ""
        tokens = body.max_completion_tokens or body.max_tokens or MAX_TOKENS_DEFAULT
    else:
        goes_on, words = _prompt(body.prompt)
        tokens = body.max_tokens or 16
    if not words:
        raise _refused("nothing is asked", "messages" if is_chat else "prompt")
    last = goes_on.split()[-1:]
    number = last[0].removeprefix("t") if last and last[0].startswith("t") else ""
    first = int(number) + 1 if number.isdigit() else 0
    return MockRequest(words, first, tokens, salt, body.mock or {})


class MockAnswerEncoder:
    """Encodes the answer to one request as chunks, or as one object."""

    def __init__(self, *, is_chat: bool, request_id: str, model: str, created: int) -> None:
        self._is_chat = is_chat
        self._kind = "chat.completion" if is_chat else "text_completion"
        answer_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}"
        self._head = {"id": answer_id, "created": created, "model": model}

    def first(self) -> bytes:
        """Return the frame that names the role; completions have none."""
        return (
            self._frame({"delta": {"role": "assistant", "content": ""}}) if self._is_chat else b""
        )

    def piece(self, text: str, *, is_last: bool) -> bytes:
        """Return the frame of one piece of text."""
        said: dict[str, Any] = {"delta": {"content": text}} if self._is_chat else {"text": text}
        return self._frame(said, "length" if is_last else None)

    def usage(self, usage: dict[str, Any]) -> bytes:
        """Return the frame that tells what was used."""
        return self._event({"choices": [], "usage": usage})

    def whole(self, text: str, usage: dict[str, Any]) -> bytes:
        """Return the answer as one object."""
        said: dict[str, Any] = {"text": text}
        if self._is_chat:
            said = {"message": {"role": "assistant", "content": text}}
        choice = {"index": 0, "finish_reason": "length", **said}
        body = {"object": self._kind, "choices": [choice], "usage": usage}
        return msgspec.json.encode({**self._head, **body})

    def _frame(self, said: dict[str, Any], finish_reason: str | None = None) -> bytes:
        return self._event({"choices": [{"index": 0, "finish_reason": finish_reason, **said}]})

    def _event(self, body: dict[str, Any]) -> bytes:
        kind = f"{self._kind}.chunk" if self._is_chat else self._kind
        return b"data: " + msgspec.json.encode({**self._head, "object": kind, **body}) + b"\n\n"


def used(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """Return OpenAI's form of what a request used, in tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _text(message: MockMessage) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    if any(part.type != "text" for part in message.content):
        raise _refused("only text content is understood by this model", "messages")
    return "".join(part.text for part in message.content)


def _prompt(prompt: str | tuple[str | int, ...] | None) -> tuple[str, list[str]]:
    """Return the text that may be gone on from, and the words."""
    if isinstance(prompt, tuple) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt, prompt.split() or [""]
    if not prompt or any(isinstance(token, str) for token in prompt):
        raise _refused("give one text, or one list of token ids", "prompt")
    return "", [str(token) for token in prompt]


def _refused(what: str, param: str | None = None) -> ApiError:
    return ApiError(ErrorCode.INVALID_REQUEST, f"cannot serve the request: {what}", param=param)
