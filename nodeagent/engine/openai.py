"""The OpenAI bodies an engine takes and gives: decoding with limits, encoding as frames. Pure."""

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec

from isochrone.wire.errors import ApiError, ErrorCode
from nodeagent.engine.decide.sequence import TOP_LOGPROBS_MAX, Sampling

DONE: Final = b"data: [DONE]\n\n"
MAX_TOKENS_DEFAULT: Final = 256
STOPS_MAX: Final = 16

Finite = Annotated[float, msgspec.Meta(ge=-100, le=100)]


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
    temperature: Annotated[float, msgspec.Meta(ge=0, le=10)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] = ()
    frequency_penalty: Finite | None = None
    presence_penalty: Finite | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=100)] | None = None
    logit_bias: dict[str, Finite] | None = None
    n: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    response_format: dict[str, Any] | None = None
    mock: dict[str, float] | None = None


class ChatBody(_Asked, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[tuple[Message, ...], msgspec.Meta(min_length=1, max_length=10_000)]
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    tools: tuple[Any, ...] = ()


class CompletionBody(_Asked, frozen=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | tuple[str | int, ...]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    echo: bool = False


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine is asked for, whichever body it came in."""

    request_id: str
    messages: tuple[tuple[str, str], ...] = ()
    prompt: str | tuple[int, ...] = ""
    max_tokens: int | None = None
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    salt: bytes = b""
    mock: dict[str, float] = {}


class TokenLogprob(msgspec.Struct, frozen=True):
    """One token's log probability, and those of the likeliest in its place."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


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
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None


_chat = msgspec.json.Decoder(ChatBody)
_completion = msgspec.json.Decoder(CompletionBody)


def decode_chat(body: bytes, request_id: str, salt: bytes) -> tuple[ChatBody, GenerateRequest]:
    """Decode a chat body, or raise ApiError saying what is wrong with it."""
    asked = _decode(body, _chat)
    _refuse_unsupported(asked)
    if asked.tools:
        raise _invalid("tools", "this engine does not call tools yet")
    request = GenerateRequest(
        request_id=request_id,
        messages=tuple((message.role, message.text) for message in asked.messages),
        max_tokens=asked.max_completion_tokens or asked.max_tokens,
        sampling=_sampling(asked, (asked.top_logprobs or 0) if asked.logprobs else None),
        stop=_stops(asked.stop),
        stop_token_ids=asked.stop_token_ids,
        ignore_eos=asked.ignore_eos,
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
    if asked.echo:
        raise _invalid("echo", "echo is not supported")
    request = GenerateRequest(
        request_id=request_id,
        prompt=_prompt(asked.prompt),
        max_tokens=asked.max_tokens or 16,
        sampling=_sampling(asked, asked.logprobs),
        stop=_stops(asked.stop),
        stop_token_ids=asked.stop_token_ids,
        ignore_eos=asked.ignore_eos,
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
        return self._frame([self._choice({"role": "assistant", "content": ""}, None, ())])

    def piece(self, piece: Piece) -> bytes:
        """Return the frame of one piece of text."""
        if self._is_chat:
            delta: Any = {"content": piece.text} if piece.text or not piece.finish_reason else {}
        else:
            delta = piece.text
        return self._frame([self._choice(delta, piece.finish_reason, piece.logprobs)])

    def usage(self, usage: Usage) -> bytes:
        """Return the frame that tells what was used."""
        return self._frame([], usage)

    def whole(
        self, text: str, logprobs: Sequence[TokenLogprob], finish_reason: str, usage: Usage
    ) -> bytes:
        """Return the answer as one object."""
        if self._is_chat:
            choice: dict[str, Any] = {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "logprobs": _logprobs(logprobs) if logprobs else None,
                "finish_reason": finish_reason,
            }
        else:
            choice = {
                "index": 0,
                "text": text,
                "logprobs": _logprobs(logprobs) if logprobs else None,
                "finish_reason": finish_reason,
            }
        body = {"object": self._kind, "choices": [choice], "usage": usage.as_json()}
        return msgspec.json.encode({**self._head, **body})

    def _choice(
        self, delta: Any, finish_reason: str | None, logprobs: Sequence[TokenLogprob]
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
        choice["delta" if self._is_chat else "text"] = delta
        if logprobs:
            choice["logprobs"] = _logprobs(logprobs)
        return choice

    def _frame(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> bytes:
        kind = f"{self._kind}.chunk" if self._is_chat else self._kind
        body: dict[str, Any] = {**self._head, "object": kind, "choices": choices}
        if usage is not None:
            body["usage"] = usage.as_json()
        return b"data: " + msgspec.json.encode(body) + b"\n\n"


def error_frame(error: ApiError) -> bytes:
    """Return an error as the last event of a stream: never a silent cut."""
    return b"data: " + error_body(error) + b"\n\n"


def error_body(error: ApiError) -> bytes:
    """Return an error in OpenAI's shape."""
    kind = "invalid_request_error" if error.meaning.status < 500 else "server_error"
    return msgspec.json.encode(
        {
            "error": {
                "message": error.message,
                "type": kind,
                "param": error.param,
                "code": error.code.value,
            }
        }
    )


def _decode(body: bytes, reader: "msgspec.json.Decoder[Any]") -> Any:
    try:
        return reader.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(ErrorCode.INVALID_REQUEST, f"cannot read the request: {what}") from error


def _refuse_unsupported(asked: _Asked) -> None:
    if asked.n not in (None, 1):
        raise _invalid("n", "one answer a request: n must be 1")
    kind = (asked.response_format or {}).get("type", "text")
    if kind != "text":
        raise _invalid("response_format", f"response_format {str(kind)[:40]!r} is not supported")


def _prompt(prompt: str | tuple[str | int, ...]) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and isinstance(prompt[0], str):
        return prompt[0]
    tokens = tuple(token for token in prompt if isinstance(token, int))
    if not tokens or len(tokens) != len(prompt):
        raise _invalid("prompt", "give one text, or one list of token ids")
    return tokens


def _sampling(asked: _Asked, logprobs: int | None) -> Sampling:
    bias = asked.logit_bias or {}
    if not all(key.lstrip("-").isdigit() for key in bias):
        raise _invalid("logit_bias", "its keys are token ids")
    return Sampling(
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        top_k=max(0, asked.top_k or 0),
        min_p=asked.min_p or 0.0,
        seed=asked.seed,
        frequency_penalty=asked.frequency_penalty or 0.0,
        presence_penalty=asked.presence_penalty or 0.0,
        repetition_penalty=asked.repetition_penalty or 1.0,
        logit_bias=tuple((int(key), value) for key, value in bias.items()),
        logprobs=logprobs,
    )


def _stops(stop: str | tuple[str, ...] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else (stop or ())
    if len(stops) > STOPS_MAX or any(not text or len(text) > 512 for text in stops):
        raise _invalid("stop", f"at most {STOPS_MAX} stop strings of 1 to 512 letters")
    return stops


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {
        "content": [
            {
                "token": entry.token,
                "logprob": entry.logprob,
                "bytes": list(entry.token.encode()),
                "top_logprobs": [
                    {"token": token, "logprob": logprob, "bytes": list(token.encode())}
                    for token, logprob in entry.top
                ],
            }
            for entry in tokens
        ]
    }


def _invalid(param: str, what: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_REQUEST, f"cannot serve the request: {what}", param=param)
