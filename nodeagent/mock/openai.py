"""The OpenAI bodies that the mock takes and gives: as much of them as numbered tokens need."""

from typing import Annotated, Any, Final

import msgspec

from isochrone.wire.errors import ApiError, ErrorCode

DONE: Final = b"data: [DONE]\n\n"
MAX_TOKENS_DEFAULT: Final = 256


class TextPart(msgspec.Struct, frozen=True):
    """One part of a message's content; only text is understood."""

    type: str
    text: str = ""


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
    content: str | tuple[TextPart, ...] | None = None

    @property
    def text(self) -> str:
        """Return the content as text, or raise ApiError where it is not text."""
        if self.content is None:
            return ""
        if isinstance(self.content, str):
            return self.content
        if any(part.type != "text" for part in self.content):
            raise _invalid("messages", "only text content is understood by this model")
        return "".join(part.text for part in self.content)


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream says beside its tokens."""

    include_usage: bool = False


class _Asked(msgspec.Struct, frozen=True, kw_only=True):
    model: str = ""
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31)] | None = None
    n: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    mock: dict[str, float] | None = None


class ChatBody(_Asked, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[tuple[Message, ...], msgspec.Meta(min_length=1, max_length=10_000)]
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31)] | None = None


class CompletionBody(_Asked, frozen=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | tuple[str | int, ...]


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine is asked for, whichever body it came in."""

    request_id: str
    messages: tuple[tuple[str, str], ...] = ()
    prompt: str | tuple[int, ...] = ""
    max_tokens: int | None = None
    salt: bytes = b""
    mock: dict[str, float] = {}


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a request used, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's form."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A part of an answer: some text, and at the end why it ended and what it used."""

    text: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None


_chat = msgspec.json.Decoder(ChatBody)
_completion = msgspec.json.Decoder(CompletionBody)


def decode_chat(body: bytes, request_id: str, salt: bytes) -> tuple[ChatBody, GenerateRequest]:
    """Decode a chat body, or raise ApiError saying what is wrong with it."""
    asked = _decode(body, _chat)
    _refuse_unsupported(asked)
    request = GenerateRequest(
        request_id=request_id,
        messages=tuple((message.role, message.text) for message in asked.messages),
        max_tokens=asked.max_completion_tokens or asked.max_tokens,
        salt=salt,
        mock=asked.mock or {},
    )
    return asked, request


def decode_completion(
    body: bytes, request_id: str, salt: bytes
) -> tuple[CompletionBody, GenerateRequest]:
    """Decode a completion body, or raise ApiError saying what is wrong with it."""
    asked = _decode(body, _completion)
    _refuse_unsupported(asked)
    request = GenerateRequest(
        request_id=request_id,
        prompt=_prompt(asked.prompt),
        max_tokens=asked.max_tokens or 16,
        salt=salt,
        mock=asked.mock or {},
    )
    return asked, request


class Encoder:
    """Encodes the answer to one request as chunks, or as one object."""

    def __init__(self, *, is_chat: bool, answer_id: str, model: str, created: int) -> None:
        self._is_chat = is_chat
        kind = "chat.completion" if is_chat else "text_completion"
        self._head = {"id": answer_id, "created": created, "model": model}
        self._kind = kind

    def first(self) -> bytes:
        """Return the frame that names the role; completions have none."""
        if not self._is_chat:
            return b""
        return self._frame([self._choice({"role": "assistant", "content": ""}, None)])

    def piece(self, piece: Piece) -> bytes:
        """Return the frame of one piece of text."""
        if self._is_chat:
            delta: Any = {"content": piece.text} if piece.text or not piece.finish_reason else {}
        else:
            delta = piece.text
        return self._frame([self._choice(delta, piece.finish_reason)])

    def usage(self, usage: Usage) -> bytes:
        """Return the frame that tells what was used."""
        return self._frame([], usage)

    def whole(self, text: str, finish_reason: str, usage: Usage) -> bytes:
        """Return the answer as one object."""
        if self._is_chat:
            choice: dict[str, Any] = {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": finish_reason,
            }
        else:
            choice = {
                "index": 0,
                "text": text,
                "finish_reason": finish_reason,
            }
        body = {"object": self._kind, "choices": [choice], "usage": usage.as_json()}
        return msgspec.json.encode({**self._head, **body})

    def _choice(self, delta: Any, finish_reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
        choice["delta" if self._is_chat else "text"] = delta
        return choice

    def _frame(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> bytes:
        kind = f"{self._kind}.chunk" if self._is_chat else self._kind
        body: dict[str, Any] = {**self._head, "object": kind, "choices": choices}
        if usage is not None:
            body["usage"] = usage.as_json()
        return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _decode(body: bytes, reader: "msgspec.json.Decoder[Any]") -> Any:
    try:
        return reader.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(ErrorCode.INVALID_REQUEST, f"cannot read the request: {what}") from error


def _refuse_unsupported(asked: _Asked) -> None:
    if asked.n not in (None, 1):
        raise _invalid("n", "one answer a request: n must be 1")


def _prompt(prompt: str | tuple[str | int, ...]) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and isinstance(prompt[0], str):
        return prompt[0]
    tokens = tuple(token for token in prompt if isinstance(token, int))
    if not tokens or len(tokens) != len(prompt):
        raise _invalid("prompt", "give one text, or one list of token ids")
    return tokens


def _invalid(param: str, what: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_REQUEST, f"cannot serve the request: {what}", param=param)
