"""The parts of a response's JSON that the router reads: generated text and finish reasons."""

from typing import Any, Final, NamedTuple

import msgspec


class FunctionDelta(msgspec.Struct, frozen=True):
    """The part of a function call that a frame adds."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A tool call of a chat completion, or a part of one."""

    index: int = 0
    id: str | None = None
    function: FunctionDelta = FunctionDelta()


class ChunkDelta(msgspec.Struct):
    """The output that a frame adds to a choice, or the whole message of a complete response.

    vLLM 0.12 and later name the reasoning `reasoning`; earlier ones, and other engines,
    `reasoning_content`.
    """

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None

    @property
    def reasoning_text(self) -> str:
        """The reasoning, whatever the engine calls it."""
        return self.reasoning_content or self.reasoning or ""


class ChunkChoice(msgspec.Struct):
    """One of the alternative answers (`n` of a request) that a response holds."""

    index: int = 0
    delta: ChunkDelta | None = None
    message: ChunkDelta | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string or token that ended the text, if the engine says."""
    matched_stop: str | int | None = None
    """SGLang's name of `stop_reason`."""
    generated_tokens: int = 1
    """The output tokens in a frame. The embedded engine, and the agents of vLLM and SGLang, say it
    where it is not one."""


class ResponseChunk(msgspec.Struct):
    """One stream frame, or a complete response."""

    choices: list[ChunkChoice] = []
    usage: Any = None


class AnswerDelta(NamedTuple):
    """The part of a chat completion's first answer that a frame adds, or the whole answer."""

    reasoning: str
    text: str
    calls: list[ToolCallDelta]
    finish_reason: str | None
    stop_reason: str | int | None
    usage: Any


_CHUNK: Final = msgspec.json.Decoder(ResponseChunk)

_TOOL_CALL: Final = msgspec.json.Decoder(ToolCallDelta)


def decode_chunk(data: bytes) -> ResponseChunk | None:
    """Decode a frame's data; return None if it is not a chunk."""
    try:
        return _CHUNK.decode(data)
    except (ValueError, RecursionError):
        return None


def read_output(data: bytes) -> AnswerDelta | None:
    """Return what the first answer gets from a frame's data, or from a complete response.

    None if the data is neither, or its tool calls cannot be read.
    """
    chunk = decode_chunk(data)
    if chunk is None:
        return None
    choice = chunk.choices[0] if chunk.choices else ChunkChoice()
    delta = choice.delta or choice.message or ChunkDelta()
    try:
        calls = [_TOOL_CALL.decode(raw) for raw in delta.tool_calls or ()]
    except ValueError:
        return None
    if choice.message is not None:
        # Calls of a complete message have no index: each is a call of its own.
        calls = [msgspec.structs.replace(call, index=n) for n, call in enumerate(calls)]
    text = delta.content or ""
    stop_reason = choice.matched_stop if choice.stop_reason is None else choice.stop_reason
    return AnswerDelta(
        delta.reasoning_text, text, calls, choice.finish_reason, stop_reason, chunk.usage
    )
